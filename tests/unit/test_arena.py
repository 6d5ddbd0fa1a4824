"""Arrays from an arena: zeroed, apart from each other, and alive without it."""

import gc
import mmap

import pytest

from trtcb.errors import OutOfMemoryError
from trtcb.plugins.cpu.arena import ALIGNMENT, CHUNK_BYTES, Arena


def test_arrays_are_zeroed_and_lie_side_by_side_on_cache_lines():
    arena = Arena()
    first, second = arena.take(100), arena.take(7)
    assert (len(first), len(second)) == (100, 7)
    assert not first.any()
    assert first.ctypes.data % ALIGNMENT == 0
    assert second.ctypes.data == first.ctypes.data + 2 * ALIGNMENT
    first[:] = 255
    assert not second.any()


@pytest.mark.parametrize("num_bytes", [CHUNK_BYTES - 64, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_arrays_outlive_the_arena_and_its_chunks(num_bytes):
    arena = Arena()
    arrays = [arena.take(num_bytes) for _ in range(3)]
    for value, array in enumerate(arrays):
        array[[0, -1]] = value + 1
    del arena
    gc.collect()
    assert [(array[0], array[-1]) for array in arrays] == [(1, 1), (2, 2), (3, 3)]


def test_nothing_is_an_array_too():
    assert len(Arena().take(0)) == 0


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # unknown to every kernel, as the true one is to some
    assert not Arena().take(100).any()


def test_no_memory_is_told_with_what_takes_less():
    with pytest.raises(OutOfMemoryError, match="smaller --weight-dtype"):
        Arena().take(1 << 60)
