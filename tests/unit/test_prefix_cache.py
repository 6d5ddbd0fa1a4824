"""Hash chains of sequences against a pool."""

from trtcb.executor.block_pool import BlockPool
from trtcb.executor.prefix_cache import PrefixCache
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.sequence import Sequence

BLOCK = 4


def sequence(num_tokens: int) -> Sequence:
    request = Request("r", tuple(range(num_tokens)), SamplingParams(max_tokens=8))
    return Sequence(request, max_tokens=8, seed=0, arrival_s=0.0)


def test_a_prompt_of_whole_blocks_whose_last_step_is_in_flight_has_one_key_more():
    """Its first token is counted before it is drawn, so its last block has become one that others could reuse."""
    cache = PrefixCache(BlockPool(8), BLOCK, enabled=True)
    seq = sequence(2 * BLOCK)
    cache.hash_tokens(seq)
    assert (len(seq.keys), cache.key_of(seq, 1)) == (1, None)
    seq.num_computed, seq.generating = 2 * BLOCK, True
    assert cache.match(seq) == []
    assert cache.key_of(seq, 1) is not None


def test_switched_off_it_knows_nothing():
    cache = PrefixCache(BlockPool(8), BLOCK, enabled=False)
    seq = sequence(9)
    cache.hash_tokens(seq)
    assert (cache.match(seq), cache.key_of(seq, 0), seq.keys) == ([], None, [])
