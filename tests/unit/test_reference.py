"""The reference itself, against facts that can be seen by eye."""

import ml_dtypes
import numpy as np
import pytest

from trtcb.plugins import reference
from trtcb.spec import KVDtype

QUANTIZED = [KVDtype.INT8, KVDtype.FP8]


@pytest.mark.parametrize("kv", QUANTIZED)
def test_quantisation_errs_by_half_a_step_at_most(kv):
    x = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)
    codes, scale = reference.quantize(x, kv)
    error = np.abs(reference.dequantize(codes, scale, kv) - x)
    step = scale.astype(np.float32)[:, None]
    if kv is KVDtype.INT8:
        assert (error <= 0.5001 * step).all()
    else:
        assert (error <= np.maximum(np.abs(x) / 16, step * 2.0**-10) * 1.0001).all()  # 3 mantissa bits
    np.testing.assert_array_equal(scale, (np.abs(x).max(axis=1) / reference.QUANT_MAX[kv]).astype(np.float16))


@pytest.mark.parametrize("kv", QUANTIZED)
def test_zero_rows_have_the_floor_for_a_scale(kv):
    codes, scale = reference.quantize(np.zeros((2, 32), np.float32), kv)
    assert not codes.any()
    assert (scale == np.float16(2**-14)).all()
    codes, scale = reference.quantize(np.full((1, 32), 1e-9, np.float32), kv)
    assert (scale == np.float16(2**-14)).all()


@pytest.mark.parametrize("kv", list(KVDtype))
def test_what_is_stored_is_finite(kv):
    x = np.array([[np.nan, np.inf, -np.inf, 1.0] * 8], np.float32)
    values, scale = reference.encode(x, kv)
    numbers = reference.decode(values, scale, kv)[0]
    assert np.isfinite(numbers).all()
    assert numbers[0] == 0
    assert numbers[1] == -numbers[2] > 6e4
    if scale is not None:
        assert np.isfinite(scale.astype(np.float32)).all()


def test_negative_zero_is_stored_as_zero():
    x = np.array([[-0.0, 1.0] * 16], np.float32)
    codes, _ = reference.quantize(x, KVDtype.FP8)
    assert (codes[0, ::2].view(np.uint8) == 0).all()


@pytest.mark.parametrize("kv", list(KVDtype))
def test_a_write_touches_its_slots_alone(kv):
    pools = reference.KVPools.zeros(kv, 64, 2, 32)
    k, v = np.random.default_rng(1).normal(size=(2, 3, 2, 32)).astype(np.float32)
    reference.kv_cache_write(pools, k, v, np.array([5, 63, 0], np.int32))
    written = np.flatnonzero(pools.k.astype(np.float32).any(axis=(1, 2)))
    assert written.tolist() == [0, 5, 63]
    scale = None if pools.v_scale is None else pools.v_scale[63]
    np.testing.assert_allclose(reference.decode(pools.v[63], scale, kv), v[1], atol=0.3)


def test_attention_of_one_token_is_its_value_and_is_causal():
    rng = np.random.default_rng(2)
    pools = reference.KVPools.zeros(KVDtype.FP32, 64, 2, 32)
    k, v = rng.normal(size=(2, 40, 2, 32)).astype(np.float32)
    tables = np.array([[1, 0]], np.int32)
    positions = np.arange(40, dtype=np.int32)
    slots = tables[0, positions // 32] * 32 + positions % 32
    reference.kv_cache_write(pools, k, v, slots)
    query = rng.normal(size=(40, 4, 32)).astype(np.float32)
    cu_q = np.array([0, 40], np.int32)
    out = reference.paged_attention(query, pools, tables, positions, cu_q, block_size=32)
    np.testing.assert_allclose(out[0], np.repeat(v[0], 2, axis=0), rtol=1e-6)
    pools.v[slots[39]] += 1
    changed = reference.paged_attention(query, pools, tables, positions, cu_q, block_size=32)
    np.testing.assert_array_equal(changed[:39], out[:39])
    assert (changed[39] != out[39]).any()


def test_rope_is_a_rotation_that_knows_relative_positions():
    rng = np.random.default_rng(3)
    angle = np.outer(np.arange(50), 1.0 / 100 ** (np.arange(16) / 16)).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    q, k = rng.normal(size=(2, 1, 1, 32)).astype(np.float32)

    def score(i, j):
        a = reference.rope(q, cos, sin, np.array([i], np.int32))
        return float((a * reference.rope(k, cos, sin, np.array([j], np.int32))).sum())

    assert score(10, 3) == pytest.approx(score(40, 33), abs=1e-4)
    assert score(10, 3) != pytest.approx(score(10, 4), abs=1e-3)


def test_norm_and_swiglu():
    x = np.array([[3.0, 4.0]], np.float32)
    np.testing.assert_allclose(reference.rms_norm(x, np.array([1, 2]), 0.0), x / np.sqrt(12.5) * [1, 2], rtol=1e-6)
    gate_up = np.array([[0.0, 100.0, -1000.0, 2.0, 3.0, 4.0]], ml_dtypes.bfloat16)
    np.testing.assert_allclose(reference.swiglu(gate_up), [[0.0, 300.0, 0.0]], atol=1e-6)
