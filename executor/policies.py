"""Capacity policies: which requests may hold memory in the next step. The names and their meaning are TensorRT-LLM's.

A policy sees the active list (priority first, then arrival) and answers with ``fitting``, those that may run, and
``paused``, those that must give their memory up first. It changes nothing itself.
"""

from typing import NamedTuple, Protocol

from trtcb.executor.active_list import ActiveList
from trtcb.executor.sequence import Sequence


class Choice(NamedTuple):
    """What a policy decided for one step. ``paused`` is in the order of the decisions."""

    fitting: list[Sequence]
    paused: list[Sequence]


class CapacityPolicy(Protocol):
    """Decides about memory, once per step. Stateless."""

    def select(self, active: ActiveList) -> Choice:
        """Choose who may run and who is paused for it."""


class GuaranteedNoEvict:
    """Start a request only if its whole output is sure to fit beside those that run. Nobody is ever paused.

    The head of the line blocks: no later, smaller request jumps ahead of one that does not fit. Started requests come
    first whatever their priority, because their memory was promised (upstream considers a half-computed prompt by
    rank, and can deadlock between it and a newcomer of higher priority; without priorities the two are the same).
    """

    def select(self, active: ActiveList) -> Choice:
        """Continue all that started, then start requests in order while their completion fits."""
        return Choice(_continued(active) + _startable(active, skipping=True), [])


class StaticBatch:
    """Form a batch, let it generate until its last request ends, form the next: the baseline of every comparison."""

    def select(self, active: ActiveList) -> Choice:
        """Continue what generates. Only if nothing does, compute prompts: as NO_EVICT does, but without skipping."""
        generating = [seq for seq in active.running if seq.generating]
        return Choice(generating or _continued(active) + _startable(active, skipping=False), [])


class MaxUtilization:
    """Start whatever fits right now; when memory or the batch is full, pause the lowest-ranked started request.

    A paused request keeps its place and its tokens, and recomputes what it cannot find in the prefix cache.
    """

    def select(self, active: ActiveList) -> Choice:
        """Go through the active list, pausing from its end while the next request lacks memory or a place."""
        fitting: list[Sequence] = []
        paused: list[Sequence] = []
        running, used_blocks = active.running, 0
        first, last = 0, len(running)  # running[first:last] are started, undecided, and so may be paused
        for seq in active.in_order():
            if paused and not seq < paused[-1]:
                break  # from the last victim on, everybody waits for the next step
            if not seq.started:
                if first == last and len(fitting) == active.max_requests:
                    break
                if active.beneficial_to_skip(seq):
                    continue
            need = active.blocks_this_step(seq)
            while len(fitting) == active.max_requests or used_blocks + need > active.free_blocks:
                if first == last:
                    return Choice(fitting, paused)
                last -= 1
                paused.append(running[last])
                active.pause(running[last])
                if running[last] is seq:
                    return Choice(fitting, paused)
                need = active.blocks_this_step(seq)  # the victim may have shared blocks with it
            fitting.append(seq)
            used_blocks += need
            if seq.started:
                first += 1
            else:
                active.admit(seq)
        return Choice(fitting, paused)


def _continued(active: ActiveList) -> list[Sequence]:
    """Everybody who started, first those that generate."""
    generating = [seq for seq in active.running if seq.generating]
    if len(generating) < len(active.running):
        generating += [seq for seq in active.running if not seq.generating]
    return generating


def _startable(active: ActiveList, *, skipping: bool) -> list[Sequence]:
    """Choose requests to start, in order, each with all the blocks it can ever need."""
    starting: list[Sequence] = []
    free_blocks = active.free_blocks - active.reserved_blocks
    num_places = active.max_requests - len(active.running)
    for seq in active.waiting:
        if len(starting) == num_places:
            break
        if skipping and active.beneficial_to_skip(seq):
            continue
        need = active.blocks_to_completion(seq)
        if need > free_blocks:
            break
        starting.append(seq)
        free_blocks -= need
        active.admit(seq)
    return starting


CAPACITY_POLICIES: dict[str, CapacityPolicy] = {
    "guaranteed_no_evict": GuaranteedNoEvict(),
    "max_utilization": MaxUtilization(),
    "static_batch": StaticBatch(),
}
