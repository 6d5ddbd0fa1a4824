"""Whole steps of the exported graph in onnxruntime: against transformers, and against themselves in other packings."""

import dataclasses

import numpy as np
import pytest

from tests.golden.array_checkpoint import TINY, random_checkpoint
from tests.golden.ort_runner import export_runner, run_packed
from tests.golden.transformers_llama import llama, logits_of
from trtcb.evaluation.piece import Piece, pack
from trtcb.spec import KVDtype, RopeScaling

BLOCK_SIZE = 16
NUM_BLOCKS = 40
SPEC = dataclasses.replace(
    TINY,
    max_position=256,
    rope_scaling=RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32),
)
# Tokens taken from each of three sequences, step by step: whole prompts beside chunks of another, decode rows beside a
# chunk, then decode alone.
PACKING = [(5, 7, 11), (1, 12, 0), (1, 10, 1), *[(1, 1, 1)] * 9]


@pytest.fixture(scope="module")
def checkpoint():
    return random_checkpoint(SPEC, seed=1)


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(0)
    totals = np.sum(PACKING, axis=0)
    return [rng.integers(0, SPEC.vocab_size, total).tolist() for total in totals]


@pytest.fixture(scope="module")
def tables():
    return np.random.default_rng(3).permutation(NUM_BLOCKS)[:18].reshape(3, 6)


def make_runner(folder, checkpoint, kv_dtype, **options):
    return export_runner(folder, checkpoint, kv_dtype, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **options)


@pytest.mark.parametrize("tied", [False, True])
def test_packed_steps_equal_transformers(tmp_path, tied, sequences, tables):
    spec = dataclasses.replace(SPEC, tie_embeddings=tied)
    checkpoint = random_checkpoint(spec, seed=1)
    model = llama(spec, checkpoint.tensors)
    expected = [logits_of(model, tokens) for tokens in sequences]
    found = run_packed(make_runner(tmp_path, checkpoint, KVDtype.FP32), sequences, tables, PACKING)
    assert len(found) == sum(count > 0 for counts in PACKING for count in counts)
    for (row, position), logits in found.items():
        np.testing.assert_allclose(logits, expected[row][position], atol=5e-5)


@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_functions_and_their_inlining_agree_to_the_bit(tmp_path, checkpoint, sequences, tables, kv_dtype):
    runners = [make_runner(tmp_path, checkpoint, kv_dtype, inlined=inlined) for inlined in (False, True)]
    first, second = (run_packed(runner, sequences, tables, PACKING) for runner in runners)
    for key, logits in first.items():
        np.testing.assert_array_equal(logits, second[key])
    for name, pool in runners[0].pools.items():
        assert pool.any(), name
        np.testing.assert_array_equal(pool.view(np.uint8), runners[1].pools[name].view(np.uint8), err_msg=name)


@pytest.mark.parametrize("inlined", [False, True])
@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_a_deferred_graph_computes_the_same(tmp_path, checkpoint, sequences, tables, kv_dtype, inlined):
    """But for sums in another order, by which a rounded number may fall on the other side."""
    in_place, deferred = (
        make_runner(tmp_path, checkpoint, kv_dtype, deferred=deferred, inlined=inlined) for deferred in (False, True)
    )
    for pool in deferred.pools.values():
        pool.view(np.uint8)[...] = 0x7B  # a large number in every format: what former owners left
    expected, found = (run_packed(runner, sequences, tables, PACKING) for runner in (in_place, deferred))
    for key, logits in expected.items():
        np.testing.assert_allclose(found[key], logits, atol=1e-5 if kv_dtype is KVDtype.FP32 else 2e-2)
    for name, pool in in_place.pools.items():
        if name.startswith("layers.0."):  # of which no input depends on what was cached
            written = pool.reshape(len(pool), -1).any(1)
            np.testing.assert_array_equal(deferred.pools[name][written], pool[written], err_msg=name)


@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_neighbours_and_blocks_do_not_matter(tmp_path, checkpoint, sequences, tables, kv_dtype):
    together = run_packed(make_runner(tmp_path, checkpoint, kv_dtype), sequences, tables, PACKING)
    runner = make_runner(tmp_path, checkpoint, kv_dtype)
    for pool in runner.pools.values():
        pool.view(np.uint8)[...] = 0x7B  # a large number in every format: what former owners left
    for row, tokens in enumerate(sequences):
        alone = run_packed(runner, [tokens], tables[::-1][row : row + 1], [(c[row],) for c in PACKING if c[row]])
        for (_, position), logits in alone.items():
            # One rounded number of a narrow cache may fall on the other side when sums are ordered differently.
            tolerance = 1e-5 if kv_dtype is KVDtype.FP32 else 2e-2
            np.testing.assert_allclose(logits, together[row, position], atol=tolerance)


def test_a_step_may_want_no_logits(tmp_path, checkpoint, sequences, tables):
    runner = make_runner(tmp_path, checkpoint, KVDtype.INT8)
    piece = Piece(sequences[1][:7], 0, tables[1], "none")
    assert runner.step(pack([piece], BLOCK_SIZE)).shape == (0, SPEC.vocab_size)
    written = pack([piece], BLOCK_SIZE).slot_mapping
    for name, pool in runner.pools.items():
        rest = np.delete(pool, written, axis=0)
        assert pool[written].any(), name
        assert not rest.any(), name
