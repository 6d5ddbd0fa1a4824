"""In-flight batching: decides, before every step, which requests run, on how many tokens and in which blocks."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from trtcb.executor.active_list import ActiveList
from trtcb.executor.block_pool import BlockPool
from trtcb.executor.chunking import CHUNK_POLICIES, Chunk, TokenBudget
from trtcb.executor.config import EngineConfig
from trtcb.executor.prefix_cache import PrefixCache
from trtcb.executor.sequence import Sequence
from trtcb.executor.siblings import Copy, Siblings
from trtcb.executor.victims import VICTIM_POLICIES
from trtcb.executor.waiting_list import WaitingList


@dataclass(frozen=True, slots=True)
class Step:
    """One step's rows: a token for each of ``decodes``, then the ``chunks`` of contexts.

    ``drawing`` are those that draw a token, in batch order: whoever has all its tokens computed by this step.
    ``started`` took a slot for this step, ``grown`` took blocks for it (a superset), ``paused`` gave theirs up. The
    blocks of ``copies`` are copied before anything of the step is written.
    """

    decodes: list[Sequence]
    chunks: list[Chunk]
    drawing: list[Sequence]
    started: list[Sequence]
    grown: list[Sequence]
    paused: list[Sequence]
    copies: list[Copy] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Sequences that take part."""
        return len(self.decodes) + len(self.chunks)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that are computed for the first time. Valid until :meth:`Scheduler.advance`."""
        return sum(
            max(0, min(seq.num_computed + size, seq.num_prompt_tokens) - max(seq.num_computed, seq.max_computed))
            for seq, size in self.chunks
        )

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that were computed before and lost to a pause. Valid until :meth:`Scheduler.advance`."""
        return sum(
            max(0, min(seq.num_computed + size, seq.max_computed) - seq.num_computed) for seq, size in self.chunks
        )

    def rows(self) -> Iterator[Sequence]:
        """Each sequence that takes part, in batch order."""
        yield from self.decodes
        for seq, _ in self.chunks:
            yield seq


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step in flight, and who will have how many tokens computed by it, where that may fill a block."""

    step: Step
    filled: list[tuple[Sequence, int]]


class Scheduler:
    """Owns the block pool, the slots and the two ranked lists. Single-threaded.

    ``running`` holds what has a slot and blocks, ``waiting`` what has neither (new or paused), each sorted by rank.
    Whatever depends on many sequences is kept up to date where it changes, so that a pass costs nothing per waiting
    request.

    A step is scheduled, then :meth:`advance` takes it as run, then :meth:`collect` takes its tokens in. In between it
    is in flight, and more steps may be scheduled: the runtime runs them in order, so what one step still uses can be
    given to a later one. ``settling`` are sequences that are not scheduled before a step in flight is collected: those
    that will have reached their limit by it (they keep slot and blocks), and those paused since it was launched.
    """

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.prefix_cache = PrefixCache(self.pool, config.block_size, enabled=config.prefix_caching)
        self.siblings = Siblings(self.pool, config.block_size)
        self.running: list[Sequence] = []
        self.waiting = WaitingList()
        self.settling: dict[Sequence, None] = {}  # in order
        self.num_paused = 0  # of `waiting`
        self.reserved_blocks = 0  # what `running` may still take until its limits
        self._policy = config.capacity_policy()
        self._queue = config.queue()
        self._pick_victim = VICTIM_POLICIES[config.victim_policy](config.block_size)
        self._watermark_blocks = math.ceil(config.watermark * num_blocks)
        self._budget = TokenBudget(
            config.max_num_tokens,
            CHUNK_POLICIES[config.chunk_policy] if config.chunked_prefill else None,
            unit=config.block_size,
            stall_free=config.stall_free,
            max_prefill_tokens=config.max_prefill_tokens,
        )
        self._block_size = config.block_size
        self._max_batch_size = config.max_batch_size
        self._slots = list(range(config.max_batch_size - 1, -1, -1))
        self._num_arrivals = 0
        self._in_flight: deque[_Flight] = deque()

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.running or self.waiting or self.settling)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot and blocks."""
        return self._max_batch_size - len(self._slots)

    @property
    def num_free_slots(self) -> int:
        """Rows of the slot table that nobody holds."""
        return len(self._slots)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence where the queue policy puts it. That it can ever fit was checked at submission."""
        seq.number = self._num_arrivals
        self._num_arrivals += 1
        seq.rank = self._queue.queued(seq)
        self.prefix_cache.hash_tokens(seq)
        self.siblings.join(seq)
        self.waiting.add(seq)

    def schedule(self) -> Step:
        """Choose and prepare the next step: who fits in memory, who in the token budget; then slots, then blocks."""
        active = self._active_list()
        fitting, paused = self._policy.select(active)
        decodes, chunks = self._budget.fill(fitting, active.num_cached_tokens)

        started = [seq for seq, _ in chunks if not seq.started]
        for seq in started:  # claims come before any release or allocation, which might take what is to be claimed
            self._claim(seq, active)
        for seq in paused:
            self.pause(seq)
        for seq in started:
            self._start(seq)
        grown = [seq for seq in decodes if not seq.room] + started
        for seq in grown:
            self._grow(seq)
        drawing = decodes + [seq for seq, size in chunks if seq.num_computed + size == seq.num_tokens]
        return Step(decodes, chunks, drawing, started, grown, paused, self.siblings.copies(seq for seq, _ in chunks))

    def advance(self, step: Step) -> None:
        """Take a step as run while it is in flight: what it computes counts, and who draws has one token more."""
        filled: list[tuple[Sequence, int]] = []
        for seq in step.decodes:
            seq.num_computed += 1
            seq.room -= 1
            if not seq.room:
                filled.append((seq, seq.num_computed))
        for seq, size in step.chunks:
            seq.num_computed += size
            seq.room -= size
            seq.generating = seq.num_computed == len(seq.token_ids)
            filled.append((seq, seq.num_computed))
        self._in_flight.append(_Flight(step, filled))
        for seq, num_computed in filled:
            if num_computed == seq.max_len - 1:
                self._leave_running(seq)
                self.settling[seq] = None

    def collect(self, tokens: list[int]) -> list[int]:
        """Take in what the oldest step in flight drew: ``tokens`` are those of its ``drawing``.

        Returns the rows (of ``drawing``) whose token is not kept: that of a sequence which ended meanwhile, and a
        negative one, which means that the row had no valid logits. Nothing of that row is published, and the caller
        must :meth:`fail` its sequence.
        """
        flight = self._in_flight.popleft()
        lost = []
        for row, (seq, token) in enumerate(zip(flight.step.drawing, tokens, strict=True)):
            if token < 0 or seq.ended:
                lost.append(row)
            else:
                seq.token_ids.append(token)
        for seq, num_computed in flight.filled:
            if seq.started and len(seq.token_ids) > num_computed:  # what it drew, if it did, was valid
                self.prefix_cache.publish(seq, num_computed)
                self.siblings.computed(seq, num_computed)
        for seq in [seq for seq in self.settling if not seq.started and not self._is_in_flight(seq)]:
            del self.settling[seq]
            self._requeue(seq)
        return lost

    def rollback(self) -> None:
        """Undo all steps in flight: nothing of them was computed, and their rows come again. Memory stays as it is."""
        while self._in_flight:
            step = self._in_flight.pop().step
            for seq, size in step.chunks:
                seq.generating = False
                seq.num_computed -= size
                seq.room += size
            for seq in step.decodes:
                seq.num_computed -= 1
                seq.room += 1
        settling, self.settling = self.settling, {}
        for seq in settling:
            if seq.started:
                self._join_running(seq)
            else:
                self._requeue(seq)

    def pause(self, seq: Sequence) -> None:
        """Take a running sequence's memory; it keeps its tokens, to start over from, and is queued again.

        If a row of it is in flight, it is queued when that is collected.
        """
        self._leave_running(seq)
        self._release(seq)
        seq.num_pauses += 1
        if self._is_in_flight(seq):
            self.settling[seq] = None
        else:
            self._requeue(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence that ended, for whatever reason and in whatever state."""
        self._queue.ended(seq)
        seq.ended = True
        if seq in self.settling:
            del self.settling[seq]
        elif seq.started:
            self._leave_running(seq)
        else:
            self.waiting.remove(seq)
            self.num_paused -= seq.num_pauses > 0
        if seq.started:
            self._release(seq)
        self.siblings.leave(seq)

    def fail(self, seq: Sequence) -> None:
        """Remove a sequence whose computation went wrong: nobody may find its blocks again."""
        self.pool.forget(seq.blocks)
        self.siblings.distrust(seq)
        self.remove(seq)

    def audit(self) -> list[str]:
        """Check every book against every other. Returns the faults found, in words."""
        holding = [*self.running, *(seq for seq in self.settling if seq.started)]
        faults = self.pool.audit([*(seq.blocks for seq in holding), self.siblings.held_blocks()])
        faults += self.siblings.audit(len(self.running) + len(self.waiting) + len(self.settling))
        slots = sorted([*self._slots, *(seq.slot for seq in holding)])
        if slots != list(range(self._max_batch_size)):
            faults.append(f"slots are lost or held twice: {slots}")
        reserved = sum(self._blocks_to_limit(seq) - len(seq.blocks) for seq in self.running)
        if reserved != self.reserved_blocks:
            faults.append(f"{self.reserved_blocks} blocks are booked as reserved, but {reserved} are")
        return faults

    def _active_list(self) -> ActiveList:
        return ActiveList(
            self.running,
            self.waiting,
            self.pool,
            self.prefix_cache,
            self.siblings,
            block_size=self._block_size,
            max_requests=len(self.running) + len(self._slots),
            reserved_blocks=self.reserved_blocks,
            watermark_blocks=self._watermark_blocks,
            pick_victim=self._pick_victim,
            in_flight=self._prompts_in_flight(),
        )

    def _prompts_in_flight(self) -> list[Sequence]:
        """Sequences whose prompt will be whole by a step in flight: its last blocks are not published yet."""
        chunks = chain.from_iterable(flight.step.chunks for flight in self._in_flight)
        return [seq for seq, _ in chunks if seq.generating]

    def _is_in_flight(self, seq: Sequence) -> bool:
        return any(seq in flight.step.rows() for flight in self._in_flight)

    def _claim(self, seq: Sequence, active: ActiveList) -> None:
        """Secure what others have computed of a sequence that is about to start."""
        seq.blocks = list(active.match(seq))
        self.pool.claim(seq.blocks)
        self.siblings.started(seq, active.fork(seq))
        seq.num_published = len(seq.blocks)
        seq.num_computed = active.num_cached_tokens(seq)

    def _start(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        seq.rank = self._queue.started(seq)
        seq.slot = self._slots.pop()
        self._join_running(seq)
        if seq.num_pauses:
            self.num_paused -= 1
        else:
            seq.num_cached_tokens = seq.num_computed

    def _grow(self, seq: Sequence) -> None:
        """Take the blocks that all present tokens need: a whole prompt at its start, later one at a time."""
        count = -(-seq.num_tokens // self._block_size) - len(seq.blocks)
        seq.blocks += self.pool.take(count)
        seq.room = min(len(seq.blocks) * self._block_size, seq.max_len - 1) - seq.num_computed
        self.reserved_blocks -= count

    def _join_running(self, seq: Sequence) -> None:
        insort(self.running, seq)
        self.reserved_blocks += self._blocks_to_limit(seq) - len(seq.blocks)

    def _leave_running(self, seq: Sequence) -> None:
        del self.running[bisect_left(self.running, seq)]
        self.reserved_blocks -= self._blocks_to_limit(seq) - len(seq.blocks)

    def _release(self, seq: Sequence) -> None:
        """Give back everything a sequence holds. The only place where slots and blocks are freed."""
        self._slots.append(seq.slot)
        self.pool.release(seq.blocks)
        self.siblings.stopped(seq)
        seq.slot, seq.blocks, seq.num_published, seq.generating = -1, [], 0, False

    def _requeue(self, seq: Sequence) -> None:
        """Let a paused sequence, all of whose tokens are known, wait for its restart."""
        seq.max_computed = max(seq.max_computed, seq.num_computed)
        seq.num_computed = seq.room = 0
        self.num_paused += 1
        self.prefix_cache.hash_tokens(seq)
        seq.rank = self._queue.queued(seq)
        self.waiting.add(seq)

    def _blocks_to_limit(self, seq: Sequence) -> int:
        return -(-seq.max_len // self._block_size)
