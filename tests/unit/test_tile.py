"""The matrix tile: equal to a chain of fused multiply-adds, whatever its shape."""

import numpy as np
import pytest

from trtcb.plugins.cpu.simd import jit
from trtcb.plugins.cpu.tile import TileSpec, define_tile, largest_divisor, value_shape
from trtcb.plugins.reference import STORAGE_DTYPE, decode, encode
from trtcb.spec import KVDtype

DEPTH, COLUMNS, ROWS = 48, 64, 12


def run(spec, a, b, c):
    tile, rows, width = define_tile(spec), spec.rows, 16 * spec.vectors

    @jit
    def call(a, b, c, b_bytes):
        for row in range(0, ROWS, rows):
            for column in range(0, COLUMNS, width):
                tile(a + row * DEPTH * 4, b + column * b_bytes, c + (row * COLUMNS + column) * 4, DEPTH, b)

    out = c.copy()
    call(a.ctypes.data, b.ctypes.data, out.ctypes.data, b.itemsize)
    return out


def spec_of(rows, vectors, kv="fp32", **changes):
    return TileSpec(rows, vectors, kv, a_stride=DEPTH, b_stride=COLUMNS, c_stride=COLUMNS, **changes)


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS), (ROWS, COLUMNS))]


@pytest.mark.parametrize("accumulate", [False, True])
def test_shapes_agree_bit_by_bit_and_with_the_product(operands, accumulate):
    a, b, c = operands
    shapes = [(1, 1), (1, 4), (3, 2), (4, 1), (6, 4), (12, 2)]
    results = [run(spec_of(r, v, accumulate=accumulate), a, b, c) for r, v in shapes]
    exact = a.astype(np.float64) @ b + (c if accumulate else 0)
    np.testing.assert_allclose(results[0], exact, atol=1e-5)
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize("kv", [kv.value for kv in KVDtype])
def test_formats_are_read_in_place_with_the_bits_of_their_fp32_copy(operands, kv):
    a, b, c = operands
    dtype = KVDtype(kv)
    stored = encode(b, dtype)[0].astype(STORAGE_DTYPE[dtype])
    ones = np.ones(len(b), np.float16) if dtype.is_quantized else None
    copy = decode(stored, ones, dtype)
    direct = run(spec_of(3, 2, kv, prefetch_bytes=96), a, stored, c)
    np.testing.assert_array_equal(direct.view(np.uint32), run(spec_of(3, 2), a, copy, c).view(np.uint32))


def test_the_shape_search():
    assert [largest_divisor(n, 12) for n in (1, 3, 8, 12, 16, 71)] == [1, 3, 8, 12, 8, 1]
    assert value_shape(12, 4, 24) == (12, 2)
    assert value_shape(8, 8, 24) == (8, 2)
    assert value_shape(3, 5, 6) == (1, 5)
    assert value_shape(1, 1, 2) == (1, 1)
