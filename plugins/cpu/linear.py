"""Products with a weight on the CPU: bf16 and fp32 weights times fp32 rows, int8 and int4 ones times quantised rows."""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from trtcb.errors import UsageError
from trtcb.plugins.cpu.arena import Arena
from trtcb.plugins.cpu.grouped import Int4Weight, pack_groups
from trtcb.plugins.cpu.isa import panel_columns, product_tile
from trtcb.plugins.cpu.quantized import MAX_DEPTH
from trtcb.plugins.cpu.specialize import Progress, compile_kernels, compile_launcher


class PackedLinear:
    """Packed weights and the kernel for their shape. ``weight`` is ``[N, K]`` bf16, fp32 or int8 and not kept.

    K must be even; of int8 weights, which have a scale a row ``[N]``, a multiple of 16. Int4 weights are the three
    arrays of :class:`~trtcb.plugins.cpu.grouped.Int4Weight`. A row's result does not depend on how many others there
    are, or on the number of threads. Panels lie in ``memory``, if given, beside others that are read in turn.
    """

    def __init__(
        self,
        weight: npt.NDArray[Any],
        scale: npt.NDArray[Any] | None = None,
        zero: npt.NDArray[np.float16] | None = None,
        *,
        memory: Arena | None = None,
        num_threads: int | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        self._num_threads = numba.get_num_threads() if num_threads is None else num_threads
        self._launch = compile_launcher()
        memory = Arena() if memory is None else memory
        width, depth = weight.shape
        if scale is not None and zero is not None:
            weights, depth = "int4", 2 * depth
            self._panels = pack_groups(Int4Weight(weight, scale, zero), panel_columns(weights), memory)
        else:
            weights = {1: "int8", 2: "bf16", 4: "fp32"}[weight.dtype.itemsize]
            self._panels = pack_panels(weight, scale, panel_columns(weights), memory, self._num_threads)
        self._kernel = compile_linear(width, depth, weights, on_progress=on_progress)

    @property
    def kernel(self) -> int:
        """Address of the kernel, for as long as this object lives."""
        address: int = self._kernel.address
        return address

    @property
    def panels(self) -> int:
        """Address of the packed weights, for as long as this object lives."""
        return self._panels.ctypes.data

    @property
    def num_bytes(self) -> int:
        """Size of the packed weights."""
        return self._panels.nbytes

    def multiply(self, x: int, out: int, num_rows: int) -> None:
        """Write fp32 ``[num_rows, N]`` at ``out`` from the rows at ``x``: fp32 ``[num_rows, K]``, or quantised."""
        if num_rows:  # a step of prompt chunks may want no logits
            self._launch(self.kernel, self._num_threads, x, self.panels, out, num_rows, *(0,) * 8)


def compile_linear(width: int, depth: int, weights: str, *, on_progress: Progress | None = None) -> Any:
    """Compile the kernel for a shape and type of weights, or load it from the user's cache.

    Raises ``UsageError`` for int8 weights whose sums could overflow: no model is that wide.
    """
    if weights == "int8" and depth > MAX_DEPTH:
        raise UsageError(
            f"Int8 products add at most {MAX_DEPTH:,} elements, and this model has {depth:,}: use --weight-dtype bf16."
        )
    rows, vectors = product_tile(weights)
    constants = {
        "DEPTH": depth,
        "WIDTH": width,
        "WEIGHTS": weights,
        "PANEL": panel_columns(weights),
        "ROWS": rows,
        "VECTORS": vectors,
    }
    return compile_kernels("kernel_linear", constants, on_progress)["linear"]


def compile_pack(on_progress: Progress | None = None) -> Any:
    """Compile the kernel that packs weights, or load it from the user's cache."""
    return compile_kernels("kernel_pack", {}, on_progress)["pack"]


def pack_panels(
    weight: npt.NDArray[Any],
    scale: npt.NDArray[np.float32] | None,
    columns: int,
    memory: Arena,
    num_threads: int,
) -> npt.NDArray[np.uint8]:
    """``[N, K]`` -> ``[panels, bytes]``: ``[K, columns]`` items; of int8 ``[K / 4, columns, 4]``, then fp32 scales.

    Missing columns are zero. The result lies in ``memory``.
    """
    width, depth = weight.shape
    rows = np.ascontiguousarray(weight)
    is_wide = weight.dtype.itemsize != 2
    num_items = depth * weight.dtype.itemsize // (4 if is_wide else 2)
    num_panels, weight_bytes = -(-width // columns), depth * weight.dtype.itemsize * columns
    panel_bytes = weight_bytes + (0 if scale is None else 4 * columns)
    panels = memory.take(num_panels * panel_bytes).reshape(num_panels, panel_bytes)
    arguments = (rows.ctypes.data, panels.ctypes.data, width, num_items, columns, panel_bytes, is_wide)
    compile_launcher()(compile_pack().address, num_threads, *arguments, *(0,) * 5)
    if scale is not None:
        padded = np.zeros(num_panels * columns, np.float32)
        padded[:width] = scale
        panels[:, weight_bytes:] = padded.view(np.uint8).reshape(num_panels, 4 * columns)
    return panels
