"""What a capacity policy sees: every request in order, and what each would cost in blocks."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain

from trtcb.executor.block_pool import BlockPool
from trtcb.executor.prefix_cache import PrefixCache
from trtcb.executor.sequence import Sequence
from trtcb.executor.siblings import Fork, Forks, Siblings
from trtcb.executor.victims import VictimPolicy, newest
from trtcb.executor.waiting_list import WaitingList


class ActiveList:
    """All requests in rank order, with a simulated pool. Lives for one scheduling pass and changes nothing real.

    ``running`` (started: they hold a slot and blocks) and ``waiting`` (new or paused) are each sorted by rank already,
    so the active list itself is never built. ``free_blocks`` grows as the policy simulates pauses.

    Only *referenced* cached blocks reduce what a new request needs: claiming an unreferenced one consumes a free block.
    """

    def __init__(
        self,
        running: list[Sequence],
        waiting: WaitingList,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        siblings: Siblings,
        *,
        block_size: int,
        max_requests: int,
        reserved_blocks: int,
        watermark_blocks: int = 0,
        pick_victim: VictimPolicy = newest,
        in_flight: Iterable[Sequence] = (),
    ) -> None:
        self.running = running
        self.waiting = waiting
        self.max_requests = max_requests
        self.reserved_blocks = reserved_blocks  # what `running` may still take until its limits
        self.watermark_blocks = watermark_blocks  # that shall stay free when a request starts
        self.pick_victim = pick_victim
        self.free_blocks = pool.num_free
        self._references = pool.references
        self._prefix_cache = prefix_cache
        self._forks = Forks(siblings)
        self._block_size = block_size
        self._matches: dict[Sequence, list[int]] = {}
        self._reference_changes: dict[int, int] = {}
        self._in_flight = in_flight  # started ones whose prompt's last chunk is
        self._blocks_in_work: dict[int, set[bytes]] | None = None  # which block of a prompt -> keys

    def in_order(self) -> Iterator[Sequence]:
        """Iterate the active list: priority first, then arrival. A paused request keeps its place."""
        start = 0
        waiting = iter(self.waiting)
        for seq in waiting:
            stop = bisect_left(self.running, seq, start)
            yield from self.running[start:stop]
            yield seq
            start = stop
            if start == len(self.running):
                break
        yield from waiting
        yield from self.running[start:]

    def match(self, seq: Sequence) -> list[int]:
        """Return the full blocks that hold the beginning of ``seq`` already: a start in this pass would claim them."""
        blocks = self._matches.get(seq)
        if blocks is None:
            fork = self._forks.of(seq)
            blocks = self._matches[seq] = self._prefix_cache.match(seq) if fork is None else fork.blocks
        return blocks

    def fork(self, seq: Sequence) -> Fork | None:
        """Return what ``seq`` would take over from a sibling, if it starts in this pass; ``match`` is part of it."""
        return self._forks.of(seq)

    def num_cached_tokens(self, seq: Sequence) -> int:
        """Tokens at the beginning of ``seq``, which is not started, that need no computation."""
        fork = self._forks.of(seq)
        return len(self.match(seq)) * self._block_size if fork is None else fork.num_tokens

    def blocks_to_completion(self, seq: Sequence) -> int:
        """Blocks that a request still needs in order to run to its limit."""
        if seq.started:
            return -(-seq.max_len // self._block_size) - len(seq.blocks)
        return -(-seq.max_len // self._block_size) - self._num_referenced(seq)

    def blocks_this_step(self, seq: Sequence) -> int:
        """Blocks that one step of ``seq`` takes: a start takes its whole prompt's, even if chunked."""
        if seq.started:
            return 0 if seq.room else 1
        return -(-seq.num_tokens // self._block_size) - self._num_referenced(seq)

    def admit(self, seq: Sequence) -> None:
        """Take note that ``seq`` will start: its prefix gains a holder, and its next block somebody who computes it."""
        cached, fork = self.match(seq), self._forks.of(seq)
        self._forks.admit(seq)
        held = cached if fork is None or fork.copied_block is None else [*cached, fork.copied_block]
        for block in held:
            if self._is_referenced(block):
                self._reference_changes[block] = self._reference_changes.get(block, 0) + 1
        key = self._prefix_cache.key_of(seq, len(cached))
        if key is not None:
            self._in_work().setdefault(len(cached), set()).add(key)

    def pause(self, seq: Sequence) -> None:
        """Simulate that ``seq`` gives up its memory. A shared block only becomes free with its last holder."""
        for block in seq.blocks:
            self._reference_changes[block] = self._reference_changes.get(block, 0) - 1
            self.free_blocks += not self._is_referenced(block)
        for undone in self._forks.pause(seq):
            self._matches.pop(undone, None)

    def beneficial_to_skip(self, seq: Sequence) -> bool:
        """Whether somebody is computing what ``seq``, not started yet, would begin with: its first block, or prompt."""
        if seq.request.fork_group and self._forks.should_wait(seq):
            return True
        if seq.request.fork_group and self._forks.of(seq) is not None:
            return False
        # What comes before a block in work is published, so meeting its key suffices: no walk along each chain. All
        # that wait may have to be asked, so this is spelled out: what waits is hashed as far as it can be reused.
        keys = seq.keys
        for index, in_work in self._in_work().items():  # noqa: SIM110
            if index < len(keys) and keys[index] in in_work:
                return True
        return False

    def _num_referenced(self, seq: Sequence) -> int:
        return sum(map(self._is_referenced, self.match(seq)))

    def _is_referenced(self, block: int) -> bool:
        return self._references[block] + self._reference_changes.get(block, 0) > 0

    def _in_work(self) -> dict[int, set[bytes]]:
        if self._blocks_in_work is None:
            self._blocks_in_work = {}
            for seq in chain([seq for seq in self.running if not seq.generating], self._in_flight):
                index = seq.num_published  # what is computed but in flight is not published yet
                if len(self.match(seq)) == index and (key := self._prefix_cache.key_of(seq, index)) is not None:
                    self._blocks_in_work.setdefault(index, set()).add(key)
        return self._blocks_in_work
