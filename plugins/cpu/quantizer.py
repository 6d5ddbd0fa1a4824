"""Rounds rows of activations on the CPU, as the products with int8 and int4 weights want them."""

from typing import Any

import numba

from trtcb.plugins.cpu.isa import multiplies_bytes
from trtcb.plugins.cpu.quantized import activation_limit, rotation
from trtcb.plugins.cpu.rows import row_bytes
from trtcb.plugins.cpu.specialize import Progress, compile_kernels, compile_launcher


class Quantizer:
    """The kernel that rounds rows of one width to a type of rows.

    ``int8`` rotates them first, and the width is a multiple of 16 (``quantized.py``); with ``int8_g32`` it is one of 32
    (``grouped.py``).
    """

    def __init__(
        self, width: int, dtype: str = "int8", *, num_threads: int | None = None, on_progress: Progress | None = None
    ) -> None:
        self._num_threads = numba.get_num_threads() if num_threads is None else num_threads
        self._launch = compile_launcher()
        self._kernel = compile_quantizer(width, dtype, on_progress=on_progress)

    @property
    def kernel(self) -> int:
        """Address of the kernel, for as long as this object lives."""
        address: int = self._kernel.address
        return address

    def quantize(self, x: int, codes: int, num_rows: int) -> None:
        """Write rows of ``row_bytes(dtype, width)`` at ``codes`` from fp32 ``[num_rows, width]`` at ``x``."""
        self._launch(self.kernel, self._num_threads, x, codes, num_rows, *(0,) * 9)


def compile_quantizer(width: int, dtype: str = "int8", *, on_progress: Progress | None = None) -> Any:
    """Compile the kernel for a width and type of rows, or load it from the user's cache."""
    if dtype == "int8_g32":
        return compile_kernels("kernel_group_quantize", {"WIDTH": width}, on_progress)["quantize"]
    constants = {
        "WIDTH": width,
        "ROTATION": rotation(width),
        "ROW_BYTES": row_bytes(dtype, width),
        "LIMIT": activation_limit(width),
        "PLANES": multiplies_bytes(),
    }
    return compile_kernels("kernel_quantize", constants, on_progress)["quantize"]
