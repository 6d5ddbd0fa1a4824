"""The sampling kernel against a reference that sorts, and its distribution against the probabilities."""

import numpy as np
import pytest

from tests.conformance.reference_sampling import Rows, philox, probabilities, uniform
from trtcb.plugins.cpu import threads
from trtcb.plugins.cpu.sampling import FAILED_TOKEN, Sampler


@pytest.fixture(scope="module")
def sample():
    num_threads = threads.configure().num_threads
    samplers = {}

    def run(logits, rows):
        logits = np.ascontiguousarray(logits, np.float32)
        vocab = logits.shape[1]
        if vocab not in samplers:
            samplers[vocab] = Sampler(vocab, num_threads=num_threads)
        return samplers[vocab].sample(logits.ctypes.data, rows)

    return run


def random_logits(num_rows, vocab, seed=0, spread=3.0):
    return (np.random.default_rng(seed).normal(size=(num_rows, vocab)) * spread).astype(np.float32)


def test_philox_gives_its_published_numbers():
    # known answers of Random123 for philox4x32-10
    assert philox(0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = philox((1 << 128) - 1, (1 << 64) - 1)
    assert ones == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("vocab", [1, 15, 16, 100, 1037])
def test_greedy_takes_the_first_maximum(sample, vocab):
    logits = np.round(random_logits(50, vocab, spread=1.0))  # many ties
    np.testing.assert_array_equal(sample(logits, Rows.of(50, temperature=0.0)), logits.argmax(axis=1))


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 1},
    {"top_k": 5},
    {"top_k": 400, "temperature": 5.0},
    {"top_k": 5000},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 0.7},
    {"top_p": 0.999999, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 1e-6, "temperature": 2.0},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [100, 3000])
def test_each_draw_is_the_reference_inverse_transform(sample, settings, vocab):
    num_rows = 300
    logits = random_logits(num_rows, vocab, seed=1)
    seeds = np.arange(num_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    positions = np.arange(num_rows) % 41
    tokens = sample(logits, Rows.of(num_rows, seed=seeds, position=positions, **settings))
    for row in range(num_rows):
        p = probabilities(logits[row], **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings})
        u = uniform(int(seeds[row]), int(positions[row]))
        high = np.cumsum(p)
        token = tokens[row]
        # fp32 weights may move an edge of the distribution function by a few units in the last place
        assert p[token] > 0
        assert high[token] - p[token] - 1e-5 <= u <= high[token] + 1e-5


def test_tokens_that_tie_with_the_last_kept_are_kept(sample):
    logits = np.zeros((4000, 64), np.float32)
    logits[:, 10:14] = 5.0
    rows = Rows.of(4000, top_k=2, seed=np.arange(4000))
    assert set(sample(logits, rows).tolist()) == {10, 11, 12, 13}


def test_the_distribution_is_right(sample):
    vocab, draws = 200, 200_000
    logits = random_logits(1, vocab, seed=2, spread=2.0)
    settings = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    rows = Rows.of(draws, seed=12345, position=np.arange(draws), **settings)
    counts = np.bincount(sample(np.repeat(logits, draws, axis=0), rows), minlength=vocab)
    expected = probabilities(logits[0], **settings) * draws
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)  # fixed seed: never flaky


def test_a_token_does_not_depend_on_its_neighbours(sample):
    rng = np.random.default_rng(3)
    num_rows, vocab = 120, 5003
    logits = random_logits(num_rows, vocab, seed=4)
    rows = Rows.of(
        num_rows,
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5], num_rows),
        top_k=rng.choice([0, 1, 20, 3000], num_rows),
        top_p=rng.choice([0.5, 0.9, 1.0], num_rows),
        min_p=rng.choice([0.0, 0.1], num_rows),
        seed=rng.integers(0, 2**63, num_rows),
        position=rng.integers(0, 4096, num_rows),
    )
    together = sample(logits, rows)
    order = rng.permutation(num_rows)
    np.testing.assert_array_equal(sample(logits[order], rows.take(order)), together[order])
    for row in range(0, num_rows, 7):
        one = slice(row, row + 1)
        assert sample(logits[one], rows.take(one))[0] == together[row]


def test_seed_and_position_change_the_draw(sample):
    logits = np.repeat(random_logits(1, 1000, seed=5, spread=0.5), 64, axis=0)
    by_seed = sample(logits, Rows.of(64, seed=np.arange(64)))
    by_position = sample(logits, Rows.of(64, position=np.arange(64)))
    assert len(set(by_seed.tolist())) > 50
    assert len(set(by_position.tolist())) > 50
    np.testing.assert_array_equal(by_seed, sample(logits, Rows.of(64, seed=np.arange(64))))


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 10, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("where", [0, 17, 99])
def test_a_row_without_a_finite_maximum_fails_alone(sample, settings, where):
    logits = random_logits(4, 100, seed=6)
    healthy = sample(logits, Rows.of(4, **settings))
    logits[1, where] = np.nan
    logits[2] = -np.inf
    logits[3, where] = np.inf
    tokens = sample(logits, Rows.of(4, **settings))
    assert tokens[0] == healthy[0]
    assert (tokens[1:] == FAILED_TOKEN).all()


def test_masked_tokens_are_never_drawn(sample):
    logits = np.full((500, 300), -np.inf, np.float32)
    logits[:, [7, 250]] = [1.0, 0.5]
    assert set(sample(logits, Rows.of(500, seed=np.arange(500))).tolist()) == {7, 250}
    assert set(sample(logits, Rows.of(500, seed=np.arange(500), top_p=0.99)).tolist()) == {7, 250}


def test_a_tiny_temperature_is_greedy_in_effect(sample):
    logits = random_logits(20, 500, seed=7)
    rows = Rows.of(20, temperature=1e-40, seed=np.arange(20))
    np.testing.assert_array_equal(sample(logits, rows), logits.argmax(axis=1))


def test_no_rows_no_tokens(sample):
    assert sample(np.zeros((0, 100), np.float32), Rows.of(0)).shape == (0,)
