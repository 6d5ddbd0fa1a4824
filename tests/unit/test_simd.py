"""Every intrinsic of the vector vocabulary, conversions over all codes."""

import ml_dtypes
import numpy as np
import pytest

from trtcb.plugins.cpu import simd
from trtcb.plugins.cpu.simd import jit
from trtcb.plugins.cpu.vector_ir import LANES


def unary(function):
    """A numpy function out of a vector function of one argument."""

    @jit
    def loop(source, target, count):
        for i in range(0, count, LANES):
            simd.store_f32(target, i, function(simd.load_f32(source, i)))

    def apply(x):
        x = np.ascontiguousarray(x, np.float32)
        padded = np.zeros(-(-x.size // LANES) * LANES, np.float32)
        padded[: x.size] = x
        out = np.empty_like(padded)
        loop(padded.ctypes.data, out.ctypes.data, padded.size)
        return out[: x.size]

    return apply


def binary(function):
    @jit
    def loop(a, b, target, count):
        for i in range(0, count, LANES):
            simd.store_f32(target, i, function(simd.load_f32(a, i), simd.load_f32(b, i)))

    def apply(a, b):
        a, b = (np.ascontiguousarray(x, np.float32) for x in (a, b))
        out = np.empty_like(a)
        loop(a.ctypes.data, b.ctypes.data, out.ctypes.data, a.size)
        return out

    return apply


def loader(load):
    @jit
    def loop(source, target, count):
        for i in range(0, count, LANES):
            simd.store_f32(target, i, load(source, i))

    def apply(stored):
        out = np.empty(stored.size, np.float32)
        loop(stored.ctypes.data, out.ctypes.data, stored.size)
        return out

    return apply


def storer(store, dtype):
    @jit
    def loop(source, target, count):
        for i in range(0, count, LANES):
            store(target, i, simd.load_f32(source, i))

    def apply(x):
        padded = np.zeros(-(-x.size // LANES) * LANES, np.float32)
        padded[: x.size] = x
        out = np.empty(padded.size, dtype)
        loop(padded.ctypes.data, out.ctypes.data, padded.size)
        return out[: x.size]

    return apply


def same_bits(a, b):
    np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


FORMATS = {
    "bf16": (simd.load_bf16, simd.store_bf16, ml_dtypes.bfloat16),
    "fp16": (simd.load_f16, simd.store_f16, np.float16),
    "fp8": (simd.load_e4m3, simd.store_e4m3, ml_dtypes.float8_e4m3fn),
    "int8": (simd.load_i8, simd.store_i8, np.int8),
}


def all_codes(dtype):
    bits = 8 * np.dtype(dtype).itemsize
    return np.arange(1 << bits, dtype=f"u{bits // 8}").view(dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_loads_are_exact_for_every_code(name):
    load, _, dtype = FORMATS[name]
    codes = all_codes(dtype)
    expected, actual = codes.astype(np.float32), loader(load)(codes)
    number = ~np.isnan(expected)
    same_bits(actual[number], expected[number])
    if name != "fp8":  # whose NaN codes are never stored, and read as finite
        assert np.isnan(actual[~number]).all()


@pytest.mark.parametrize("name", FORMATS)
def test_stores_round_to_nearest_even_at_every_boundary(name):
    _, store, dtype = FORMATS[name]
    numbers = np.unique(all_codes(dtype).astype(np.float32))
    numbers = numbers[np.isfinite(numbers)]
    middles = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)  # exact: one more bit
    up, down = np.float32(np.inf), np.float32(-np.inf)
    x = np.concatenate([numbers, middles, np.nextafter(middles, up), np.nextafter(middles, down), [-0.0, 0.0]])
    x = x.astype(np.float32)
    actual = storer(store, dtype)(x)
    if name == "int8":
        same_bits(actual, np.clip(np.rint(x), -127, 127).astype(np.int8))
    else:
        same_bits(actual, x.astype(dtype))


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_stores_agree_on_random_bits(name):
    _, store, dtype = FORMATS[name]
    x = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    x = x[~np.isnan(x)]
    if name == "fp8":
        x = x[np.abs(x) < 1e3]
        same_bits(storer(store, dtype)(x), np.clip(x, -448, 448).astype(dtype))
    else:
        with np.errstate(over="ignore"):
            same_bits(storer(store, dtype)(x), x.astype(dtype))


def test_stores_saturate_or_keep_what_is_not_finite():
    x = np.array([np.inf, -np.inf, 1e9, -1e9], np.float32)
    assert storer(simd.store_e4m3, ml_dtypes.float8_e4m3fn)(x).astype(np.float32).tolist() == [448, -448, 448, -448]
    assert storer(simd.store_i8, np.int8)(x).tolist() == [127, -127, 127, -127]
    nan = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    for store, dtype in ((simd.store_bf16, ml_dtypes.bfloat16), (simd.store_f16, np.float16)):
        assert np.isnan(storer(store, dtype)(nan).astype(np.float32)).all()
        assert storer(store, dtype)(x[:2]).astype(np.float32).tolist() == [np.inf, -np.inf]


NUMBERS = np.random.default_rng(1).normal(size=(3, 4096)).astype(np.float32) * 100


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (simd.add, np.add),
        (simd.sub, np.subtract),
        (simd.mul, np.multiply),
        (simd.div, np.divide),
        (simd.maximum, np.maximum),
        (simd.minimum, np.minimum),
    ],
)
def test_arithmetic_is_correctly_rounded(function, expected):
    a, b, _ = NUMBERS
    same_bits(binary(function)(a, b), expected(a, b))


def test_maximum_and_minimum_yield_the_second_at_a_nan():
    a = np.full(16, np.nan)
    b = np.arange(16.0)
    for function in (simd.maximum, simd.minimum):
        assert binary(function)(a, b).tolist() == b.tolist()
        assert np.isnan(binary(function)(b, a)).all()


def test_fma_rounds_once():
    @jit
    def run(a, b, c, out, count):
        for i in range(0, count, LANES):
            simd.store_f32(out, i, simd.fma(simd.load_f32(a, i), simd.load_f32(b, i), simd.load_f32(c, i)))

    a, b, _ = NUMBERS
    c = -(a * b)  # so that only the rounding error of the product is left: exact in fp32
    out = np.empty_like(a)
    run(a.ctypes.data, b.ctypes.data, c.ctypes.data, out.ctypes.data, a.size)
    exact = a.astype(np.float64) * b + c
    assert np.count_nonzero(exact) > 1000
    same_bits(out, exact.astype(np.float32))


def test_absolute_and_splat():
    same_bits(unary(simd.absolute)(NUMBERS[0]), np.abs(NUMBERS[0]))

    @jit
    def fill(out, x):
        simd.store_f32(out, 0, simd.splat(x))

    out = np.zeros(16, np.float32)
    fill(out.ctypes.data, np.float32(2.5))
    assert (out == 2.5).all()


def test_finite_removes_nan_and_saturates():
    limit = np.float32(100)
    x = np.array([np.nan, np.inf, -np.inf, 101, -101, 100, -100, 0.5] * 2, np.float32)

    @jit
    def held(v):
        return simd.finite(v, limit)

    assert unary(held)(x)[:8].tolist() == [0, 100, -100, 100, -100, 100, -100, 0.5]


def test_exp_is_accurate_and_exact_at_the_ends():
    exp = unary(simd.exp)
    x = np.concatenate([np.linspace(-87.3, 88, 200_000), np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(exp(x) - exact) <= 2 * ulp).all()
    assert exp(np.array([0.0, -0.0])).tolist() == [1, 1]
    assert exp(np.array([-87.34, -88, -1000, -3.4e38, -np.inf])).tolist() == [0] * 5
    assert exp(np.array([89, 1e4, np.inf])).tolist() == [np.inf] * 3
    assert np.isnan(exp(np.array([np.nan])))[0]


def test_the_weight_of_a_softmax_is_accurate_and_exact_at_the_ends():
    weight = unary(simd.exp_weight)
    x = np.concatenate([np.linspace(-87, 0, 200_000), np.linspace(-1e-3, 0, 1001)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(weight(x) - exact).max() <= 2e-7
    assert (np.abs(weight(x) / exact - 1) <= 2e-7 + 1.2e-7 * -x).all()
    assert weight(np.array([0.0, -0.0])).tolist() == [1, 1]
    assert weight(np.array([-87.1, -1000, -3.4e38, -np.inf])).tolist() == [0] * 4
    assert np.isnan(weight(np.array([np.nan])))[0]


def test_the_reciprocal_of_nothing_is_nothing():
    x = np.array([0.0, -0.0, 1, 3, -0.7, np.inf, 2.0**-100], np.float32)
    expected = np.array([0, 0, 1, 1 / 3, 1 / -0.7, 0, 2.0**100], np.float64).astype(np.float32)
    np.testing.assert_array_equal(unary(simd.reciprocal)(x)[:4], expected[:4])
    np.testing.assert_allclose(unary(simd.reciprocal)(x), expected, rtol=1e-7)
    assert np.isnan(unary(simd.reciprocal)(np.array([np.nan])))[0]


def reduce(function):
    @jit
    def run(source, target, count):
        for i in range(count):
            simd.write_f32(target, i, function(simd.load_f32(source, i * LANES)))

    def apply(rows):
        out = np.empty(len(rows), np.float32)
        run(rows.ctypes.data, out.ctypes.data, len(rows))
        return out

    return apply


def test_sums_run_in_the_one_documented_order():
    rows = NUMBERS[0].reshape(-1, 16)
    expected = rows
    while expected.shape[1] > 1:
        half = expected.shape[1] // 2
        expected = expected[:, :half] + expected[:, half:]
    same_bits(reduce(simd.sum_lanes)(rows), expected[:, 0].copy())
    same_bits(reduce(simd.max_lanes)(rows), rows.max(axis=1))


def test_first_lanes_and_any_at_least():
    @jit
    def run(source, target, count, bound):
        x = simd.load_f32(source, 0)
        simd.store_f32(target, 0, simd.first_lanes(x, count, np.float32(-1)))
        return simd.any_at_least(x, bound)

    x, out = np.arange(16, dtype=np.float32), np.empty(16, np.float32)
    for count in (-5, 0, 1, 7, 15, 16, 99):
        assert run(x.ctypes.data, out.ctypes.data, count, np.float32(15))
        assert not run(x.ctypes.data, out.ctypes.data, count, np.float32(15.5))
        np.testing.assert_array_equal(out, np.where(np.arange(16) < count, x, -1))


def test_scalars_in_memory():
    @jit
    def copy(f, i, out_f, out_i):
        simd.write_f32(out_f, 1, simd.read_f32(f, 1))
        simd.write_f64(out_f + 8, 1, simd.read_f64(f + 8, 1))
        simd.write_f16(out_f, 16, simd.read_f16(f, 16))
        simd.write_i64(out_i, 0, simd.read_i64(i, 0))
        simd.write_i64(out_i, 1, simd.read_i32(i, 2))
        simd.write_i64(out_i, 2, simd.read_u32(i, 2))
        simd.write_i64(out_i, 3, simd.read_u16(i, 4))
        simd.write_i64(out_i, 4, simd.read_u8(i, 8))
        simd.write_i32(out_i + 40, 0, -2)
        simd.write_u16(out_i + 40, 2, 65535)
        simd.write_u8(out_i + 40, 6, 255)

    floats, out_floats = np.zeros(16, np.float32), np.zeros(16, np.float32)
    floats[1], floats.view(np.float64)[2], floats.view(np.float16)[16] = 1.5, 2.5, 3.5
    integers, out = np.array([2**40, -3, 0], np.int64), np.zeros(6, np.int64)
    copy(floats.ctypes.data, integers.ctypes.data, out_floats.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(floats, out_floats)
    assert out[:5].tolist() == [2**40, -3, 2**32 - 3, 65533, 253]
    assert out[5:].view(np.int32)[0] == -2
    assert out[5:].view(np.uint16)[2] == 65535
    assert out[5:].view(np.uint8)[6:].tolist() == [255, 0]


def test_as_float_fetch_add_and_stack():
    buffer = simd.stack(24)

    @jit
    def run(counter, bits):
        block = buffer()
        simd.write_i64(block, 2, 40)
        before = simd.fetch_add(block + 16, 2)
        return before + simd.read_i64(block, 2) + simd.fetch_add(counter, 5), simd.as_float(bits), block % 64

    counter = np.array([100], np.int64)
    total, number, alignment = run(counter.ctypes.data, int(np.float64(1e-5).view(np.int64)))
    assert (total, number, alignment) == (40 + 42 + 100, 1e-5, 0)
    assert counter[0] == 105
