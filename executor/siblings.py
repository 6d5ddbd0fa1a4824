"""Several answers to one prompt: one computes it, the others fork from that, and copy the block they would share.

Siblings are requests of one ``fork_group`` whose prompts and salts are equal. Once one of them has its prompt computed,
another that never ran shares its full blocks by reference, copies the last, partial one when it first writes, which is
in its own first step, and computes nothing but the prompt's last token, whose logits it wants.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from trtcb.executor.block_pool import BlockPool
from trtcb.executor.sequence import Sequence

Copy = tuple[int, int]  # block to read, block to write


class Fork(NamedTuple):
    """What a sequence takes over from ``source``: full ``blocks`` to share, and one to copy, if any."""

    source: Sequence
    blocks: list[int]
    copied_block: int | None
    num_tokens: int  # of the prompt that need no computation: all but the last


@dataclass(slots=True, eq=False)
class _Group:
    """Unfinished siblings. Of those that hold memory, some compute the prompt, and others can be forked from."""

    key: "_Key"
    num_members: int = 0
    computing: set[Sequence] = field(default_factory=set)
    sources: dict[Sequence, None] = field(default_factory=dict)  # oldest first


_Key = tuple[str, str, tuple[int, ...]]  # group, salt and prompt: only what is equal is shared, whatever the name says


class Siblings:
    """Who may fork from whom, and who still owes a copy. Belongs to the scheduler, as the pool does.

    A fork holds a reference to the block that it copies until a step that did so is collected: a step that failed is
    run again, and must find the block as it was, whatever became of its owner.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._groups: dict[_Key, _Group] = {}
        self._group_of: dict[Sequence, _Group] = {}
        self._owed: dict[Sequence, int] = {}  # block that its next step has to copy first

    def join(self, seq: Sequence) -> None:
        """Take note of a new sequence. One token has nothing to share: it is computed anyway."""
        request = seq.request
        if not request.fork_group or seq.num_prompt_tokens < 2:
            return
        key = (request.fork_group, request.cache_salt, request.prompt_token_ids)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(key)
        group.num_members += 1
        self._group_of[seq] = group

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that ended and holds nothing any more."""
        group = self._group_of.pop(seq, None)
        if group is not None:
            group.num_members -= 1
            if not group.num_members:
                del self._groups[group.key]

    def started(self, seq: Sequence, fork: Fork | None) -> None:
        """Take note that ``seq`` got memory, and hold the block that it has to copy."""
        group = self._group_of.get(seq)
        if group is not None:
            group.computing.add(seq)
        if fork is not None and fork.copied_block is not None:
            self._pool.claim([fork.copied_block])
            self._owed[seq] = fork.copied_block

    def computed(self, seq: Sequence, num_computed: int) -> None:
        """Take note that a step was collected: ``seq`` has so many tokens computed, and its copy, if any, is made."""
        group = self._group_of.get(seq)
        if group is not None:
            self._settle(seq)
            if seq in group.computing and num_computed >= seq.num_prompt_tokens - 1:
                group.computing.remove(seq)
                group.sources[seq] = None

    def stopped(self, seq: Sequence) -> None:
        """Take note that ``seq`` gave its memory up."""
        group = self._group_of.get(seq)
        if group is not None:
            self._settle(seq)
            group.computing.discard(seq)
            group.sources.pop(seq, None)

    def distrust(self, seq: Sequence) -> None:
        """Let nobody fork from what ``seq``, whose computation went wrong, may share with its siblings."""
        group = self._group_of.get(seq)
        if group is not None:
            group.sources.clear()

    def sources(self, seq: Sequence) -> Iterable[Sequence]:
        """Sequences that ``seq`` could fork from now. One that was paused starts over by the prefix cache instead."""
        group = self._group_of.get(seq)
        return () if group is None or seq.started or seq.num_pauses else group.sources

    def in_work(self, seq: Sequence) -> bool:
        """Whether a sibling is computing the prompt."""
        group = self._group_of.get(seq)
        return group is not None and bool(group.computing)

    def group_of(self, seq: Sequence) -> object | None:
        """What ``seq`` and its siblings have in common; None for a request with a single answer."""
        return self._group_of.get(seq)

    def fork(self, seq: Sequence, source: Sequence) -> Fork:
        """What ``seq`` would take over from ``source``."""
        num_tokens = seq.num_prompt_tokens - 1
        num_full, tail = divmod(num_tokens, self._block_size)
        return Fork(source, source.blocks[:num_full], source.blocks[num_full] if tail else None, num_tokens)

    def copies(self, seqs: Iterable[Sequence]) -> list[Copy]:
        """Copies that a step of ``seqs`` has to make before it writes anything."""
        if not self._owed:
            return []
        return [
            (self._owed[seq], seq.blocks[seq.num_computed // self._block_size]) for seq in seqs if seq in self._owed
        ]

    def held_blocks(self) -> list[int]:
        """Blocks that are held to be copied, for the pool's audit."""
        return list(self._owed.values())

    def audit(self, num_unfinished: int) -> list[str]:
        """Check the books against each other and the sequences they name. Returns the faults found, in words."""
        faults = [f"{seq.request_id} owes a copy, but holds no memory" for seq in self._owed if not seq.started]
        num_members = sum(group.num_members for group in self._groups.values())
        if not num_members == len(self._group_of) <= num_unfinished:
            faults.append(f"{len(self._group_of)} siblings in groups of {num_members}, of {num_unfinished} sequences")
        for group in self._groups.values():
            faults += [
                f"{seq.request_id} is offered to its siblings, but its prompt is not computed"
                for seq in group.sources
                if not seq.started or seq.num_computed < seq.num_prompt_tokens - 1
            ]
            faults += [
                f"{seq.request_id} is waited for by its siblings, but holds no memory"
                for seq in group.computing
                if not seq.started
            ]
        return faults

    def _settle(self, seq: Sequence) -> None:
        block = self._owed.pop(seq, None)
        if block is not None:
            self._pool.release([block])


class Forks:
    """One scheduling pass's forks: what each sequence would take over, given who starts and who is paused in the pass.

    A fork that was admitted stands even if its source is paused later in the pass: it holds the blocks by then.
    """

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings
        self._forks: dict[Sequence, Fork] = {}
        self._admitted: set[Sequence] = set()
        self._paused: set[Sequence] = set()
        self._groups_in_work: set[object] = set()

    def of(self, seq: Sequence) -> Fork | None:
        """Fork that a start of ``seq`` in this pass would be; None if it is none."""
        fork = self._forks.get(seq)
        if fork is None:
            for source in self._siblings.sources(seq):
                if source not in self._paused:
                    fork = self._forks[seq] = self._siblings.fork(seq, source)
                    break
        return fork

    def should_wait(self, seq: Sequence) -> bool:
        """Whether ``seq``, which never ran, will have somebody to fork from but does not yet."""
        group = self._siblings.group_of(seq)
        if group is None or seq.num_pauses or self.of(seq) is not None:
            return False
        return group in self._groups_in_work or self._siblings.in_work(seq)

    def admit(self, seq: Sequence) -> None:
        """Take note that ``seq`` will start."""
        self._admitted.add(seq)
        group = self._siblings.group_of(seq)
        if group is not None:
            self._groups_in_work.add(group)

    def pause(self, seq: Sequence) -> list[Sequence]:
        """Take note that ``seq`` will be paused. Returns those whose forks that undoes."""
        self._paused.add(seq)
        undone = [one for one, fork in self._forks.items() if fork.source is seq and one not in self._admitted]
        for one in undone:
            del self._forks[one]
        return undone
