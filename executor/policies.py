"""Capacity policies: which requests may hold memory in the next step. The names and their meaning are TensorRT-LLM's.

A policy sees the active list (priority first, then arrival) and answers with ``fitting``, those that may run, and
``paused``, those that must give their memory up first. It changes nothing itself.
"""

from collections.abc import Iterable, Iterator
from heapq import merge
from typing import NamedTuple, Protocol, runtime_checkable

from trtcb.executor.active_list import ActiveList
from trtcb.executor.sequence import Sequence


class Choice(NamedTuple):
    """What a policy decided for one step. ``paused`` is in the order of the decisions."""

    fitting: list[Sequence]
    paused: list[Sequence]


@runtime_checkable
class CapacityPolicy(Protocol):
    """Decides about memory, once per step. An engine may be given one of your own: see ``examples/custom_policy.py``.

    Whatever it lets start or grow must fit into ``active.free_blocks``, ``fitting`` into ``active.max_requests``, and
    ``paused`` are started ones that are not ``fitting``. What breaks these rules ends the engine (``own_policy.py``).
    """

    def select(self, active: ActiveList) -> Choice:
        """Choose who may run and who is paused for it."""


class GuaranteedNoEvict:
    """Start a request only if its whole output is sure to fit beside those that generate. Nobody is ever paused.

    The head of the line blocks: no later, smaller request jumps ahead of one that does not fit. A half-computed prompt
    stands in line too; it owns its prompt's blocks, but the rest is promised to it only once it generates.
    """

    def select(self, active: ActiveList) -> Choice:
        """Continue what generates, then compute prompts in order while their completion fits."""
        generating = [seq for seq in active.running if seq.generating]
        return Choice(generating + _prompts(active, skipping=True), [])


class StaticBatch:
    """Form a batch, let it generate until its last request ends, form the next: the baseline of every comparison."""

    def select(self, active: ActiveList) -> Choice:
        """Continue what generates. Only if nothing does, compute prompts: as NO_EVICT does, but without skipping."""
        generating = [seq for seq in active.running if seq.generating]
        return Choice(generating or _prompts(active, skipping=False), [])


class MaxUtilization:
    """Start whatever fits right now; when memory or the batch is full, pause the lowest-ranked started request.

    A paused request keeps its place and its tokens, and recomputes what it cannot find in the prefix cache. With
    another victim policy than upstream's, what started behind a victim goes on; what waits behind it waits.
    """

    def select(self, active: ActiveList) -> Choice:
        """Go through the active list, pausing from its end while the next request lacks memory or a place."""
        one_pass = _MaxUtilizationPass(active)
        one_pass.run()
        return Choice(one_pass.fitting, one_pass.paused)


class _MaxUtilizationPass:
    """One pass over the active list: ``undecided`` are the started ones that are still to come, last one first."""

    def __init__(self, active: ActiveList) -> None:
        self.fitting: list[Sequence] = []
        self.paused: list[Sequence] = []
        self._active = active
        self._undecided = active.running[::-1]
        self._used_blocks = 0
        self._closed_from: Sequence | None = None  # nobody starts from this place in the list on

    def run(self) -> None:
        """Decide about everybody."""
        for seq in self._active.waiting if self._continue_all() else self._active.in_order():
            if self._closed_from is not None and not seq < self._closed_from:
                break
            if not (self._continue(seq) if seq.started else self._start(seq)):
                return
        while self._undecided and self._continue(self._undecided[-1]):
            pass

    def _continue_all(self) -> bool:
        """Let all that started go on at once, if they fit and nobody who waits stands before one: as in most passes."""
        running, first = self._active.running, self._active.waiting.first
        need = [seq.room for seq in running].count(0)
        stand_first = first is None or not running or running[-1] < first
        if not stand_first or need > self._active.free_blocks:
            return False
        self.fitting, self._undecided, self._used_blocks = running.copy(), [], need
        return True

    def _continue(self, seq: Sequence) -> bool:
        """Let a started request go on, or pause it if nobody else can be. False ends the pass."""
        self._undecided.pop()
        need = self._active.blocks_this_step(seq)
        while not self._fits(need):
            if not self._undecided:
                self._pause(seq)
                return False
            self._pause_one()
        self.fitting.append(seq)
        self._used_blocks += need
        return True

    def _start(self, seq: Sequence) -> bool:
        """Let a waiting request start if it may. False ends the pass."""
        active = self._active
        if not self._undecided and len(self.fitting) == active.max_requests:
            return False
        if active.beneficial_to_skip(seq):
            return True
        need = active.blocks_this_step(seq)
        others = bool(self.fitting or self._undecided)
        if others and self._fits(need) and not self._fits(need + active.watermark_blocks):
            self._closed_from = seq  # the watermark pauses nobody: whoever it keeps out waits
            return True
        while not self._fits(need):
            if not self._undecided:
                return False
            self._pause_one()
            need = active.blocks_this_step(seq)  # the victim may have shared blocks with it
        self.fitting.append(seq)
        self._used_blocks += need
        active.admit(seq)
        return True

    def _fits(self, need: int) -> bool:
        has_place = len(self.fitting) < self._active.max_requests
        return has_place and self._used_blocks + need <= self._active.free_blocks

    def _pause_one(self) -> None:
        victim = self._active.pick_victim(self._undecided[::-1])
        self._undecided.remove(victim)
        self._pause(victim)

    def _pause(self, seq: Sequence) -> None:
        self.paused.append(seq)
        self._active.pause(seq)
        if self._closed_from is None or seq < self._closed_from:
            self._closed_from = seq


def _prompts(active: ActiveList, *, skipping: bool) -> list[Sequence]:
    """Choose prompts to compute, in list order, each with all the blocks it can ever need beside what generates.

    Upstream's list order can lock up: a newcomer of higher rank that does not fit stands before half-computed prompts
    whose blocks it lacks, and nobody moves. When that happens, and only then, the half-computed ones pass it.
    """
    contexts = [seq for seq in active.running if not seq.generating]
    chosen = _while_they_fit(active, contexts, active.waiting, skipping=skipping)
    if not chosen and len(contexts) == len(active.running):
        chosen = _while_they_fit(active, contexts, (), skipping=skipping)
    return chosen


def _while_they_fit(
    active: ActiveList, contexts: list[Sequence], waiting: Iterable[Sequence], *, skipping: bool
) -> list[Sequence]:
    """Go through both in rank order until one's completion does not fit. Who started has a place in the batch."""
    chosen: list[Sequence] = []
    num_places = active.max_requests - len(active.running)

    def newcomers() -> Iterator[Sequence]:
        for seq in waiting:
            if num_places == 0:
                return
            yield seq

    free_blocks = active.free_blocks - active.reserved_blocks + sum(map(active.blocks_to_completion, contexts))
    for seq in merge(contexts, newcomers()) if contexts else newcomers():
        if not seq.started and skipping and active.beneficial_to_skip(seq):
            continue
        need = active.blocks_to_completion(seq)
        if need > free_blocks:
            break
        if not seq.started and (active.running or chosen) and need + active.watermark_blocks > free_blocks:
            num_places = 0  # the watermark holds newcomers back, and nobody else
            continue
        chosen.append(seq)
        free_blocks -= need
        if not seq.started:
            num_places -= 1
            active.admit(seq)
    return chosen


CAPACITY_POLICIES: dict[str, CapacityPolicy] = {
    "guaranteed_no_evict": GuaranteedNoEvict(),
    "max_utilization": MaxUtilization(),
    "static_batch": StaticBatch(),
}
