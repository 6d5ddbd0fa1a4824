"""The sim model notices what it must notice; otherwise the token law would prove nothing."""

import dataclasses

import numpy as np
import pytest

from trtcb.executor.request import SamplingParams
from trtcb.executor.runtime import UNKNOWN_TOKEN, Batch, SamplingRows
from trtcb.executor.sim_runtime import SimRuntime, expected_tokens

PROMPT = (5, 6, 7, 8, 9)
BLOCKS = (3, 1)


def runtime() -> SimRuntime:
    return SimRuntime(num_blocks=6, block_size=4, vocab_size=1000)


def batch(tokens=PROMPT, start=0, blocks=BLOCKS, *, temperature=0.0, seed=0, position=None, **changes) -> Batch:
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    table = np.array(blocks, np.int32)
    made = Batch(
        input_ids=np.array(tokens, np.int32),
        positions=positions,
        slot_mapping=table[positions // 4] * 4 + positions % 4,
        cu_q=np.array([0, len(tokens)], np.int32),
        block_tables=table[None, :],
        slots=np.zeros(1, np.intp),
        logit_index=np.array([len(tokens) - 1], np.int32),
        sampling=SamplingRows(
            temperature=np.array([temperature], np.float32),
            top_k=np.zeros(1, np.int32),
            top_p=np.ones(1, np.float32),
            min_p=np.zeros(1, np.float32),
            seed=np.array([seed], np.uint64),
            position=np.array([start + len(tokens) if position is None else position], np.int32),
        ),
    )
    return dataclasses.replace(made, **changes)


def draw(sim: SimRuntime, made: Batch) -> int:
    sim.launch(made)
    (token,) = sim.wait().tokens.tolist()
    return token


def test_it_draws_the_token_that_its_definition_says_in_one_step_or_in_chunks():
    whole, chunked = runtime(), runtime()
    first, second = expected_tokens(PROMPT, SamplingParams(temperature=0.0), 2, vocab_size=1000)
    assert draw(whole, batch()) == first
    draw(chunked, batch(PROMPT[:3]))
    assert draw(chunked, batch(PROMPT[3:], start=3)) == first
    assert draw(whole, batch((first,), start=5)) == second


def test_it_depends_on_every_token_and_its_place():
    others = [(4, *PROMPT[1:]), (*PROMPT[:4], 4), (6, 5, *PROMPT[2:])]
    assert len({draw(runtime(), batch(tokens)) for tokens in [PROMPT, *others]}) == 4


def test_sampling_settings_matter_only_when_sampling():
    assert draw(runtime(), batch(seed=1)) == draw(runtime(), batch(seed=2))
    assert draw(runtime(), batch(temperature=1.0, seed=1)) != draw(runtime(), batch(temperature=1.0, seed=2))
    assert draw(runtime(), batch(temperature=1.0, seed=1)) != draw(runtime(), batch(temperature=0.5, seed=1))
    params = SamplingParams(temperature=1.0, seed=2)
    assert [draw(runtime(), batch(temperature=1.0, seed=2))] == expected_tokens(PROMPT, params, 1, vocab_size=1000)


def test_it_raises_on_a_hole():
    with pytest.raises(RuntimeError, match="reads positions that its block table does not hold"):
        draw(runtime(), batch(PROMPT[3:], start=3))


def test_it_raises_on_a_wrong_block():
    sim = runtime()
    draw(sim, batch())
    with pytest.raises(RuntimeError, match="does not hold"):
        draw(sim, batch((9,), start=5, blocks=(1, 3)))


def test_another_requests_block_changes_the_token():
    sim = runtime()
    draw(sim, batch())
    draw(sim, batch((9, 9, 9, 9, 9), blocks=(4, 5)))
    good = draw(sim, batch((2,), start=5))
    assert draw(sim, batch((2,), start=5, blocks=(4, 1))) != good


def test_it_raises_on_a_wrong_sampling_position():
    with pytest.raises(RuntimeError, match="draws position 4 after 5 tokens"):
        draw(runtime(), batch(position=4))


def test_steps_are_launched_and_waited_for_in_turn():
    sim = runtime()
    with pytest.raises(RuntimeError, match="launch one first"):
        sim.wait()
    sim.launch(batch())
    sim.launch(batch((UNKNOWN_TOKEN,), start=5))
    drawn = [sim.wait().tokens.tolist() for _ in range(2)]
    assert drawn == [[t] for t in expected_tokens(PROMPT, SamplingParams(temperature=0.0), 2, vocab_size=1000)]
