"""Memory for what a step reads from end to end: in huge pages, so that looking up addresses costs little."""

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from trtcb.errors import OutOfMemoryError

PAGE_BYTES = 2 << 20
CHUNK_BYTES = 32 << 20  # matrices of a small model are smaller than a page, so they share
ALIGNMENT = 64


class Arena:
    """Hands out zeroed arrays side by side. Each keeps its chunk of memory alive, so the arena may go before them.

    Memory that is not used stays untouched. Where the system has no huge pages to give, there are small ones. Raises
    ``OutOfMemoryError`` where it has none at all.
    """

    def __init__(self) -> None:
        self._chunk = np.zeros(0, np.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return an array of bytes that starts on a cache line."""
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = _map(max(num_bytes, CHUNK_BYTES)), 0
        taken = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return taken


def _map(num_bytes: int) -> npt.NDArray[np.uint8]:
    try:
        memory = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemoryError(
            f"There is no memory for {num_bytes:,} more bytes of weights: a smaller --weight-dtype takes less."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):  # of a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % PAGE_BYTES
    return array[start : start + num_bytes]
