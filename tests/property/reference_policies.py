"""The capacity policies as their specification writes them down: slow, over one list, counting everything afresh."""

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
    fitting: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        everybody = [*self.scheduler.running, *self.scheduler.waiting]
        self.active = sorted(everybody, key=lambda s: (-s.request.priority, s.rank[1]))
        self.holders = Counter(block for seq in self.active for block in seq.blocks)
        self.free = self.scheduler.pool.num_blocks - len(self.holders)
        self.in_work = {self.next_block(seq) for seq in self.active if seq.started and not seq.generating} - {None}
        getattr(self, self.policy)()

    def next_block(self, seq: Sequence) -> tuple | None:
        """Salt and tokens up to the end of the first full block of the prompt that is not cached."""
        if not self.prefix_caching:
            return None
        num_cached = seq.num_computed // self.block_size if seq.started else len(self.cached(seq))
        if num_cached >= (len(seq.token_ids) - 1) // self.block_size:
            return None
        return (seq.request.cache_salt, *seq.token_ids[: (num_cached + 1) * self.block_size])

    def cached(self, seq: Sequence) -> list[int]:
        return self.scheduler.prefix_cache.match(seq)

    def num_in_use(self, seq: Sequence) -> int:
        return sum(self.holders[block] > 0 for block in self.cached(seq))

    def ceil(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def blocks_to_completion(self, seq: Sequence) -> int:
        needed = self.ceil(seq.max_len)
        return needed - (len(seq.blocks) if seq.started else self.num_in_use(seq))

    def blocks_this_step(self, seq: Sequence) -> int:
        if not seq.started:
            return self.ceil(len(seq.token_ids)) - self.num_in_use(seq)
        if not seq.generating:
            return 0
        if len(seq.blocks) * self.block_size > seq.num_computed:
            return 0  # a step that failed has taken it already
        past = len(seq.token_ids) - 1
        return self.ceil(past + 1) - self.ceil(past)

    def take(self, seq: Sequence) -> None:
        """``seq`` will run: if it starts now, it holds its referenced prefix and computes its next block."""
        self.fitting.append(seq)
        if not seq.started:
            self.in_work |= {self.next_block(seq)} - {None}
            self.holders.update(block for block in self.cached(seq) if self.holders[block] > 0)

    def is_skipped(self, seq: Sequence) -> bool:
        return not seq.started and self.next_block(seq) in self.in_work

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
        for seq in sorted(pending, key=lambda seq: not seq.started):  # who has started was promised its memory
            if skipping and self.is_skipped(seq):
                continue
            if len(self.fitting) >= self.max_requests:
                break
            need = self.blocks_to_completion(seq)
            if need > self.free:
                break
            self.free -= need
            self.take(seq)

    def max_utilization(self) -> None:
        end, i, used = len(self.active), 0, 0
        while i < end:
            seq = self.active[i]
            if self.is_skipped(seq):
                i += 1
                continue
            need = self.blocks_this_step(seq)
            if len(self.fitting) < self.max_requests and used + need <= self.free:
                self.take(seq)
                used += need
                i += 1
                continue
            started = [j for j in range(i, end) if self.active[j].started]
            if not started:
                break
            victim = self.active[started[-1]]
            for block in victim.blocks:
                self.holders[block] -= 1
                self.free += self.holders[block] == 0
            self.paused.append(victim)
            end = started[-1]
