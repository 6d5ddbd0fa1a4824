"""The statistics of ``trtcb eval`` against numpy on whole arrays, and the limits on them."""

import math

import numpy as np
import pytest

from trtcb.errors import UsageError, ValidationFailedError
from trtcb.evaluation.divergence import Divergence
from trtcb.evaluation.drift import CLEAR_GAP, Drift, Likelihood
from trtcb.evaluation.limits import DriftLimits


def logits(seed: int, rows: int = 37, vocab: int = 101) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)


def log_softmax(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


@pytest.fixture
def targets() -> np.ndarray:
    return np.random.default_rng(9).integers(0, 101, 37)


def drift_of(reference: np.ndarray, plan: np.ndarray, targets: np.ndarray, cuts: tuple[int, ...] = ()) -> Drift:
    drift = Drift.start()
    for begin, end in zip((0, *cuts), (*cuts, len(targets)), strict=True):
        drift.add(reference[begin:end], plan[begin:end], targets[begin:end])
    return drift


@pytest.mark.parametrize("cuts", [(), (1, 20), (16, 17)])
def test_every_figure_is_what_numpy_finds_at_once(targets: np.ndarray, cuts: tuple[int, ...]) -> None:
    reference = logits(0)
    plan = reference + logits(1) * np.float32(0.2)
    drift = drift_of(reference, plan, targets, cuts)

    log_r, log_p = log_softmax(reference), log_softmax(plan)
    rows = np.arange(len(targets))
    assert drift.mean_kl == pytest.approx((np.exp(log_r) * (log_r - log_p)).sum(axis=1).mean(), rel=1e-10)
    assert drift.plan.perplexity == pytest.approx(np.exp(-log_p[rows, targets].mean()), rel=1e-12)
    assert drift.reference.perplexity == pytest.approx(np.exp(-log_r[rows, targets].mean()), rel=1e-12)
    assert drift.perplexity_ratio == pytest.approx(drift.plan.perplexity / drift.reference.perplexity, rel=1e-12)
    agree = reference.argmax(axis=1) == plan.argmax(axis=1)
    ordered = np.sort(reference, axis=1)
    clear = ordered[:, -1] - ordered[:, -2] >= CLEAR_GAP
    assert 0 < clear.sum() < len(clear)
    assert 0 < agree.sum() < len(agree)
    assert drift.top1 == agree.mean()
    assert drift.top1_clear == agree[clear].mean()
    assert drift.near_ties == pytest.approx(1 - clear.mean())
    assert drift.num_tokens == len(targets)


def test_a_model_is_no_distance_from_itself(targets: np.ndarray) -> None:
    drift = drift_of(logits(0), logits(0), targets)
    assert (drift.mean_kl, drift.top1, drift.top1_clear, drift.perplexity_ratio) == (0.0, 1.0, 1.0, 1.0)


def test_logits_are_left_as_they_were_and_may_be_huge(targets: np.ndarray) -> None:
    plan = logits(0) + np.float32(1e4)
    before = plan.copy()
    drift = drift_of(logits(0), plan, targets)
    assert np.array_equal(plan, before)
    assert drift.mean_kl == pytest.approx(0.0, abs=1e-5)  # a shift of all logits changes no probability
    likelihood = Likelihood()
    likelihood.add(plan, targets)
    assert likelihood.nll == drift.plan.nll


def test_without_a_clear_token_nothing_is_claimed_of_them(targets: np.ndarray) -> None:
    tied = np.zeros((len(targets), 101), np.float32)
    drift = drift_of(tied, tied, targets)
    assert drift.top1_clear is None
    assert drift.near_ties == 1.0
    with pytest.raises(ValidationFailedError, match="--min-top1-clear"):
        DriftLimits(min_top1_clear=0.9).check(drift)


def test_perplexity_of_the_impossible_is_infinite() -> None:
    assert Likelihood(1, 1e6).perplexity == math.inf


def test_limits_name_every_one_that_is_passed_over(targets: np.ndarray) -> None:
    drift = drift_of(logits(0), logits(1), targets)
    with pytest.raises(ValidationFailedError) as failure:
        DriftLimits(max_kl=0.01, min_top1=0.9, min_top1_clear=0.9, max_perplexity_ratio=0.5).check(drift)
    assert failure.value.exit_code == 6
    for flag in ("--max-kl 0.01", "--min-top1 0.9", "--min-top1-clear 0.9", "--max-perplexity-ratio 0.5"):
        assert flag in str(failure.value)


def test_a_limit_that_is_met_exactly_is_met(targets: np.ndarray) -> None:
    drift = drift_of(logits(0), logits(1), targets)
    DriftLimits(drift.mean_kl, drift.top1, drift.top1_clear, drift.perplexity_ratio).check(drift)
    DriftLimits().check(drift)


def test_limits_on_what_is_no_number_are_passed_over(targets: np.ndarray) -> None:
    drift = drift_of(logits(0), logits(0), targets)
    drift.kl = math.nan
    with pytest.raises(ValidationFailedError, match="--max-kl"):
        DriftLimits(max_kl=1.0).check(drift)


def test_limits_need_a_reference() -> None:
    DriftLimits().require_reference("none")
    DriftLimits(max_kl=0.1).require_reference(None)
    with pytest.raises(UsageError, match="--against none"):
        DriftLimits(max_kl=0.1).require_reference("none")


def test_quartiles_count_texts_that_never_parted_as_the_longest() -> None:
    divergence = Divergence(64, {"a": 3, "b": None, "c": 0, "d": None})
    assert [divergence.quantile(share) for share in (0.25, 0.5, 0.75)] == [0, 3, None]
    assert divergence.num_never == 2
