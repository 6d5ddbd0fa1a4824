"""Logit edits and log-probabilities of the kernels, from a request's parameters on, against a slow reference."""

import math
import random

import numpy as np
import pytest

from tests.conformance.reference_sampling import Rows
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.sampling_state import SamplingState, logit_edits
from trtcb.executor.sequence import Sequence
from trtcb.plugins.cpu import threads
from trtcb.plugins.cpu.logits import LogitEditor
from trtcb.plugins.cpu.sampling import Sampler

ENDS = (2, 5)


@pytest.fixture(scope="module")
def editor():
    num_threads = threads.configure().num_threads
    return lambda vocab: LogitEditor(vocab, num_threads=num_threads)


def sequence(prompt, output, **params) -> Sequence:
    request = Request("r", tuple(prompt), SamplingParams(**params))
    seq = Sequence(request, max_tokens=1000, seed=0, arrival_s=0.0)
    seq.sampling = SamplingState.of(request.params, end_token_ids=ENDS)
    seq.token_ids.extend(output)
    return seq


def reference(row: np.ndarray, seq: Sequence) -> list[float]:
    """vLLM's definitions, one token at a time, in double precision."""
    params, prompt = seq.request.params, list(seq.request.prompt_token_ids)
    output = list(seq.token_ids[len(prompt) :])
    logits = [float(x) for x in row]
    for token, bias in params.logit_bias:
        logits[token] += bias
    if len(output) < params.min_tokens:
        for end in ENDS:
            logits[end] = -math.inf
    for token in range(len(logits)):
        if token in prompt or token in output:
            x = logits[token]
            logits[token] = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        logits[token] -= params.frequency_penalty * output.count(token)
        logits[token] -= params.presence_penalty * (token in output)
    return logits


def random_sequence(rng: random.Random, vocab: int) -> Sequence:
    tokens = range(min(vocab, 40))  # few, so that they come again
    if rng.random() < 0.2:
        return sequence([1], [])
    return sequence(
        rng.choices(tokens, k=rng.randint(1, 60)),
        rng.choices(tokens, k=rng.randint(0, 60)),
        repetition_penalty=rng.choice([1.0, 0.5, 1.3]),
        presence_penalty=rng.choice([0.0, 1.5, -2.0]),
        frequency_penalty=rng.choice([0.0, 0.7, -0.1]),
        logit_bias=tuple((rng.randrange(vocab), rng.uniform(-100, 100)) for _ in range(rng.choice([0, 3, 200]))),
        min_tokens=rng.choice([0, 10, 100]),
    )


@pytest.mark.parametrize("vocab", [6, 100, 1037])
def test_edits_are_the_definition_and_are_undone_to_the_bit(editor, vocab):
    rng = random.Random(vocab)
    seqs = [random_sequence(rng, vocab) for _ in range(60)]
    logits = (np.random.default_rng(0).normal(size=(60, vocab)) * 5).astype(np.float32)
    before = logits.copy()
    with editor(vocab).edited(logits.ctypes.data, logit_edits(seqs)):
        edited = logits.copy()
    np.testing.assert_array_equal(logits, before)
    assert (edited != before).any(axis=1).sum() > 30
    for row, seq in enumerate(seqs):
        np.testing.assert_allclose(edited[row], reference(before[row], seq), rtol=2e-5, atol=2e-5)


def test_an_edited_row_does_not_depend_on_its_neighbours(editor):
    rng = random.Random(1)
    seqs = [random_sequence(rng, 500) for _ in range(40)]
    logits = (np.random.default_rng(1).normal(size=(40, 500)) * 5).astype(np.float32)
    with editor(500).edited(logits.ctypes.data, logit_edits(seqs)):
        together = logits.copy()
    for row, seq in enumerate(seqs):
        alone = logits[row : row + 1].copy()
        with editor(500).edited(alone.ctypes.data, logit_edits([seq])):
            np.testing.assert_array_equal(alone[0], together[row])


def test_counts_grow_with_the_output(editor):
    """The state of a sequence is kept from step to step; it must not differ from one made afresh."""
    rng = random.Random(2)
    params = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    grown = sequence([1, 2, 3, 2], [], **params)
    for _ in range(100):
        fresh = sequence([1, 2, 3, 2], grown.token_ids[4:], **params)
        for one, two in zip(grown.sampling.seen(grown), fresh.sampling.seen(fresh), strict=True):
            np.testing.assert_array_equal(one, two)
        grown.token_ids.extend(rng.choices(range(20), k=rng.choice([0, 1, 1, 3])))  # 0: its step failed


def test_ends_are_ruled_out_until_min_tokens_are_drawn(editor):
    logits = np.zeros((3, 50), np.float32)
    logits[:, 5] = 9.0
    logits[:, 30] = 5.0
    seqs = [sequence([1], range(10, 10 + n), min_tokens=2) for n in (0, 1, 2)]
    sampler = Sampler(50, num_threads=1)
    with editor(50).edited(logits.ctypes.data, logit_edits(seqs)):
        assert sampler.sample(logits.ctypes.data, Rows.of(3, temperature=0.0)).tolist() == [30, 30, 5]


def test_a_request_that_asks_for_nothing_has_no_state():
    assert sequence([1], []).sampling is None
    assert sequence([1], [], logprobs=5, min_tokens=0).sampling is None
    assert SamplingState.of(SamplingParams(min_tokens=5), end_token_ids=[]) is None
    for asked in (
        {"logit_bias": ((1, 0.0),)},
        {"min_tokens": 1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
    ):
        assert sequence([1], [], **asked).sampling is not None


@pytest.mark.parametrize("vocab", [1, 15, 100, 3001])
def test_logprobs_are_the_log_softmax_and_the_likeliest_come_first(editor, vocab):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(50, vocab)) * 4).astype(np.float32)
    logits[::2] = np.round(logits[::2])  # ties
    logits[3, : vocab // 2] = -np.inf
    tokens = rng.integers(vocab // 2, vocab, 50).astype(np.int32)
    tokens[7] = -1  # a row that failed
    counts = rng.choice([-1, 0, 1, 5, 20], 50).astype(np.int32)
    drawn, top_ids, top = editor(vocab).logprobs(logits.ctypes.data, tokens, counts)
    assert top_ids.shape == top.shape == (50, min(vocab, 20))
    for row in range(50):
        if counts[row] < 0 or tokens[row] < 0:
            assert drawn[row] == 0
            continue
        x = logits[row].astype(np.float64)
        expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
        assert drawn[row] == pytest.approx(expected[tokens[row]], rel=1e-5, abs=1e-6)
        best = np.argsort(-x, kind="stable")[: counts[row]]
        np.testing.assert_array_equal(top_ids[row, : len(best)], best)
        np.testing.assert_allclose(top[row, : len(best)], expected[best], rtol=1e-5, atol=1e-6)


def test_logprobs_do_not_depend_on_neighbours(editor):
    logits = np.random.default_rng(3).normal(size=(30, 2003)).astype(np.float32)
    tokens = np.arange(30, dtype=np.int32)
    drawn, top_ids, top = editor(2003).logprobs(logits.ctypes.data, tokens, np.full(30, 4, np.int32))
    for row in range(30):
        one = slice(row, row + 1)
        alone = editor(2003).logprobs(logits[one].ctypes.data, tokens[one], np.full(1, 4, np.int32))
        for mine, its in zip((drawn, top_ids, top), alone, strict=True):
            np.testing.assert_array_equal(mine[one], its)


def test_no_rows_no_logprobs(editor):
    drawn, top_ids, top = editor(10).logprobs(0, np.zeros(0, np.int32), np.zeros(0, np.int32))
    assert (drawn.shape, top_ids.shape, top.shape) == ((0,), (0, 0), (0, 0))
