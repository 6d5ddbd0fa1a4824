"""Int8 products: rotation, codes and sums against numpy, bit by bit where nothing is left to the order of sums."""

import warnings

import numpy as np
import pytest
from numba import cfunc

from trtcb.errors import UsageError
from trtcb.plugins.cpu import dot_tile, isa, quantized
from trtcb.plugins.cpu.arena import Arena
from trtcb.plugins.cpu.linear import PackedLinear, compile_linear, pack_panels
from trtcb.plugins.cpu.quantizer import Quantizer
from trtcb.plugins.cpu.simd import JIT_OPTIONS
from trtcb.plugins.cpu.specialize import KERNEL_SIGNATURE


def quantize(x: np.ndarray) -> np.ndarray:
    rows = np.zeros((len(x), quantized.row_bytes(x.shape[1])), np.uint8)
    Quantizer(x.shape[1]).quantize(x.ctypes.data, rows.ctypes.data, len(x))
    return rows


def unpacked(rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    if isa.multiplies_bytes():
        planes = rows[:, : 2 * width].reshape(len(rows), 2, width).astype(np.int32)
        codes = (planes[:, 0] << 8) + planes[:, 1] - quantized.PLANE_OFFSET
    else:
        pairs = np.ascontiguousarray(rows[:, : 2 * width]).view(np.int16)
        codes = pairs.reshape(len(rows), width // 4, 4)[..., [0, 2, 1, 3]]
    scales = np.ascontiguousarray(rows[:, 2 * width : 2 * width + 4]).view(np.float32)[:, 0]
    return codes.reshape(len(rows), width), scales


@pytest.mark.parametrize(("width", "block"), [(576, 64), (1536, 64), (96, 32), (112, 16), (64, 64)])
def test_codes_are_the_rounded_rotated_row(width, block):
    assert quantized.rotation(width) == block
    x = np.random.default_rng(0).normal(size=(9, width)).astype(np.float32) * 3
    x[4] *= 1e-20
    codes, scales = unpacked(quantize(x), width)
    rotated = quantized.rotate(x)
    np.testing.assert_allclose(scales, np.abs(rotated).max(axis=1) / 2047, rtol=1e-5)
    exact = rotated / scales[:, None]
    assert np.abs(codes - exact).max() <= 0.51
    assert (np.abs(codes).max(axis=1) == 2047).all()


def test_the_rotation_is_orthogonal_and_spreads_an_outlier():
    x = np.zeros((1, 64), np.float32)
    x[0, 5] = 8
    assert (np.abs(quantized.rotate(x)) == 1).all()
    y = np.random.default_rng(1).normal(size=(3, 192)).astype(np.float32)
    np.testing.assert_allclose(quantized.rotate(quantized.rotate(y)), y, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_says_so_and_stays_alone(value):
    x = np.ones((3, 64), np.float32)
    x[1, 9] = value
    codes, scales = unpacked(quantize(x), 64)
    assert np.isnan(scales[1])
    assert (np.abs(codes) <= 2047).all()
    weight, scale = quantized.quantize(np.eye(64, dtype=np.float32))
    out = np.zeros((3, 64), np.float32)
    rows = quantize(x)
    PackedLinear(weight, scale).multiply(rows.ctypes.data, out.ctypes.data, 3)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


def test_a_row_of_zeros_is_zero():
    codes, scales = unpacked(quantize(np.zeros((1, 64), np.float32)), 64)
    assert not codes.any()
    assert scales[0] == 0


@pytest.mark.parametrize("width", [16, 40, 67])
@pytest.mark.parametrize("depth", [16, 576])
def test_products_are_exact_whatever_the_batch(width, depth):
    rng = np.random.default_rng(2)
    weight = rng.normal(size=(width, depth)).astype(np.float32)
    x = rng.normal(size=(40, depth)).astype(np.float32)
    codes, scale = quantized.quantize(quantized.rotate(weight))
    rows = quantize(x)
    x_codes, x_scale = unpacked(rows, depth)
    sums = (x_codes.astype(np.int64) @ codes.astype(np.int64).T).astype(np.float32)
    expected = sums * scale * x_scale[:, None]
    for num_threads in (1, 2):
        linear = PackedLinear(codes, scale, num_threads=num_threads)
        for start, stop in ((0, 40), (0, 1), (3, 5), (4, 17), (0, 16), (3, 36), (7, 40)):
            out = np.full((stop - start, width), np.nan, np.float32)
            linear.multiply(rows[start:].ctypes.data, out.ctypes.data, stop - start)
            assert np.array_equal(out, expected[start:stop])
    error = np.abs(expected - x @ weight.T).max() / np.abs(x @ weight.T).max()
    assert error < 0.03


@pytest.mark.parametrize("depth", [8192, 16384])
def test_the_largest_codes_do_not_overflow(depth):
    limit = quantized.activation_limit(depth)
    assert 127 <= limit <= 2047
    weight = np.full((16, depth), -127, np.int8)
    x = np.zeros((1, depth), np.float32)
    x[:, :: quantized.rotation(depth)] = 1  # rotates to ones
    out = np.zeros((1, 16), np.float32)
    rows = quantize(x)
    PackedLinear(weight, np.ones(16, np.float32)).multiply(rows.ctypes.data, out.ctypes.data, 1)
    _, scales = unpacked(rows, depth)
    assert (out == np.float32(-127 * limit * depth) * scales[0]).all()


@pytest.mark.parametrize(
    "features", [(), ("avx2",), ("avx2", "avx512bw"), ("avx512vnni",)], ids=lambda names: "+".join(names) or "plain"
)
def test_other_instructions_have_the_same_bits(monkeypatch, features):
    missing = [name for name in features if not isa.has_feature(name)]
    if missing:
        pytest.skip(f"this processor has no {missing[0]}")
    for module in (dot_tile, isa):
        monkeypatch.setattr(module, "has_feature", lambda name: name in features)
    depth, width = 64, 16
    rng = np.random.default_rng(3)
    codes = rng.integers(-127, 128, size=(width, depth)).astype(np.int8)
    scale = rng.random(width).astype(np.float32)
    rows = quantize(rng.normal(size=(3, depth)).astype(np.float32))
    stride = quantized.row_bytes(depth)
    tile = dot_tile.define_dot_tile(dot_tile.DotSpec(3, 1, depth, stride, width))

    @cfunc(KERNEL_SIGNATURE, **JIT_OPTIONS)
    def run(a, b, c):
        tile(a, b, c, 64, b)

    panels, out = pack_panels(codes, scale, width, Arena(), 1), np.zeros((3, width), np.float32)
    run.ctypes(rows.ctypes.data, panels.ctypes.data, out.ctypes.data)
    x_codes, x_scale = unpacked(rows, depth)
    sums = (x_codes.astype(np.int64) @ codes.astype(np.int64).T).astype(np.float32)
    assert np.array_equal(out, sums * scale * x_scale[:, None])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e-40])
def test_weights_of_any_number_are_rounded_without_a_warning(bad):
    weight = np.ones((3, 64), np.float32)
    weight[1] = 0
    weight[1, 5] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes, scale = quantized.quantize(weight)
    assert (np.abs(codes.astype(int)) <= 127).all()
    assert np.isfinite(scale[1]) == np.isfinite(bad)
    assert np.isfinite(scale[[0, 2]]).all()
    assert not codes[1, :5].any()  # whatever the machine makes of a number that is none


def test_a_product_that_could_overflow_is_refused():
    assert 127 * 127 * quantized.MAX_DEPTH < 1 << 31 <= 127 * 127 * (quantized.MAX_DEPTH + 1)
    with pytest.raises(UsageError, match="use --weight-dtype bf16"):
        compile_linear(16, quantized.MAX_DEPTH + 16, "int8")
