"""Finds prompts' beginnings among the blocks others have computed, and publishes what was computed here."""

from trtcb.executor.block_pool import BlockPool
from trtcb.executor.sequence import Sequence


class PrefixCache:
    """The hash chains of sequences, matched against the pool. Switched off, it matches and publishes nothing."""

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self.enabled = enabled

    def hash_tokens(self, seq: Sequence) -> None:
        """Compute the chain of the full blocks ahead, so that no scheduling pass pays for it."""
        if self.enabled:
            self._extend_chain(seq, self._num_reusable(seq))

    def match(self, seq: Sequence) -> list[int]:
        """Find cached blocks that hold the beginning of ``seq``, but not its last token: its logits are wanted.

        Tokens may have been drawn since it was hashed, the first ones while its prompt's last step is still in flight.
        """
        blocks: list[int] = []
        if not self.enabled:
            return blocks
        num_reusable = self._num_reusable(seq)
        self._extend_chain(seq, num_reusable)
        for key in seq.keys[:num_reusable]:
            block = self._pool.lookup(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def key_of(self, seq: Sequence, index: int) -> bytes | None:
        """Key of one full block of the prompt; None if the prompt has no such block that others could reuse."""
        if not self.enabled or index >= self._num_reusable(seq):
            return None
        return seq.keys[index]

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Publish the blocks of ``seq`` that ``num_computed`` tokens fill and that were not published yet."""
        if not self.enabled:
            return
        num_full = num_computed // self._block_size
        self._extend_chain(seq, num_full)
        for index in range(seq.num_published, num_full):
            self._pool.publish(seq.blocks[index], seq.keys[index])
        seq.num_published = num_full

    def _num_reusable(self, seq: Sequence) -> int:
        return (seq.num_tokens - 1) // self._block_size

    def _extend_chain(self, seq: Sequence, num_blocks: int) -> None:
        keys, size = seq.keys, self._block_size
        while len(keys) < num_blocks:
            parent = keys[-1] if keys else self._pool.root_key(seq.request.cache_salt)
            start = len(keys) * size
            keys.append(self._pool.chain_key(parent, seq.token_ids[start : start + size]))
