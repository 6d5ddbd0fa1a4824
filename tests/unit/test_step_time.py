"""The simulated machine: what a batch weighs, what it costs, and that fitting finds what was put in."""

import random

import numpy as np
import pytest

from trtcb.errors import UsageError
from trtcb.executor.runtime import Batch, SamplingRows
from trtcb.executor.step_time import StepLoad, StepTime, fit_step_time


def batch(lengths: list[tuple[int, int]]) -> Batch:
    """A batch of sequences given as (tokens already computed, tokens of this step)."""
    positions = np.concatenate([np.arange(done, done + new) for done, new in lengths]).astype(np.int32)
    count = len(lengths)
    zeros = np.zeros(count, np.int32)
    sampling = SamplingRows(
        np.zeros(count, np.float32),
        zeros,
        np.ones(count, np.float32),
        np.zeros(count, np.float32),
        np.zeros(count, np.uint64),
        zeros,
    )
    cu_q = np.cumsum([0, *(new for _, new in lengths)]).astype(np.int32)
    return Batch(
        np.zeros_like(positions),
        positions,
        positions,
        cu_q,
        np.zeros((count, 1), np.int32),
        np.arange(count),
        cu_q[1:] - np.int32(1),
        sampling,
    )


def test_load_counts_tokens_sequences_and_the_whole_context() -> None:
    assert StepLoad.of(batch([(9, 1), (0, 5), (4, 2)])) == StepLoad(tokens=8, sequences=3, context_tokens=10 + 5 + 6)


def test_time_is_linear() -> None:
    model = StepTime(1.0, per_token_s=0.1, per_sequence_s=0.01, per_context_token_s=0.001)
    assert model.seconds(StepLoad(8, 3, 21)) == pytest.approx(1 + 0.8 + 0.03 + 0.021)
    assert StepTime(0.025).seconds(StepLoad(8, 3, 21)) == 0.025


@pytest.mark.parametrize("values", [(0.0,), (-1.0,), (1.0, -0.1), (float("nan"),), (float("inf"),), (1e308,)])
def test_impossible_models_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="A step takes time"):
        StepTime(*values)


def _loads(count: int) -> list[StepLoad]:
    rng = random.Random(1)
    return [StepLoad(rng.randint(1, 500), rng.randint(1, 64), rng.randint(1, 20000)) for _ in range(count)]


def test_fit_finds_the_model_again() -> None:
    model = StepTime(0.008, 1e-4, 5e-5, 2e-7)
    fit = fit_step_time(_loads(50), [model.seconds(load) for load in _loads(50)])
    assert fit.model == model
    assert fit.p95_error < 1e-6


def test_fit_never_uses_a_negative_coefficient() -> None:
    # More context makes these steps faster, which no machine means: the best allowed answer leaves it out.
    loads = _loads(50)
    seconds = [0.1 + 1e-4 * load.tokens - 2e-6 * load.context_tokens for load in loads]
    fit = fit_step_time(loads, seconds)
    assert fit.model.per_context_token_s == 0
    assert fit.model.per_token_s > 0
    assert fit.median_error > 0


def test_fit_wants_enough_steps() -> None:
    with pytest.raises(UsageError, match="too few"):
        fit_step_time(_loads(7), [1.0] * 7)
