"""Turns logits into tokens on the CPU."""

from typing import Protocol

import numba
import numpy as np
import numpy.typing as npt

from trtcb.plugins.cpu.specialize import Progress, compile_kernels, compile_launcher, load_module

FAILED_TOKEN = -1
"""Token of a row whose logits hold a NaN or nothing finite to choose: the engine fails that request alone."""


class SamplingSettings(Protocol):
    """One entry per row ``[NL]``. ``top_k=0``, ``top_p=1``, ``min_p=0`` are off; ``temperature=0`` is greedy."""

    # read-only, so that a frozen dataclass fits

    @property
    def temperature(self) -> npt.NDArray[np.float32]:
        """Divides the logits."""

    @property
    def top_k(self) -> npt.NDArray[np.int32]:
        """Keeps so many of the likeliest tokens."""

    @property
    def top_p(self) -> npt.NDArray[np.float32]:
        """Keeps the likeliest tokens that together reach this probability."""

    @property
    def min_p(self) -> npt.NDArray[np.float32]:
        """Keeps tokens at least this likely relative to the likeliest."""

    @property
    def seed(self) -> npt.NDArray[np.uint64]:
        """Key of the random numbers."""

    @property
    def position(self) -> npt.NDArray[np.int32]:
        """Index of the token to be drawn: their counter."""


class Sampler:
    """Samples rows of logits. Filters apply in the order top-k, top-p, min-p, after the temperature.

    Greedy takes the first of equal maxima. A filter keeps all tokens that tie with the last one it must keep. The draw
    is by inverse transform in order of token id, with one number from Philox4x32-10 keyed by (seed, position): a row's
    token depends on its own logits and settings only, bit by bit.
    """

    def __init__(self, vocab_size: int, *, num_threads: int | None = None, on_progress: Progress | None = None) -> None:
        self._vocab_size = vocab_size
        self._num_threads = numba.get_num_threads() if num_threads is None else num_threads
        self._kernel = compile_kernels("kernel_sampling", {}, on_progress)["sample"]
        self._launch = compile_launcher()
        self._scratch_bytes: int = load_module("kernel_sampling", {}).scratch_bytes(vocab_size)
        self._scratch = np.zeros(self._scratch_bytes * self._num_threads, np.uint8)

    def sample(self, logits: int, rows: SamplingSettings) -> npt.NDArray[np.int32]:
        """Tokens ``[NL]`` for fp32 logits ``[NL, vocab_size]`` at an address; ``FAILED_TOKEN`` where there is none."""
        num_rows = len(rows.temperature)
        tokens = np.empty(num_rows, np.int32)
        settings = (
            np.ascontiguousarray(rows.temperature, np.float32),
            np.ascontiguousarray(rows.top_k, np.int32),
            np.ascontiguousarray(rows.top_p, np.float32),
            np.ascontiguousarray(rows.min_p, np.float32),
            np.ascontiguousarray(rows.seed, np.uint64),
            np.ascontiguousarray(rows.position, np.int32),
        )
        self._launch(
            self._kernel.address,
            max(1, min(self._num_threads, num_rows)),
            *(logits, self._vocab_size, *(array.ctypes.data for array in settings), tokens.ctypes.data),
            *(num_rows, self._scratch.ctypes.data, self._scratch_bytes),
        )
        return tokens
