"""Conversions to pairs of bf16: exact for every code, where the matrix unit looks for them. Weights of a softmax."""

import ml_dtypes
import numpy as np
import pytest

from tests.unit.test_simd import unary
from trtcb.plugins.cpu.isa import has_feature
from trtcb.plugins.cpu.matrix_attention_tile import BF16_SCALE, FEATURES, ConvertSpec, define_convert, exp2_weight
from trtcb.plugins.cpu.simd import jit

BF16 = ml_dtypes.bfloat16
CODES = {
    "int8": np.arange(-128, 128).astype(np.int8),
    "fp8": np.delete(np.arange(256), [127, 255]).astype(np.uint8).view(ml_dtypes.float8_e4m3fn),  # without NaN
    "bf16": np.random.default_rng(0).normal(size=999).astype(BF16),
}


def convert(spec, stored):
    pairs = define_convert(spec)

    @jit
    def call(source, target):
        pairs(source, target, source)

    out = np.zeros(spec.rows * spec.columns, np.uint16)
    call(stored.ctypes.data, out.ctypes.data)
    return out.view(BF16).reshape(spec.columns // 16, spec.rows // 2, 16, 2)


@pytest.mark.parametrize("kv", CODES)
@pytest.mark.parametrize(("rows", "columns", "stride"), [(64, 32, 32), (96, 32, 64), (32, 64, 64), (32, 128, 128)])
def test_every_code_becomes_itself_in_its_place(kv, rows, columns, stride):
    stored = np.resize(CODES[kv], (rows, stride))
    result = convert(ConvertSpec(kv, rows, columns, stride, prefetch_bytes=64), stored).astype(np.float64)
    expected = stored[:, :columns].astype(np.float64).reshape(rows // 2, 2, columns // 16, 16).transpose(2, 0, 3, 1)
    np.testing.assert_array_equal(result * BF16_SCALE[kv], expected)
    normal = np.abs(result[expected != 0])
    assert normal.min() >= 2.0**-126  # the unit counts smaller ones as zero


@pytest.mark.skipif(not all(map(has_feature, FEATURES)), reason="computed by instructions this CPU does not have")
def test_the_weight_in_powers_of_two_is_accurate_and_exact_at_the_ends():
    weight = unary(exp2_weight)
    x = np.concatenate([np.linspace(-126, 0, 200_000), np.linspace(-1e-3, 0, 1001)]).astype(np.float32)
    assert np.abs(weight(x) / np.exp2(x.astype(np.float64)) - 1).max() <= 3e-6
    assert weight(np.array([0.0, -0.0, -1, -126])).tolist() == [1, 1, 0.5, 2.0**-126]
    assert weight(np.array([-150.1, -1000, -3.4e38, -np.inf])).tolist() == [0] * 4
    assert np.isnan(weight(np.array([np.nan])))[0]
