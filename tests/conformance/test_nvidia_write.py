"""The KV write kernels, in Triton's interpreter, against the reference, bit by bit."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

from tests.conformance.torch_arrays import to_torch
from trtcb.plugins import reference
from trtcb.plugins.nvidia import codes, kv_write
from trtcb.plugins.schema import KV_FORMATS
from trtcb.spec import KVDtype

HK, D, SLOTS = 3, 64, 96
MODEL_DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def hard_rows(dtype) -> np.ndarray:
    """Keys ``[T, HK, D]`` among which are all that rounding can go wrong with."""
    x = np.random.default_rng(0).normal(0, 3, (24, HK, D)).astype(np.float32)
    x[0] = 0
    x[1] = -0.0
    x[2, 0] = np.arange(D) - 31.5  # with a scale of 1: ties
    x[2, 0, 0] = 127
    x[3] = np.nan
    x[4, 0, 5], x[4, 1, 6], x[4, 2, 7] = np.nan, np.inf, -np.inf
    x[5] *= 1e-7  # below the smallest scale
    x[6] *= 1e-5
    x[7] *= 1e4
    x[8] *= 1e30
    x[9, 0] = 448 * np.linspace(-1, 1, D)
    x[9, 1] = 448 * 2.0 ** -np.arange(D)
    x[10, :] = np.ldexp(1.0, np.arange(D) % 24 - 12)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def written(kv_dtype: KVDtype, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> reference.KVPools:
    pools = stained(kv_dtype)
    k, v, slots = (to_torch(np.ascontiguousarray(array)) for array in (k, v, slots))
    values = [to_torch(array) for array in (pools.k, pools.v)]
    grid = (len(slots), HK)
    if kv_dtype.is_quantized:
        scales = [to_torch(array) for array in (pools.k_scale, pools.v_scale)]
        kv_write.quant_kv_cache_write[grid](
            k, v, *values, *scales, slots, *values, *scales, HK=HK, D=D, FORMAT=KV_FORMATS[kv_dtype]
        )
    else:
        kv_write.kv_cache_write[grid](k, v, *values, slots, *values, HK=HK, D=D)
    return pools


def stained(kv_dtype: KVDtype) -> reference.KVPools:
    pools = reference.KVPools.zeros(kv_dtype, SLOTS, HK, D)
    for array in dataclasses.astuple(pools)[1:]:
        if array is not None:
            array.view(np.uint8)[:] = 0x3A
    return pools


# the interpreter cuts off where hardware rounds when it makes bf16 of fp32: bf16 pools are checked with rows of bf16
@pytest.mark.parametrize(
    ("model", "kv"),
    [(model, kv) for kv in KVDtype for model in MODEL_DTYPES if kv is not KVDtype.BF16 or model == "bf16"],
    ids=str,
)
def test_pools_hold_the_references_bits(model, kv):
    k = hard_rows(MODEL_DTYPES[model])
    v = np.ascontiguousarray(k[::-1])
    slots = np.random.default_rng(1).permutation(SLOTS)[: len(k)].astype(np.int32)
    expected = stained(kv)
    reference.kv_cache_write(expected, k, v, slots)
    found = written(kv, k, v, slots)
    for want, got in zip(dataclasses.astuple(expected)[1:], dataclasses.astuple(found)[1:], strict=True):
        if want is not None:
            assert np.array_equal(want.view(np.uint8), got.view(np.uint8))


@triton.jit
def decode_all(raw, native, portable):
    """Decode all 256 codes, both ways."""
    at = tl.arange(0, 256)
    tl.store(native + at, codes.decode_e4m3(tl.load(raw + at), True))
    tl.store(portable + at, codes.decode_e4m3(tl.load(raw + at), False))


def test_both_ways_of_decoding_are_exact():
    raw = np.arange(256, dtype=np.uint8).view(np.int8)
    native, portable = np.zeros((2, 256), np.float16)
    decode_all[(1,)](to_torch(raw), to_torch(native), to_torch(portable))
    expected = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    numbers = np.isfinite(expected)
    assert numbers.sum() == 254
    assert np.array_equal(native.astype(np.float32)[numbers], expected[numbers])
    assert np.array_equal(portable.astype(np.float32)[numbers] / codes.PORTABLE_E4M3.value, expected[numbers])
    assert np.isfinite(portable).all()
