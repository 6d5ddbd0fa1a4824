"""Rotates and rounds rows of activations on the CPU."""

from typing import Any

import numba

from trtcb.plugins.cpu.quantized import activation_limit, rotation, row_bytes
from trtcb.plugins.cpu.specialize import Progress, compile_kernels, compile_launcher


class Quantizer:
    """The kernel that rotates and rounds rows of one width, a multiple of 16."""

    def __init__(self, width: int, *, num_threads: int | None = None, on_progress: Progress | None = None) -> None:
        self._num_threads = numba.get_num_threads() if num_threads is None else num_threads
        self._launch = compile_launcher()
        self._kernel = compile_quantizer(width, on_progress=on_progress)

    @property
    def kernel(self) -> int:
        """Address of the kernel, for as long as this object lives."""
        address: int = self._kernel.address
        return address

    def quantize(self, x: int, codes: int, num_rows: int) -> None:
        """Write rows of ``row_bytes(width)`` at ``codes`` from fp32 ``[num_rows, width]`` at ``x``."""
        self._launch(self.kernel, self._num_threads, x, codes, num_rows, *(0,) * 9)


def compile_quantizer(width: int, *, on_progress: Progress | None = None) -> Any:
    """Compile the kernel for a width, or load it from the user's cache."""
    constants = {
        "WIDTH": width,
        "ROTATION": rotation(width),
        "ROW_BYTES": row_bytes(width),
        "LIMIT": activation_limit(width),
    }
    return compile_kernels("kernel_quantize", constants, on_progress)["quantize"]
