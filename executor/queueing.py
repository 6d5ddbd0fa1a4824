"""Queue policies: the order of the active list. Upstream knows one, ``fcfs``; the others are ours.

A policy gives each sequence a rank when it is queued, and may give it another when it starts. Ranks never change while
a sequence stays in its list, which is what keeps a scheduling pass free of charge per waiting request.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from trtcb.executor.sequence import Rank, Sequence

_FIRST = -math.inf  # the key of what runs, where only what waits is reordered


class QueuePolicy(Protocol):
    """Ranks sequences: the lower goes first. Belongs to one scheduler."""

    def queued(self, seq: Sequence) -> Rank:
        """Rank of a new sequence, or of one that was just paused, among all that wait."""

    def started(self, seq: Sequence) -> Rank:
        """Rank while it runs. The last of the running is the first to be paused."""

    def ended(self, seq: Sequence) -> None:
        """Take note that a sequence was removed, for whatever reason."""


class ByPriority:
    """Higher ``Request.priority`` first, ties by arrival; a paused request keeps its place. Upstream's order.

    With ``ageing_s``, so many seconds of waiting outweigh the whole span of priorities: a request of priority 0 passes
    one of priority 1 that arrives more than ``ageing_s`` later, and half the span takes half of that. As everybody
    ages at the same speed, the order of two requests is settled when they arrive.
    """

    def __init__(self, ageing_s: float | None = None) -> None:
        self._ageing_s = math.inf if ageing_s is None else ageing_s

    def queued(self, seq: Sequence) -> Rank:
        """Rank by priority and age."""
        return (seq.arrival_s / self._ageing_s - seq.request.priority, 0.0, seq.number)

    def started(self, seq: Sequence) -> Rank:
        """Keep the rank: a newcomer of higher rank may preempt, as upstream has it."""
        return seq.rank

    def ended(self, seq: Sequence) -> None:
        """Keep no state."""


class ShortestRemainingFirst:
    """Within a priority, those with the fewest tokens left until their declared limit start first."""

    def queued(self, seq: Sequence) -> Rank:
        """Rank by what is left now."""
        return (-seq.request.priority, float(seq.max_len - seq.num_tokens), seq.number)

    def started(self, seq: Sequence) -> Rank:
        """Go before all that wait with the same priority."""
        return (-seq.request.priority, _FIRST, seq.number)

    def ended(self, seq: Sequence) -> None:
        """Keep no state."""


@dataclass(slots=True)
class _Tenant:
    """``last_start``: tag of its latest request. ``finish``: the virtual time by which all its service is paid for."""

    last_start: float
    finish: float


class WeightedFair:
    """Within a priority, start-time fair queueing by ``Request.tenant``: busy tenants share tokens by their weights.

    Each request gets a start tag: the virtual time, or the moment its tenant's earlier requests are paid for if that
    is later. It is charged for its prompt and its declared limit at once, in tokens over weight, and refunded when it
    ends for what it did not generate. Virtual time is the highest tag that has started. A refund moves what its tenant
    sends from then on; what is queued already keeps its tag.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._virtual_time = 0.0
        self._tenants: dict[str, _Tenant] = {}
        self._sweep_at = 64
        self._tags: dict[Sequence, float] = {}

    @property
    def num_tenants(self) -> int:
        """Tenants that are remembered: none that is paid up is kept for ever."""
        return len(self._tenants)

    def queued(self, seq: Sequence) -> Rank:
        """Rank by the start tag; a paused sequence keeps its own."""
        tag = self._tags.get(seq)
        if tag is None:
            tag = self._tags[seq] = self._charge(seq)
        return (-seq.request.priority, tag, seq.number)

    def started(self, seq: Sequence) -> Rank:
        """Advance the virtual time; go before all that wait with the same priority."""
        self._virtual_time = max(self._virtual_time, self._tags[seq])
        return (-seq.request.priority, _FIRST, seq.number)

    def ended(self, seq: Sequence) -> None:
        """Refund what was charged and not generated; all of it if the sequence never ran."""
        del self._tags[seq]
        tenant = self._tenants.get(seq.request.tenant)
        if tenant is not None:
            served = len(seq.token_ids) if seq.num_generated or seq.num_pauses or seq.started else 0
            tenant.finish -= (seq.max_len - served) / self._weight(seq)

    def _charge(self, seq: Sequence) -> float:
        now = self._virtual_time
        if len(self._tenants) >= self._sweep_at:
            self._tenants = {name: t for name, t in self._tenants.items() if max(t.finish, t.last_start) > now}
            self._sweep_at = max(64, 2 * len(self._tenants))
        tenant = self._tenants.setdefault(seq.request.tenant, _Tenant(now, now))
        tenant.finish = max(tenant.finish, now)
        # After a refund its next request may be due before its last one was, but never overtakes it.
        tag = tenant.last_start = max(tenant.finish, tenant.last_start)
        tenant.finish += seq.max_len / self._weight(seq)
        return tag

    def _weight(self, seq: Sequence) -> float:
        return self._weights.get(seq.request.tenant, 1.0)


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """What queue policies are made from."""

    ageing_s: float | None
    weights: Mapping[str, float]


QUEUE_POLICIES: dict[str, Callable[[QueueOptions], QueuePolicy]] = {
    "fcfs": lambda options: ByPriority(),
    "priority": lambda options: ByPriority(options.ageing_s),
    "srtf": lambda options: ShortestRemainingFirst(),
    "wfq": lambda options: WeightedFair(options.weights),
}
