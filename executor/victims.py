"""Victim policies: whom MAX_UTILIZATION pauses when memory or the batch is full."""

from collections.abc import Callable
from collections.abc import Sequence as ListOf

from trtcb.executor.sequence import Sequence

VictimPolicy = Callable[[ListOf[Sequence]], Sequence]
"""Picks one of the candidates: started sequences in rank order, at least one, never the one that needs the memory."""


def newest(candidates: ListOf[Sequence]) -> Sequence:
    """The last in rank: upstream's choice."""
    return candidates[-1]


class Cheapest:
    """Of the lowest priority among the candidates, the one with the fewest computed tokens to lose; ties to the newest.

    Those within a block of their declared limit are spared while there are others: they give their memory back soon.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def __call__(self, candidates: ListOf[Sequence]) -> Sequence:
        """Pick the cheapest."""
        lowest = min(seq.request.priority for seq in candidates)
        best, best_cost = None, (True, 0)
        for seq in reversed(candidates):
            if seq.request.priority == lowest:
                cost = (seq.max_len - seq.num_tokens <= self._block_size, seq.num_computed)
                if best is None or cost < best_cost:
                    best, best_cost = seq, cost
        return candidates[-1] if best is None else best


VICTIM_POLICIES: dict[str, Callable[[int], VictimPolicy]] = {
    "newest": lambda block_size: newest,
    "cheapest": Cheapest,
}
