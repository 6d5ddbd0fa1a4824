"""In-flight batching: decides, before every step, which requests run, on how many tokens and in which blocks."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

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

    ``started`` took a slot for this step, ``grown`` took blocks for it (a superset), ``paused`` gave theirs up. The
    blocks of ``copies`` are copied before anything of the step is written.
    All that is derived from the rows is valid until :meth:`Scheduler.apply` only.
    """

    decodes: list[Sequence]
    chunks: list[Chunk]
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
        """Prompt tokens that are computed for the first time."""
        return sum(
            max(0, min(seq.num_computed + size, seq.num_prompt_tokens) - max(seq.num_computed, seq.max_computed))
            for seq, size in self.chunks
        )

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that were computed before and lost to a pause."""
        return sum(
            max(0, min(seq.num_computed + size, seq.max_computed) - seq.num_computed) for seq, size in self.chunks
        )

    def rows(self) -> Iterator[Sequence]:
        """Each sequence that takes part, in batch order."""
        yield from self.decodes
        for seq, _ in self.chunks:
            yield seq

    def drawing(self) -> list[Sequence]:
        """Sequences that draw a token, in batch order: whoever has all its tokens computed by this step."""
        return self.decodes + [seq for seq, size in self.chunks if seq.num_computed + size == seq.num_tokens]


class Scheduler:
    """Owns the block pool, the slots and the two ranked lists. Single-threaded.

    ``running`` holds what has a slot and blocks, ``waiting`` what has neither (new or paused), each sorted by rank.
    Whatever depends on many sequences is kept up to date where it changes, so that a pass costs nothing per waiting
    request.
    """

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.prefix_cache = PrefixCache(self.pool, config.block_size, enabled=config.prefix_caching)
        self.siblings = Siblings(self.pool, config.block_size)
        self.running: list[Sequence] = []
        self.waiting = WaitingList()
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

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.running or self.waiting)

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
        return Step(decodes, chunks, started, grown, paused, self.siblings.copies(seq for seq, _ in chunks))

    def apply(self, step: Step, tokens: list[int]) -> None:
        """Account for a step that ran. ``tokens`` are those of ``step.drawing()``.

        A negative token means that the row had no valid logits: it is not appended and nothing of its step is
        published. The caller must :meth:`fail` that sequence.
        """
        for seq, token in zip(step.decodes, tokens, strict=False):
            seq.num_computed += 1
            seq.room -= 1
            if token >= 0:
                seq.token_ids.append(token)
                if not seq.room:
                    self.prefix_cache.publish(seq)
        drawn = iter(tokens[len(step.decodes) :])
        for seq, size in step.chunks:
            seq.num_computed += size
            seq.room -= size
            seq.generating = seq.num_computed == seq.num_tokens
            if not seq.generating:
                self._share(seq)
            elif (token := next(drawn)) >= 0:
                self._share(seq)
                seq.token_ids.append(token)

    def pause(self, seq: Sequence) -> None:
        """Take a running sequence's memory; it keeps its tokens, to start over from, and is queued again."""
        seq.max_computed = max(seq.max_computed, seq.num_computed)
        self._stop(seq)
        seq.num_pauses += 1
        self.num_paused += 1
        self.prefix_cache.hash_tokens(seq)
        seq.rank = self._queue.queued(seq)
        self.waiting.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence that ended, for whatever reason and in whatever state."""
        self._queue.ended(seq)
        if seq.started:
            self._stop(seq)
        else:
            self.waiting.remove(seq)
            self.num_paused -= seq.num_pauses > 0
        self.siblings.leave(seq)

    def fail(self, seq: Sequence) -> None:
        """Remove a sequence whose computation went wrong: nobody may find its blocks again."""
        self.pool.forget(seq.blocks)
        self.siblings.distrust(seq)
        self.remove(seq)

    def audit(self) -> list[str]:
        """Check every book against every other. Returns the faults found, in words."""
        faults = self.pool.audit([*(seq.blocks for seq in self.running), self.siblings.held_blocks()])
        faults += self.siblings.audit(len(self.running) + len(self.waiting))
        slots = sorted([*self._slots, *(seq.slot for seq in self.running)])
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
            max_requests=self._max_batch_size,
            reserved_blocks=self.reserved_blocks,
            watermark_blocks=self._watermark_blocks,
            pick_victim=self._pick_victim,
        )

    def _claim(self, seq: Sequence, active: ActiveList) -> None:
        """Secure what others have computed of a sequence that is about to start."""
        seq.blocks = list(active.match(seq))
        self.pool.claim(seq.blocks)
        self.siblings.started(seq, active.fork(seq))
        seq.num_published = len(seq.blocks)
        seq.num_computed = active.num_cached_tokens(seq)
        seq.room = len(seq.blocks) * self._block_size - seq.num_computed  # below 0: the rest is in a block to copy

    def _start(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        seq.rank = self._queue.started(seq)
        insort(self.running, seq)
        seq.slot = self._slots.pop()
        self.reserved_blocks += self._blocks_to_limit(seq) - len(seq.blocks)
        if seq.num_pauses:
            self.num_paused -= 1
        else:
            seq.num_cached_tokens = seq.num_computed

    def _share(self, seq: Sequence) -> None:
        """Let others find what a collected chunk of a prompt has computed."""
        self.prefix_cache.publish(seq)
        self.siblings.computed(seq, seq.num_computed)

    def _grow(self, seq: Sequence) -> None:
        """Take the blocks that all present tokens need: a whole prompt at its start, later one at a time."""
        count = -(-seq.num_tokens // self._block_size) - len(seq.blocks)
        seq.blocks += self.pool.take(count)
        seq.room += count * self._block_size
        self.reserved_blocks -= count

    def _stop(self, seq: Sequence) -> None:
        """Give back everything a running sequence holds. The only place where slots and blocks are freed."""
        del self.running[bisect_left(self.running, seq)]
        self.reserved_blocks -= self._blocks_to_limit(seq) - len(seq.blocks)
        self._slots.append(seq.slot)
        self.pool.release(seq.blocks)
        self.siblings.stopped(seq)
        seq.slot, seq.blocks, seq.room = -1, [], 0
        seq.num_computed = seq.num_published = 0
        seq.generating = False

    def _blocks_to_limit(self, seq: Sequence) -> int:
        return -(-seq.max_len // self._block_size)
