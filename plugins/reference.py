"""What every operator of this project means, in slow and obvious numpy: kernels and graphs are tested against it.

Layout of the portable pool (the ONNX operators' layout): values ``[num_slots, num_kv_heads, head_dim]``, scales
``[num_slots, num_kv_heads]`` fp16, where ``slot = block * block_size + offset``. Quantised values are raw bytes in
``int8`` arrays (e4m3 bit patterns for fp8), because neither numpy nor most runtimes know the type.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtcb.spec import KVDtype

Array = npt.NDArray[np.generic]
Float32 = npt.NDArray[np.float32]
Float16 = npt.NDArray[np.float16]
Int32 = npt.NDArray[np.int32]

STORAGE_DTYPE: Mapping[KVDtype, np.dtype[np.generic]] = MappingProxyType(
    {
        KVDtype.FP32: np.dtype(np.float32),
        KVDtype.BF16: np.dtype(ml_dtypes.bfloat16),
        KVDtype.FP16: np.dtype(np.float16),
        KVDtype.INT8: np.dtype(np.int8),
        KVDtype.FP8: np.dtype(np.int8),
    }
)
"""Numpy type of a pool's elements."""

QUANT_MAX: Mapping[KVDtype, float] = MappingProxyType({KVDtype.INT8: 127.0, KVDtype.FP8: 448.0})
"""Largest magnitude of a quantised element before its scale."""

SCALE_FLOOR = 2.0**-14
"""Smallest stored scale: the smallest *normal* fp16, so that dividing by it is exact enough and never by zero."""

FINITE_LIMIT: Mapping[KVDtype, float] = MappingProxyType(
    {
        KVDtype.FP32: float(np.finfo(np.float32).max),
        KVDtype.BF16: 3.3895313892515355e38,
        KVDtype.FP16: 65504.0,
        KVDtype.INT8: 65504.0,
        KVDtype.FP8: 65504.0,
    }
)
"""Magnitude at which a key or value saturates before it is stored. Quantised formats saturate where fp16 does: their
scale (amax / 127) then always fits fp16."""


@dataclass(frozen=True, slots=True)
class KVPools:
    """Keys and values of one layer in the portable layout; the scales exist for quantised formats only."""

    kv_dtype: KVDtype
    k: Array
    v: Array
    k_scale: Float16 | None = None
    v_scale: Float16 | None = None

    @staticmethod
    def zeros(kv_dtype: KVDtype, num_slots: int, num_kv_heads: int, head_dim: int) -> "KVPools":
        """Empty pools. Zeroed, because attention may multiply never-written elements by a probability of 0."""
        shape = (num_slots, num_kv_heads, head_dim)
        k, v = (np.zeros(shape, STORAGE_DTYPE[kv_dtype]) for _ in range(2))
        if not kv_dtype.is_quantized:
            return KVPools(kv_dtype, k, v)
        k_scale, v_scale = (np.zeros(shape[:2], np.float16) for _ in range(2))
        return KVPools(kv_dtype, k, v, k_scale, v_scale)


def to_finite(x: Array, kv_dtype: KVDtype) -> Float32:
    """fp32 without NaN (becomes 0) or infinities (saturate), lest a freed block hand its next owner a 0 * NaN."""
    values = x.astype(np.float32)
    limit = np.float32(FINITE_LIMIT[kv_dtype])
    return np.clip(np.where(np.isnan(values), np.float32(0), values), -limit, limit)


def quantize(x: Array, kv_dtype: KVDtype) -> tuple[npt.NDArray[np.int8], Float16]:
    """``x: [..., D]`` to raw bytes ``[..., D]`` and one scale per vector ``[...]``, computed from that vector alone.

    The scale is rounded to fp16 *first* and the values are divided by what was stored, so reading back is consistent. A
    negative zero quotient counts as positive zero, which makes the bytes independent of how a kernel forms the sign.
    """
    values = to_finite(x, kv_dtype)
    maximum = np.float32(QUANT_MAX[kv_dtype])
    amax = np.max(np.abs(values), axis=-1)
    scale = np.maximum(amax / maximum, np.float32(SCALE_FLOOR)).astype(np.float16)
    quotient = values / scale.astype(np.float32)[..., None] + np.float32(0)
    if kv_dtype is KVDtype.INT8:
        return np.clip(np.rint(quotient), -maximum, maximum).astype(np.int8), scale
    return np.clip(quotient, -maximum, maximum).astype(ml_dtypes.float8_e4m3fn).view(np.int8), scale


def dequantize(values: npt.NDArray[np.int8], scale: Float16, kv_dtype: KVDtype) -> Float32:
    """Inverse of :func:`quantize` up to its rounding."""
    numbers = values.view(ml_dtypes.float8_e4m3fn) if kv_dtype is KVDtype.FP8 else values
    return numbers.astype(np.float32) * scale.astype(np.float32)[..., None]


def encode(x: Array, kv_dtype: KVDtype) -> tuple[Array, Float16 | None]:
    """``x: [..., D]`` as it is stored in a pool of ``kv_dtype``; the scale is ``None`` for unquantised formats."""
    if kv_dtype.is_quantized:
        return quantize(x, kv_dtype)
    return to_finite(x, kv_dtype).astype(STORAGE_DTYPE[kv_dtype]), None


def decode(values: Array, scale: Float16 | None, kv_dtype: KVDtype) -> Float32:
    """fp32 numbers that stored ``values`` stand for."""
    if scale is None:
        return values.astype(np.float32)
    return dequantize(values.view(np.int8), scale, kv_dtype)


def kv_cache_write(pools: KVPools, k: Array, v: Array, slot_mapping: Int32) -> None:
    """Store ``k, v: [T, HK, D]`` at the slots ``slot_mapping: [T]`` of ``pools``, in place."""
    pools.k[slot_mapping], k_scale = encode(k, pools.kv_dtype)
    pools.v[slot_mapping], v_scale = encode(v, pools.kv_dtype)
    if pools.k_scale is not None and pools.v_scale is not None:
        pools.k_scale[slot_mapping] = k_scale
        pools.v_scale[slot_mapping] = v_scale


def paged_attention(
    query: Array,
    pools: KVPools,
    block_tables: Int32,
    positions: Int32,
    cu_q: Int32,
    *,
    block_size: int,
    scale: float = 1.0,
) -> Float32:
    """Causal attention of ``query: [T, H, D]`` over the pool, in float64; returns ``[T, H, D]`` fp32.

    Sequence ``b`` owns the rows ``cu_q[b]:cu_q[b + 1]`` and the blocks ``block_tables[b]``. A row at position ``p``
    sees the slots of positions ``0..p`` of its own sequence, its own key included. ``scale`` multiplies the scores (1
    if the query was scaled already).
    """
    num_tokens, num_heads, head_dim = query.shape
    group = num_heads // pools.k.shape[1]
    out = np.zeros((num_tokens, num_heads, head_dim), np.float32)
    for sequence, blocks in enumerate(block_tables):
        for row in range(cu_q[sequence], cu_q[sequence + 1]):
            context = np.arange(positions[row] + 1)
            slots = blocks[context // block_size] * block_size + context % block_size
            keys = decode(pools.k[slots], None if pools.k_scale is None else pools.k_scale[slots], pools.kv_dtype)
            values = decode(pools.v[slots], None if pools.v_scale is None else pools.v_scale[slots], pools.kv_dtype)
            for head in range(num_heads):
                q = query[row, head].astype(np.float64)
                scores = keys[:, head // group].astype(np.float64) @ q * scale
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values[:, head // group].astype(np.float64) / weights.sum()
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Float32:
    """``x: [T, hidden]`` over its root mean square, times ``weight: [hidden]``; float64 inside, rounded once."""
    wide = x.astype(np.float64)
    inverse = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed: npt.NDArray[np.float64] = wide * inverse * weight.astype(np.float64)
    return normed.astype(np.float32)


def rope(x: Array, cos: Float32, sin: Float32, positions: Int32) -> Float32:
    """Rotate ``x: [T, heads, D]``, a head's halves against each other; tables ``[positions, D / 2]``; fp32 throughout.

    Each product is rounded before the sum (no fused multiply-add): that is the definition, so stored keys can be
    compared byte by byte.
    """
    first, second = np.split(x.astype(np.float32), 2, axis=-1)
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)


def swiglu(gate_up: Array) -> Float32:
    """``gate_up: [T, 2 * intermediate]`` (gate, then up) to ``silu(gate) * up``; float64 inside."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    with np.errstate(over="ignore"):
        hidden = gate / (1.0 + np.exp(-gate)) * up
    return hidden.astype(np.float32)
