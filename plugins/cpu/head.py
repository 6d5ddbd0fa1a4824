"""The head on the CPU: fp32 logits from bf16 weights."""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from trtcb.plugins.cpu.isa import accumulators
from trtcb.plugins.cpu.specialize import Progress, compile_kernels, compile_launcher

PANEL = 64  # columns of a panel, as in kernel_head.py


class Head:
    """Packed weights of a head and the kernel for its shape. ``weight`` is ``[vocab, hidden]`` bf16 and not kept."""

    def __init__(
        self, weight: npt.NDArray[Any], *, num_threads: int | None = None, on_progress: Progress | None = None
    ) -> None:
        self._num_threads = numba.get_num_threads() if num_threads is None else num_threads
        self._kernel = compile_head(*weight.shape, on_progress=on_progress)
        self._launch = compile_launcher()
        self._panels = pack_panels(weight)

    def logits(self, hidden: int, logits: int, num_rows: int) -> None:
        """Write fp32 ``[num_rows, vocab]`` at ``logits`` from fp32 ``[num_rows, hidden]`` at ``hidden``."""
        if num_rows:  # a step of prompt chunks may want none
            arguments = (hidden, self._panels.ctypes.data, logits, num_rows)
            self._launch(self._kernel.address, self._num_threads, *arguments, *(0,) * 8)


def compile_head(vocab_size: int, hidden_size: int, *, on_progress: Progress | None = None) -> Any:
    """Compile the kernel for a shape, or load it from the user's cache."""
    constants = {"HIDDEN_SIZE": hidden_size, "VOCAB_SIZE": vocab_size, "ACCUMULATORS": accumulators()}
    return compile_kernels("kernel_head", constants, on_progress)["head"]


def pack_panels(weight: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """``[vocab, hidden]`` bf16 -> ``[panels, hidden, 64]`` bit patterns; missing columns are zero."""
    vocab_size, hidden_size = weight.shape
    panels = np.zeros((-(-vocab_size // PANEL), hidden_size, PANEL), np.uint16)
    whole = vocab_size // PANEL
    bits = weight.view(np.uint16)
    panels[:whole] = bits[: whole * PANEL].reshape(whole, PANEL, hidden_size).swapaxes(1, 2)
    if rest := vocab_size - whole * PANEL:
        panels[whole, :, :rest] = bits[whole * PANEL :].T
    return panels
