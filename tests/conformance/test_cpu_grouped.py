"""Int4 products: codes, scales and sums of groups against numpy, bit by bit."""

import warnings

import numpy as np
import pytest
from numba import cfunc

from trtcb.plugins.cpu import group_tile, grouped
from trtcb.plugins.cpu.arena import Arena
from trtcb.plugins.cpu.group_spec import GroupSpec
from trtcb.plugins.cpu.grouped import GROUP, Int4Weight
from trtcb.plugins.cpu.linear import PackedLinear
from trtcb.plugins.cpu.quantizer import Quantizer
from trtcb.plugins.cpu.simd import JIT_OPTIONS
from trtcb.plugins.cpu.specialize import KERNEL_SIGNATURE
from trtcb.plugins.cpu.streams import Streams


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """``x * y + z`` of fp32, rounded once: the float64 sum is rounded to odd, so that fp32 is not rounded twice."""
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    is_even = total.view(np.int64) & 1 == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & is_even, np.nextafter(total, towards), total).astype(np.float32)


def product(rows: tuple[np.ndarray, np.ndarray, np.ndarray], weight: Int4Weight) -> np.ndarray:
    """What the kernel must give, in fp32: one chain an element, group after group."""
    codes, row_scale, row_sum = rows
    unpacked = grouped.unpack_codes(weight.codes).astype(np.int64)
    result = np.zeros((len(codes), len(unpacked)), np.float32)
    for group in range(row_scale.shape[1]):
        part = slice(group * GROUP, (group + 1) * GROUP)
        dots = (codes[:, part].astype(np.int64) @ unpacked[:, part].T).astype(np.float32)
        scale = row_scale[:, group, None] * weight.scale[:, group].astype(np.float32)
        result = fma(dots, scale, result)
        zero = np.broadcast_to(weight.zero[:, group].astype(np.float32), result.shape)
        result = fma(zero, np.broadcast_to(row_sum[:, group, None], result.shape), result)
    return result


def quantize(x: np.ndarray) -> np.ndarray:
    rows = np.zeros((len(x), grouped.row_bytes(x.shape[1])), np.uint8)
    Quantizer(x.shape[1], "int8_g32").quantize(x.ctypes.data, rows.ctypes.data, len(x))
    return rows


def unpacked(rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    factors = np.ascontiguousarray(rows[:, width:]).view(np.float32).reshape(len(rows), 2, -1)
    return rows[:, :width].view(np.int8), factors[:, 0], factors[:, 1]


def random_weight(rng: np.random.Generator, width: int, depth: int) -> Int4Weight:
    codes = rng.integers(0, 256, (width, depth // 2), dtype=np.uint8)
    scale, zero = rng.normal(size=(2, width, depth // GROUP)).astype(np.float16)
    return Int4Weight(codes, scale, zero)


def linear(weight: Int4Weight, *, num_threads: int | None = None) -> PackedLinear:
    return PackedLinear(weight.codes, weight.scale, weight.zero, num_threads=num_threads)


@pytest.mark.parametrize("width", [32, 96, 576, 1536])
def test_rows_are_rounded_as_in_numpy(width):
    x = np.random.default_rng(0).normal(size=(9, width)).astype(np.float32) * 3
    x[4] *= 1e-20
    x[5] = 0
    x[6, :32] = 1e-39  # 127 over it is beyond fp32
    for found, expected in zip(unpacked(quantize(x), width), grouped.quantize_rows(x), strict=True):
        assert np.array_equal(found, expected)
    codes, scales, _ = unpacked(quantize(x), width)
    whole = [0, 1, 2, 3, 4, 7, 8]
    assert (np.abs(codes.reshape(9, -1, GROUP)[whole].astype(int)).max(axis=2) == 127).all()
    error = np.abs(codes.reshape(9, -1, GROUP) * scales[..., None] - x.reshape(9, -1, GROUP))
    assert (error <= 0.501 * scales[..., None] + 1e-38).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_says_so_and_stays_alone(value):
    x = np.ones((3, 64), np.float32)
    x[1, 9] = value
    rows = quantize(x)
    codes, scales, sums = unpacked(rows, 64)
    assert np.isnan(scales[1, 0])
    assert np.isnan(sums[1, 0])
    assert np.isfinite(scales[[0, 2]]).all()
    assert (np.abs(codes.astype(int)) <= 127).all()
    out = np.zeros((3, 16), np.float32)
    linear(grouped.quantize(np.eye(16, 64, dtype=np.float32))).multiply(rows.ctypes.data, out.ctypes.data, 3)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize(("width", "depth"), [(16, 32), (40, 576), (67, 64), (50, 1536)])
def test_products_have_numpy_s_bits_whatever_the_batch(width, depth):
    rng = np.random.default_rng(2)
    weight = random_weight(rng, width, depth)
    rows = quantize(rng.normal(size=(32, depth)).astype(np.float32))
    expected = product(unpacked(rows, depth), weight)
    for num_threads in (1, 2):
        packed = linear(weight, num_threads=num_threads)
        for start, stop in ((0, 32), *((7, 7 + count) for count in range(1, 20))):
            out = np.full((stop - start, width), np.nan, np.float32)
            packed.multiply(rows[start:].ctypes.data, out.ctypes.data, stop - start)
            assert np.array_equal(out, expected[start:stop])


def test_products_are_near_those_of_the_numbers_that_are_stored():
    rng = np.random.default_rng(3)
    weight = grouped.quantize(rng.normal(size=(48, 1536)).astype(np.float32))
    x = rng.normal(size=(5, 1536)).astype(np.float32)
    out, rows = np.zeros((5, 48), np.float32), quantize(x)
    linear(weight).multiply(rows.ctypes.data, out.ctypes.data, 5)
    exact = x @ grouped.dequantize(weight).T
    assert np.abs(out - exact).max() / np.abs(exact).max() < 0.01


def test_the_largest_codes_do_not_overflow():
    depth = 64
    weight = Int4Weight(
        np.full((16, depth // 2), 255, np.uint8), np.ones((16, 2), np.float16), np.zeros((16, 2), np.float16)
    )
    for sign in (1, -1):
        rows = quantize(np.full((1, depth), sign * 127, np.float32))
        out = np.zeros((1, 16), np.float32)
        linear(weight).multiply(rows.ctypes.data, out.ctypes.data, 1)
        assert (out == sign * 15 * 127 * depth).all()


@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512vnni"])
def test_all_instructions_have_the_same_bits(monkeypatch, instructions, columns):
    if instructions != "plain" and not group_tile.has_feature(instructions):
        pytest.skip(f"this processor has no {instructions}")
    monkeypatch.setattr(group_tile, "has_feature", lambda _: instructions != "plain")
    monkeypatch.setattr(group_tile, "multiplies_bytes", lambda: instructions == "avx512vnni")
    depth, width = 96, 2 * columns
    rng = np.random.default_rng(4)
    weight = random_weight(rng, width, depth)
    rows = quantize(rng.normal(size=(3, depth)).astype(np.float32))
    panels, out = grouped.pack_groups(weight, columns, Arena()), np.full((3, width), np.nan, np.float32)
    streams = Streams(2, panels[0].nbytes, columns)
    spec = GroupSpec(3, columns, depth, grouped.row_bytes(depth), width, streams=streams)
    tile = group_tile.define_group_tile(spec)

    @cfunc(KERNEL_SIGNATURE, **JIT_OPTIONS)
    def run(a, b, c):
        tile(a, b, c, 96, 1)

    run.ctypes(rows.ctypes.data, panels.ctypes.data, out.ctypes.data)
    assert np.array_equal(out, product(unpacked(rows, depth), weight))


def test_weights_are_rounded_to_the_nearest_of_sixteen():
    weight = np.random.default_rng(5).normal(size=(7, 96)).astype(np.float32)
    rounded = grouped.quantize(weight)
    codes = grouped.unpack_codes(rounded.codes)
    assert np.array_equal(grouped.pack_codes(codes), rounded.codes)
    assert (codes.reshape(7, 3, GROUP).min(axis=2) == 0).all()
    assert (codes.reshape(7, 3, GROUP).max(axis=2) == 15).all()
    steps = np.repeat(rounded.scale.astype(np.float32), GROUP, axis=1)
    assert (np.abs(grouped.dequantize(rounded) - weight) <= 0.51 * steps).all()


def test_equal_weights_of_a_group_stay_what_they_are():
    rounded = grouped.quantize(np.full((1, GROUP), 0.375, np.float32))
    assert (grouped.dequantize(rounded) == 0.375).all()


def test_numbers_on_the_grid_stay_what_they_are():
    stored = random_weight(np.random.default_rng(6), 5, 64)
    codes = grouped.unpack_codes(stored.codes).reshape(5, 2, GROUP)
    codes[..., 0], codes[..., 1] = 0, 15  # every group uses its whole range
    stored = Int4Weight(grouped.pack_codes(codes.reshape(5, 64)), np.abs(stored.scale) + np.float16(0.5), stored.zero)
    rounded = grouped.quantize(grouped.dequantize(stored))
    for name in ("codes", "scale", "zero"):
        assert np.array_equal(getattr(rounded, name), getattr(stored, name))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e6])
def test_weights_that_do_not_fit_say_so_without_a_warning(bad):
    weight = np.ones((3, 64), np.float32)
    weight[1] = 0
    weight[1, 5] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounded = grouped.quantize(weight)
    is_finite = np.isfinite(rounded.scale) & np.isfinite(rounded.zero)
    assert is_finite.tolist() == [[True, True], [False, True], [True, True]]
