"""The fixed set of KV blocks: who holds which, which are free, and which still hold a prefix worth finding again."""

import hashlib
import secrets
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

KEY_BYTES = 16


class BlockPool:
    """Reference-counted blocks ``0 .. num_blocks - 1``. Every operation is O(1) per block.

    A block is *used* (references > 0), *cached* (unreferenced, but published under a key: it can be claimed again
    until it is evicted, least recently released first) or *free*. Cached blocks count as free memory: ``num_free`` is
    both. Not thread-safe; belongs to the scheduler.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.num_used = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the warmest
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest release first
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # Nobody outside can construct a colliding prefix. Copied for each key: that costs half of making it anew.
        self._keyed_hash = hashlib.blake2b(digest_size=KEY_BYTES, key=secrets.token_bytes(32))

    @property
    def num_free(self) -> int:
        """Blocks that :meth:`take` can hand out, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that a later prompt may still claim."""
        return len(self._cached)

    def root_key(self, salt: str) -> bytes:
        """Key that the first block's chain starts from. Prompts with different salts share nothing."""
        return self._digest(salt.encode("utf-8", "surrogatepass"))

    def chain_key(self, parent: bytes, token_ids: "array[int]") -> bytes:
        """Key of one full block: it names these tokens *and* everything before them."""
        return self._digest(parent + token_ids.tobytes())

    def lookup(self, key: bytes) -> int | None:
        """Block that holds this key's tokens, or None. Claim it before the next :meth:`take`, which may evict it."""
        return self._block_of.get(key)

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one reference each, evicting cached ones if need be.

        Raises ``RuntimeError``, and hands out nothing, if there are not as many: the scheduler promised too much.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks were promised, but only {self.num_free} are free")
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self.references[block] = 1
            blocks.append(block)
        self.num_used += count
        return blocks

    def claim(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these used or cached blocks."""
        for block in blocks:
            if self.references[block] == 0:
                del self._cached[block]
                self.num_used += 1
            self.references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference of each. ``blocks`` is in order of position: a prefix shall outlive its continuations."""
        for block in reversed(blocks):
            if self.references[block] < 1:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            self.references[block] -= 1
            if self.references[block] == 0:
                self.num_used -= 1
                if self._key_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Let others find a used, full block whose tokens are computed; nothing happens if its twin already is."""
        if self._key_of[block] is None and key not in self._block_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Unpublish these blocks, because what they hold is not to be trusted."""
        for block in blocks:
            key = self._key_of[block]
            if key is not None:
                self._key_of[block] = None
                del self._block_of[key]
                if self.references[block] == 0:
                    del self._cached[block]
                    self._free.append(block)

    def is_consistent(self) -> bool:
        """Whether every block is counted exactly once. Cheap enough for every step."""
        return self.num_used + len(self._cached) + len(self._free) == self.num_blocks

    def audit(self, held: Iterable[list[int]]) -> list[str]:
        """Compare all books with the block lists of everyone who holds some. Returns the faults found, in words."""
        expected = Counter(block for blocks in held for block in blocks)
        faults = [
            f"block {block} has {count} references, but {expected[block]} holders"
            for block, count in enumerate(self.references)
            if count != expected[block]
        ]
        places = Counter(self._free) + Counter(list(self._cached))
        faults += [
            f"block {block} is listed {places[block]} times among the free, with {count} references"
            for block, count in enumerate(self.references)
            if places[block] != (count == 0)
        ]
        published = {block: key for block, key in enumerate(self._key_of) if key is not None}
        if published != {block: key for key, block in self._block_of.items()}:
            faults.append("the index of published blocks does not match the blocks' own keys")
        if any(block not in published for block in self._cached) or any(block in published for block in self._free):
            faults.append("a published block is not cached, or a cached one is not published")
        if not self.is_consistent():
            faults.append(
                f"{self.num_used} used + {self.num_cached} cached + {len(self._free)} free != {self.num_blocks}"
            )
        return faults

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
        self._key_of[block] = None
        return block

    def _digest(self, data: bytes) -> bytes:
        keyed_hash = self._keyed_hash.copy()
        keyed_hash.update(data)
        return keyed_hash.digest()
