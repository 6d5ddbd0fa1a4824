"""What drawing one request's next token needs beyond its settings: which tokens it has seen, which are ruled out.

All of it is a function of the request and of its tokens so far, so pauses, chunks and failed steps cannot disturb it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trtcb.executor.request import SamplingParams, TokenLogprobs
from trtcb.executor.runtime import Float32, Int32, LogitEdits, StepLogprobs

if TYPE_CHECKING:
    from trtcb.executor.sequence import Sequence

_NO_IDS = np.zeros(0, np.int32)
_NO_BIAS = np.zeros(0, np.float32)


class SamplingState:
    """The logit edits of one sequence. Exists only where a request asks for some: see :meth:`of`."""

    __slots__ = ("_biases", "_counts", "_index", "_is_counting_prompt", "_num_seen", "_seen", "params")

    def __init__(self, params: SamplingParams, end_token_ids: Items[int]) -> None:
        self.params = params
        ids = np.array([token for token, _ in params.logit_bias], np.int32)
        bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        ends = np.array(end_token_ids, np.int32)
        masked = np.full(len(ends), -np.inf, np.float32)
        # (ids, bias) once ends may be drawn, and before that
        self._biases = ((ids, bias), (np.concatenate([ids, ends]), np.concatenate([bias, masked])))
        self._is_counting_prompt = params.repetition_penalty != 1.0
        self._num_seen = 0  # tokens of the sequence that are counted
        self._index: dict[int, int] = {}  # token id to its place in the two arrays
        self._seen = array("i")
        self._counts = array("i")

    @staticmethod
    def of(params: SamplingParams, *, end_token_ids: Items[int]) -> SamplingState | None:
        """Make the state of a request that wants its logits edited, None for any other.

        ``end_token_ids`` are those that end it, ruled out for the first ``min_tokens``.
        """
        has_ends = params.min_tokens > 0 and len(end_token_ids) > 0
        if not (_has_penalties(params) or params.logit_bias or has_ends):
            return None
        return SamplingState(params, end_token_ids)

    def bias(self, num_generated: int) -> tuple[Int32, Float32]:
        """Token ids and what is added to their logits for output token number ``num_generated``."""
        return self._biases[num_generated < self.params.min_tokens]

    def seen(self, seq: Sequence) -> tuple[Int32, Int32]:
        """Distinct tokens of ``seq`` that have a penalty, and how often each is in its output."""
        if not _has_penalties(self.params):
            return _NO_IDS, _NO_IDS
        if not self._num_seen:
            self._num_seen = seq.num_prompt_tokens
            if self._is_counting_prompt:
                self._list_prompt(seq.request.prompt_token_ids)
        self._count(seq.token_ids[self._num_seen :])
        self._num_seen = len(seq.token_ids)
        return np.array(self._seen, np.int32), np.array(self._counts, np.int32)  # copies: a view would lock the array

    def _list_prompt(self, prompt: Items[int]) -> None:
        distinct = dict.fromkeys(prompt)  # no loop over what may be a hundred thousand tokens
        self._seen = array("i", distinct)
        self._counts = array("i", bytes(self._counts.itemsize * len(distinct)))
        self._index = {token: place for place, token in enumerate(distinct)}

    def _count(self, output: Items[int]) -> None:
        for token in output:
            place = self._index.setdefault(token, len(self._seen))
            if place == len(self._seen):
                self._seen.append(token)
                self._counts.append(0)
            self._counts[place] += 1


def logit_edits(drawing: Items[Sequence]) -> LogitEdits:
    """Pack what the drawing sequences of a step, in batch order, want done to their logits."""
    num_rows = len(drawing)
    repetition, frequency, presence = np.ones(num_rows, np.float32), *np.zeros((2, num_rows), np.float32)
    seen: list[tuple[Int32, Int32]] = [(_NO_IDS, _NO_IDS)] * num_rows
    biases: list[tuple[Int32, Float32]] = [(_NO_IDS, _NO_BIAS)] * num_rows
    for row, seq in enumerate(drawing):
        state = seq.sampling
        if state is None:
            continue
        repetition[row] = state.params.repetition_penalty
        frequency[row] = state.params.frequency_penalty
        presence[row] = state.params.presence_penalty
        seen[row] = state.seen(seq)
        biases[row] = state.bias(seq.num_generated)
    return LogitEdits(
        repetition=repetition,
        frequency=frequency,
        presence=presence,
        token_start=_starts([len(ids) for ids, _ in seen]),
        token_ids=np.concatenate([ids for ids, _ in seen]),
        output_counts=np.concatenate([counts for _, counts in seen]),
        bias_start=_starts([len(ids) for ids, _ in biases]),
        bias_ids=np.concatenate([ids for ids, _ in biases]),
        bias=np.concatenate([bias for _, bias in biases]),
    )


def token_logprobs(
    seq: Sequence, token_id: int, logprobs: StepLogprobs | None, row: int
) -> tuple[TokenLogprobs, ...] | None:
    """Return what row ``row`` of a step tells of ``seq``'s new token; None unless the request asked for it."""
    count = seq.request.params.logprobs
    if count is None or logprobs is None:
        return None
    top = zip(logprobs.top_ids[row, :count].tolist(), logprobs.top[row, :count].tolist(), strict=True)
    return (TokenLogprobs(token_id, float(logprobs.drawn[row]), tuple(top)),)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _starts(sizes: list[int]) -> Int32:
    starts: npt.NDArray[np.int32] = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=starts[1:])
    return starts
