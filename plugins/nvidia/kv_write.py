"""Triton kernels that store a step's keys and values: ``KVCacheWrite`` and ``QuantKVCacheWrite`` of ``plugins.schema``.

One program a token and KV head (grid ``(T, HK)``), one warp is enough. Arguments are those of the operator, inputs
before outputs, as a TensorRT plugin passes them. Outputs are the inputs' memory: kernels store through the outputs.
"""

import triton
import triton.language as tl

from trtcb.plugins.nvidia.codes import FLOAT16_MAX, finite, quantize

BFLOAT16_MAX = tl.constexpr(3.3895313892515355e38)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def store_head(x, pool, scale_pool, source, target, D: tl.constexpr, FORMAT: tl.constexpr):
    """Encode head ``source`` of the step into head ``target`` of the pool; both count heads of ``D`` elements."""
    d = tl.arange(0, D)
    values = tl.load(x + source * D + d).to(tl.float32)
    if FORMAT == "none":
        dtype: tl.constexpr = pool.dtype.element_ty
        limit: tl.constexpr = (
            FLOAT16_MAX if dtype == tl.float16 else BFLOAT16_MAX if dtype == tl.bfloat16 else FLOAT32_MAX
        )
        tl.store(pool + target * D + d, finite(values, limit).to(dtype))
    else:
        scale, raw = quantize(values, FORMAT)
        tl.store(pool + target * D + d, raw)
        tl.store(scale_pool + target, scale)


@triton.jit
def kv_cache_write(k, v, k_pool, v_pool, slot_mapping, k_pool_out, v_pool_out, HK: tl.constexpr, D: tl.constexpr):
    """Store in a float type. ``k``, ``v`` ``[T, HK, D]``; pools ``[SLOTS, HK, D]``; ``slot_mapping`` int32 ``[T]``."""
    token, head = tl.program_id(0), tl.program_id(1)
    source = token.to(tl.int64) * HK + head
    target = tl.load(slot_mapping + token).to(tl.int64) * HK + head
    store_head(k, k_pool_out, k_pool_out, source, target, D, "none")
    store_head(v, v_pool_out, v_pool_out, source, target, D, "none")


@triton.jit
def quant_kv_cache_write(
    k,
    v,
    k_pool,
    v_pool,
    k_scale_pool,
    v_scale_pool,
    slot_mapping,
    k_pool_out,
    v_pool_out,
    k_scale_pool_out,
    v_scale_pool_out,
    HK: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Store as raw bytes (int8 pools) with a scale a token and head (fp16 ``[SLOTS, HK]``)."""
    token, head = tl.program_id(0), tl.program_id(1)
    source = token.to(tl.int64) * HK + head
    target = tl.load(slot_mapping + token).to(tl.int64) * HK + head
    store_head(k, k_pool_out, k_scale_pool_out, source, target, D, FORMAT)
    store_head(v, v_pool_out, v_scale_pool_out, source, target, D, FORMAT)
