"""The block pool: references, the free list, the cache of released blocks, and the books."""

from array import array

import pytest

from trtcb.executor.block_pool import KEY_BYTES, BlockPool


def keys(pool: BlockPool, count: int, salt: str = "") -> list[bytes]:
    chain = [pool.root_key(salt)]
    for number in range(count):
        chain.append(pool.chain_key(chain[-1], array("i", [number, number])))
    return chain[1:]


def test_blocks_are_handed_out_once_and_come_back():
    pool = BlockPool(4)
    first, second = pool.take(3), pool.take(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pool.num_used, pool.num_free, pool.num_cached) == (4, 0, 0)
    pool.release(first)
    assert (pool.num_used, pool.num_free) == (1, 3)
    assert sorted(pool.take(3)) == sorted(first)
    assert pool.audit([first, second]) == []


def test_taking_more_than_there_is_takes_nothing():
    pool = BlockPool(3)
    held = pool.take(1)
    with pytest.raises(RuntimeError, match="3 blocks were promised, but only 2 are free"):
        pool.take(3)
    assert (pool.num_used, pool.num_free) == (1, 2)
    assert pool.audit([held]) == []


def test_a_block_is_free_only_after_its_last_holder():
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.claim(blocks)
    pool.release(blocks)
    assert (pool.references[blocks[0]], pool.num_used, pool.num_free) == (1, 1, 1)
    pool.release(blocks)
    assert (pool.references[blocks[0]], pool.num_used, pool.num_free) == (0, 0, 2)


def test_releasing_twice_is_an_error_and_not_a_second_owner():
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match=f"block {blocks[0]} was released more often"):
        pool.release(blocks)
    assert sorted(pool.take(2)) == [0, 1]


def test_released_published_blocks_stay_claimable_and_count_as_free():
    pool = BlockPool(3)
    blocks = pool.take(2)
    first, second = keys(pool, 2)
    pool.publish(blocks[0], first)
    pool.release(blocks)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 1, 3)
    assert (pool.lookup(first), pool.lookup(second)) == (blocks[0], None)
    pool.claim([blocks[0]])
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 2)
    assert pool.lookup(first) == blocks[0]
    assert pool.audit([[blocks[0]]]) == []


def test_eviction_takes_plain_free_blocks_first_then_the_oldest_release_from_its_end():
    pool = BlockPool(5)
    old, new = pool.take(2), pool.take(2)
    chain = keys(pool, 4)
    for block, key in zip(old + new, chain, strict=True):
        pool.publish(block, key)
    pool.release(old)
    pool.release(new)
    spare = pool.take(1)
    assert all(pool.lookup(key) is not None for key in chain), "a free block was left"
    evicted = [pool.take(1)[0] for _ in range(4)]
    # The older chain goes first, and each chain from its tail: a prefix outlives its continuations.
    assert evicted == [old[1], old[0], new[1], new[0]]
    assert [pool.lookup(key) for key in chain] == [None] * 4
    assert pool.audit([spare, evicted]) == []


def test_claiming_again_makes_a_block_young():
    pool = BlockPool(2)
    a, b = pool.take(2)
    for block, key in zip((a, b), keys(pool, 2), strict=True):
        pool.publish(block, key)
    pool.release([a])
    pool.release([b])
    pool.claim([a])
    pool.release([a])
    assert pool.take(1) == [b]


def test_a_twin_is_not_published_and_is_plain_free_afterwards():
    pool = BlockPool(2)
    original, twin = pool.take(2)
    (key,) = keys(pool, 1)
    pool.publish(original, key)
    pool.publish(twin, key)
    assert pool.lookup(key) == original
    pool.release([twin])
    assert pool.num_cached == 0
    pool.release([original])
    assert pool.num_cached == 1


def test_a_block_keeps_the_key_under_which_it_was_published():
    pool = BlockPool(1)
    held = pool.take(1)
    first, second = keys(pool, 2)
    pool.publish(held[0], first)
    pool.publish(held[0], second)
    assert (pool.lookup(first), pool.lookup(second)) == (held[0], None)
    assert pool.audit([held]) == []


def test_forgotten_blocks_are_not_found_whether_used_or_cached():
    pool = BlockPool(3)
    used, cached, plain = pool.take(3)
    used_key, cached_key = keys(pool, 2)
    pool.publish(used, used_key)
    pool.publish(cached, cached_key)
    pool.release([cached])
    pool.forget([used, cached, plain])
    assert pool.lookup(used_key) is None
    assert pool.lookup(cached_key) is None
    assert (pool.num_used, pool.num_cached, pool.num_free) == (2, 0, 1)
    assert pool.audit([[used], [plain]]) == []


def test_keys_name_the_whole_prefix_and_its_salt():
    pool = BlockPool(1)
    a, b = array("i", [1, 2]), array("i", [3, 4])
    root = pool.root_key("")
    assert len(root) == KEY_BYTES == 16
    chained = pool.chain_key(pool.chain_key(root, a), b)
    others = [
        pool.chain_key(root, b),
        pool.chain_key(pool.chain_key(root, b), b),
        pool.chain_key(pool.chain_key(root, b), a),
        pool.chain_key(pool.chain_key(pool.root_key("salt"), a), b),
    ]
    assert len({chained, *others}) == 5
    assert chained == pool.chain_key(pool.chain_key(pool.root_key(""), array("i", [1, 2])), array("i", [3, 4]))


def test_keys_cannot_be_predicted_from_outside():
    assert BlockPool(1).root_key("") != BlockPool(1).root_key("")


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda pool: pool.references.__setitem__(0, 2), "block 0 has 2 references, but 1 holders"),
        (lambda pool: pool._free.append(0), "block 0 is listed 1 times among the free, with 1 references"),
        (lambda pool: pool._free.pop(), "block 1 is listed 0 times among the free, with 0 references"),
        (lambda pool: pool._block_of.__setitem__(b"x", 1), "index of published blocks"),
        (lambda pool: setattr(pool, "num_used", 0), "0 used + 0 cached + 1 free != 2"),
        (lambda pool: pool._key_of.__setitem__(0, b"x"), "index of published blocks"),
        (lambda pool: (pool.publish(0, b"x"), pool._key_of.__setitem__(0, b"y")), "index of published blocks"),
        (lambda pool: pool._cached.setdefault(pool._free.pop()), "a cached one is not published"),
        (lambda pool: pool.publish(1, b"x"), "a published block is not cached"),
    ],
)
def test_the_audit_names_what_is_wrong(damage, fault):
    pool = BlockPool(2)
    held = pool.take(1)
    assert held == [0]
    assert pool.audit([held]) == []
    damage(pool)
    assert any(fault in text for text in pool.audit([held]))


def test_consistency_is_a_count():
    pool = BlockPool(2)
    assert pool.is_consistent()
    pool._free.pop()
    assert not pool.is_consistent()
