"""The capacity policies as their specification writes them down: slow, over one list, counting everything afresh."""

import math
from collections import Counter
from dataclasses import dataclass, field

from trtcb.executor.scheduler import Scheduler
from trtcb.executor.sequence import Sequence


@dataclass
class Reference:
    """One pass over ``scheduler``'s requests. ``fitting`` and ``paused`` are what the policy must decide."""

    scheduler: Scheduler
    policy: str
    block_size: int
    max_requests: int
    prefix_caching: bool
    watermark: float = 0.0
    victim_policy: str = "newest"
    fitting: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)
    preemptors: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        everybody = [*self.scheduler.running, *self.scheduler.waiting]
        self.active = sorted(everybody, key=lambda s: s.rank)
        self.kept_free = math.ceil(self.watermark * self.scheduler.pool.num_blocks)
        # Who will be at its limit by a step in flight is not scheduled again, but still has its place and blocks.
        ending = [seq for seq in self.scheduler.settling if seq.started]
        self.max_requests -= len(ending)
        self.holders = Counter(block for seq in self.active + ending for block in seq.blocks)
        self.holders.update(self.scheduler.siblings.held_blocks())
        self.free = self.scheduler.pool.num_blocks - len(self.holders)
        computing = [seq for seq in self.active if seq.started and not seq.generating]
        for flight in self.scheduler._in_flight:
            computing += [seq for seq, _ in flight.step.chunks if seq.started]
        self.in_work = {self.next_block(seq) for seq in computing} - {None}
        # What is in work, and offered, the world checks.
        self.prompts_in_work = {self.prompt(seq) for seq in self.active if self.scheduler.siblings.in_work(seq)}
        getattr(self, self.policy)()

    def next_block(self, seq: Sequence) -> tuple | None:
        """Salt and tokens up to the end of the first full block of the prompt that is not cached."""
        if not self.prefix_caching:
            return None
        num_cached = len(self.cached(seq))
        if seq.started and num_cached != seq.num_published:
            return None  # its beginning is lost: it will never be published
        if num_cached >= (seq.num_tokens - 1) // self.block_size:
            return None
        return (seq.request.cache_salt, *seq.token_ids[: (num_cached + 1) * self.block_size])

    def cached(self, seq: Sequence) -> list[int]:
        source = self.source(seq)
        if source is not None:
            return source.blocks[: (seq.num_prompt_tokens - 1) // self.block_size]
        return self.scheduler.prefix_cache.match(seq)

    def prompt(self, seq: Sequence) -> tuple | None:
        """What siblings have in common, where more than one token of it can be shared."""
        request = seq.request
        if not request.fork_group or len(request.prompt_token_ids) == 1:
            return None
        return (request.fork_group, request.cache_salt, *request.prompt_token_ids)

    def source(self, seq: Sequence) -> Sequence | None:
        """The sibling that ``seq`` would fork from, if it never ran."""
        offered = self.scheduler.siblings.sources(seq)
        return next((other for other in offered if other not in self.paused), None)

    def copied(self, seq: Sequence) -> list[int]:
        """The block that a start of ``seq`` would hold in order to copy it."""
        source = self.source(seq)
        num_full, tail = divmod(seq.num_prompt_tokens - 1, self.block_size)
        return [source.blocks[num_full]] if source is not None and tail else []

    def num_in_use(self, seq: Sequence) -> int:
        return sum(self.holders[block] > 0 for block in self.cached(seq))

    def ceil(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def blocks_to_completion(self, seq: Sequence) -> int:
        needed = self.ceil(seq.max_len)
        return needed - (len(seq.blocks) if seq.started else self.num_in_use(seq))

    def blocks_this_step(self, seq: Sequence) -> int:
        if not seq.started:
            return self.ceil(seq.num_tokens) - self.num_in_use(seq)
        if not seq.generating:
            return 0
        if len(seq.blocks) * self.block_size > seq.num_computed:
            return 0  # a step that failed has taken it already
        past = seq.num_tokens - 1
        return self.ceil(past + 1) - self.ceil(past)

    def take(self, seq: Sequence) -> None:
        """``seq`` will run: if it starts now, it holds its referenced prefix and computes its next block."""
        self.fitting.append(seq)
        if not seq.started:
            self.in_work |= {self.next_block(seq)} - {None}
            self.prompts_in_work |= {self.prompt(seq)} - {None}
            held = self.cached(seq) + self.copied(seq)
            self.holders.update(block for block in held if self.holders[block] > 0)

    def is_skipped(self, seq: Sequence) -> bool:
        if seq.started or self.source(seq) is not None:
            return False
        return self.next_block(seq) in self.in_work or (not seq.num_pauses and self.prompt(seq) in self.prompts_in_work)

    def guaranteed_no_evict(self) -> None:
        self._pass_1()
        self._pass_2(skipping=True)

    def static_batch(self) -> None:
        self._pass_1()
        if not self.fitting:
            self._pass_2(skipping=False)

    def _pass_1(self) -> None:
        for seq in self.active:
            if seq.generating and len(self.fitting) < self.max_requests:
                self.take(seq)
                self.free -= self.blocks_to_completion(seq)

    def _pass_2(self, *, skipping: bool) -> None:
        pending = [seq for seq in self.active if not seq.generating]
        before = len(self.fitting)
        self._take_pending(pending, skipping)
        if not before and not self.fitting:  # upstream hangs here for ever
            self._take_pending([seq for seq in pending if seq.started], skipping)

    def _take_pending(self, pending: list[Sequence], skipping: bool) -> None:
        places = self.max_requests - sum(seq.started for seq in self.active)  # who has started keeps its place
        for seq in pending:
            if not seq.started and places == 0:
                continue
            if skipping and self.is_skipped(seq):
                continue
            need = self.blocks_to_completion(seq)
            is_alone = not self.fitting and not any(other.started for other in self.active)
            if need > self.free:
                break
            if not seq.started and not is_alone and need + self.kept_free > self.free:
                places = 0
                continue
            self.free -= need
            places -= not seq.started
            self.take(seq)

    def max_utilization(self) -> None:
        used = 0
        closed = False  # whether newcomers are still looked at
        for seq in self.active:
            if seq in self.paused:
                closed = True
                continue
            if not seq.started and (closed or self.is_skipped(seq)):
                continue
            is_taken, stays_out = False, False
            while not is_taken and seq not in self.paused:
                need = self.blocks_this_step(seq)
                later = [s for s in self.active if s.started and s.rank > seq.rank and s not in self.paused]
                if len(self.fitting) < self.max_requests and used + need <= self.free:
                    is_watched = not seq.started and seq not in self.preemptors and (self.fitting or later)
                    if is_watched and used + need + self.kept_free > self.free:
                        closed = stays_out = True
                        break
                    self.take(seq)
                    used += need
                    is_taken = True
                elif later:
                    self.pause(self.victim(later), seq)
                elif seq.started:
                    self.pause(seq, seq)
                else:
                    return
            if not is_taken and not stays_out:
                return

    def pause(self, victim: Sequence, preemptor: Sequence) -> None:
        self.preemptors.append(preemptor)
        for block in victim.blocks:
            self.holders[block] -= 1
            self.free += self.holders[block] == 0
        self.paused.append(victim)

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """Spare the higher priorities, then those that are nearly done, then those that lose most, then the older."""
        if self.victim_policy == "newest":
            return candidates[-1]

        def price(seq: Sequence) -> tuple:
            is_nearly_done = seq.max_len - seq.num_tokens <= self.block_size
            return (seq.request.priority, is_nearly_done, seq.num_computed, -candidates.index(seq))

        return min(candidates, key=price)
