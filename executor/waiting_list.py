"""Sequences that wait for memory and a slot, in rank order."""

from collections.abc import Iterator

from sortedcontainers import SortedKeyList

from trtcb.executor.sequence import Rank, Sequence


class WaitingList:
    """Sorted by ``Sequence.rank``, which must not change while a sequence is in it. Costs O(log n) per change.

    A plain list moves all that stand behind whoever comes or goes, which a queue of a million feels.
    """

    def __init__(self) -> None:
        self._sequences: SortedKeyList[Sequence, Rank] = SortedKeyList(key=_rank)

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._sequences

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence | None:
        """Whose turn it is, or None."""
        return self._sequences[0] if self._sequences else None

    def add(self, seq: Sequence) -> None:
        """Put a sequence where its rank says."""
        self._sequences.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out; it must be in the list."""
        self._sequences.remove(seq)


def _rank(seq: Sequence) -> Rank:
    return seq.rank
