"""Edits logits before sampling and tells log-probabilities after it, on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numba
import numpy as np
import numpy.typing as npt

from trtcb.plugins.cpu.specialize import Progress, compile_kernels, compile_launcher

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
_DTYPES: dict[str, Any] = {
    "repetition": np.float32,
    "frequency": np.float32,
    "presence": np.float32,
    "token_start": np.int32,
    "token_ids": np.int32,
    "output_counts": np.int32,
    "bias_start": np.int32,
    "bias_ids": np.int32,
    "bias": np.float32,
}  # in the order of the kernel's table


class Edits(Protocol):
    """Biases, then penalties, of the rows ``[NL]``; ``*_start`` ``[NL + 1]`` say which entries are whose.

    Ids must lie within the vocabulary: nothing is checked.
    """

    # read-only, so that a frozen dataclass fits

    @property
    def repetition(self) -> Float32:
        """Divides positive logits of the listed tokens, multiplies others; 1 is off."""

    @property
    def frequency(self) -> Float32:
        """Is subtracted once for each time a token is in the output; 0 is off."""

    @property
    def presence(self) -> Float32:
        """Is subtracted if a token is in the output; 0 is off."""

    @property
    def token_start(self) -> Int32:
        """Where each row's penalised tokens begin."""

    @property
    def token_ids(self) -> Int32:
        """Tokens with penalties, distinct within a row."""

    @property
    def output_counts(self) -> Int32:
        """How often each of them is in the output."""

    @property
    def bias_start(self) -> Int32:
        """Where each row's biases begin."""

    @property
    def bias_ids(self) -> Int32:
        """Tokens with a bias."""

    @property
    def bias(self) -> Float32:
        """What is added to their logits; ``-inf`` rules a token out."""


class LogitEditor:
    """Treats rows of logits of one vocabulary. A row's result depends on that row alone, bit by bit."""

    def __init__(self, vocab_size: int, *, num_threads: int | None = None, on_progress: Progress | None = None) -> None:
        self._vocab_size = vocab_size
        self._num_threads = numba.get_num_threads() if num_threads is None else num_threads
        self._kernels = compile_kernels("kernel_logits", {}, on_progress)
        self._launch = compile_launcher()

    @contextmanager
    def edited(self, logits: int, edits: Edits) -> Iterator[None]:
        """Edit fp32 logits ``[NL, vocab_size]`` at an address, in place, and undo it to the bit at the end."""
        arrays = [np.ascontiguousarray(getattr(edits, name), dtype) for name, dtype in _DTYPES.items()]
        table = np.array([array.ctypes.data for array in arrays], np.int64)
        num_rows, num_biases = len(edits.repetition), len(edits.bias)
        saved = np.empty(num_biases + len(edits.token_ids), np.float32)
        arguments = (logits, self._vocab_size, num_rows, table.ctypes.data, saved.ctypes.data, num_biases)
        self._run("edit", num_rows, *arguments)
        try:
            yield
        finally:
            self._run("restore", num_rows, *arguments)

    def logprobs(self, logits: int, tokens: Int32, num_logprobs: Int32) -> tuple[Float32, Int32, Float32]:
        """Log-probabilities of the ``tokens`` drawn ``[NL]``; ids and log-probabilities of the likeliest ``[NL, K]``.

        ``num_logprobs`` says for each row how many of the likeliest it wants, -1 for none at all; ``K`` is the largest
        of them, at most the vocabulary. Entries that no row wants, and rows with a negative token, are 0.
        """
        num_rows = len(tokens)
        counts = np.minimum(num_logprobs, self._vocab_size).astype(np.int32)
        width = max(0, int(counts.max(initial=0)))
        tokens = np.ascontiguousarray(tokens, np.int32)
        drawn = np.zeros(num_rows, np.float32)
        top_ids, top = np.zeros((num_rows, width), np.int32), np.zeros((num_rows, width), np.float32)
        addresses = (array.ctypes.data for array in (drawn, top_ids, top))
        arguments = (logits, self._vocab_size, num_rows, tokens.ctypes.data, counts.ctypes.data, width, *addresses)
        self._run("logprobs", num_rows, *arguments)
        return drawn, top_ids, top

    def _run(self, kernel: str, num_rows: int, *arguments: int) -> None:
        parts = max(1, min(self._num_threads, num_rows))
        self._launch(self._kernels[kernel].address, parts, *arguments, *(0,) * (12 - len(arguments)))
