"""The token budget of a step: which of the sequences that fit in memory run, and how much of each prompt."""

from collections.abc import Callable
from typing import Protocol

from trtcb.executor.sequence import Sequence

Chunk = tuple[Sequence, int]  # a context and how many of its tokens this step computes


class ChunkPolicy(Protocol):
    """Splits ``capacity`` tokens among contexts. Only the last chunk of a context may not be a multiple of ``unit``."""

    def __call__(self, remaining: list[int], capacity: int, unit: int) -> list[int]:
        """Return each context's tokens, given what ``remaining`` it still needs; 0 leaves it out of this step."""


def equal_progress(remaining: list[int], capacity: int, unit: int) -> list[int]:
    """In rounds, each context in order gets one unit more, unless that is over capacity; until a round adds nothing."""
    chunks = [0] * len(remaining)
    progressed = True
    while progressed:
        progressed = False
        for index, total in enumerate(remaining):
            step = min(unit, total - chunks[index])
            if 0 < step <= capacity:
                chunks[index] += step
                capacity -= step
                progressed = True
    return chunks


def first_come_first_served(remaining: list[int], capacity: int, unit: int) -> list[int]:
    """Each context in order takes all it needs, or as many whole units as are left."""
    chunks = []
    for total in remaining:
        chunk = total if total <= capacity else capacity // unit * unit
        capacity -= chunk
        chunks.append(chunk)
    return chunks


CHUNK_POLICIES: dict[str, ChunkPolicy] = {
    "first_come_first_served": first_come_first_served,
    "equal_progress": equal_progress,
}


class TokenBudget:
    """``max_num_tokens`` per step. A generating sequence costs 1, a context what it computes; cached tokens are free.

    With a chunk policy, contexts share what the generating sequences leave, but ``max_prefill_tokens`` at most. Without
    one (None), everybody is charged in order and the first who is over budget ends the step's list; ``stall_free``
    then charges the generating sequences first (with a chunk policy they are anyway).
    """

    def __init__(
        self,
        max_num_tokens: int,
        chunk_policy: ChunkPolicy | None,
        unit: int,
        *,
        stall_free: bool = False,
        max_prefill_tokens: int | None = None,
    ) -> None:
        self._max_num_tokens = max_num_tokens
        self._max_prefill_tokens = max_num_tokens if max_prefill_tokens is None else max_prefill_tokens
        self._chunk_policy = chunk_policy
        self._unit = unit
        self._in_order_of_charge = _generating_first if stall_free else _as_listed

    def fill(
        self, fitting: list[Sequence], num_cached: Callable[[Sequence], int]
    ) -> tuple[list[Sequence], list[Chunk]]:
        """Choose the generating sequences and the chunks of contexts to run, both in the order of ``fitting``.

        ``num_cached`` tells how many tokens of a sequence that is not started need no computation.
        """

        def remaining(seq: Sequence) -> int:
            return seq.num_tokens - (seq.num_computed if seq.started else num_cached(seq))

        if self._chunk_policy is None:
            return self._charge_in_order(fitting, remaining)
        decodes = [seq for seq in fitting if seq.generating][: self._max_num_tokens]
        capacity = min(self._max_num_tokens - len(decodes), self._max_prefill_tokens)
        if len(decodes) == len(fitting) or not capacity:
            return decodes, []
        contexts = [(seq, remaining(seq)) for seq in fitting if not seq.generating]
        return decodes, self._cut(contexts, capacity, self._chunk_policy)

    def _charge_in_order(
        self, fitting: list[Sequence], remaining: Callable[[Sequence], int]
    ) -> tuple[list[Sequence], list[Chunk]]:
        left = self._max_num_tokens
        decodes: list[Sequence] = []
        contexts: list[Chunk] = []
        for seq in self._in_order_of_charge(fitting):
            cost = 1 if seq.generating else remaining(seq)
            if cost > left:
                break
            left -= cost
            if seq.generating:
                decodes.append(seq)
            else:
                contexts.append((seq, cost))
        return decodes, contexts

    def _cut(self, contexts: list[Chunk], capacity: int, policy: ChunkPolicy) -> list[Chunk]:
        remaining = [tokens for _, tokens in contexts]
        if sum(remaining) <= capacity:
            return contexts
        chunks = policy(remaining, capacity, self._unit)
        return [(seq, chunk) for (seq, _), chunk in zip(contexts, chunks, strict=True) if chunk]


def _as_listed(fitting: list[Sequence]) -> list[Sequence]:
    return fitting


def _generating_first(fitting: list[Sequence]) -> list[Sequence]:
    return sorted(fitting, key=lambda seq: not seq.generating)
