"""The arithmetic of a benchmark: percentiles, goodput, pool pressure, and the refusal to report a wrong run."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtcb.bench.ab import Estimate
from trtcb.bench.metrics import MAX_SAMPLES, Collector, Slo, count_percentile
from trtcb.bench.workload import Workload
from trtcb.errors import UsageError, ValidationFailedError
from trtcb.executor.request import FinishReason
from trtcb.executor.stats import FinishedRequest, StepStats

STEP = StepStats(
    policy="max_utilization",
    num_rows=1,
    num_running=1,
    num_waiting=0,
    num_paused=0,
    free_blocks=6,
    cached_blocks=0,
    used_blocks=4,
    reserved_blocks=2,
    prompt_tokens=0,
    generated_tokens=1,
    recomputed_tokens=0,
    num_pauses=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
    step_s=1.0,
    schedule_s=0.0,
    ttft_s=(),
    itl_s=(),
    finished=(),
    step_errors=0,
    audit_failures=0,
)


def workload(count: int, output_len: int = 3, max_tokens: int = 6) -> Workload:
    ones = np.ones(count, np.int64)
    return Workload(np.zeros(count), ones, output_len * ones, max_tokens * ones, np.full(count, 0.5), 0, 0)


def finished(number: int, **changes) -> FinishedRequest:
    request = FinishedRequest(str(number), FinishReason.STOP, 1, 0, 3, 0, 0.5, 1.0, 0.25, 1.5)
    return replace(request, **changes)


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=60), st.sampled_from([0, 1, 50, 95, 99, 100]))
def test_percentiles_of_counts_are_those_of_the_sample(values: list[int], q: int) -> None:
    assert count_percentile(Counter(values), q) == pytest.approx(np.percentile(values, q))


def test_no_gaps_have_no_percentile() -> None:
    assert np.isnan(count_percentile(Counter(), 50))


def test_values_of_a_small_run_by_hand() -> None:
    collector = Collector(workload(4), num_blocks=10, max_batch_size=2)
    collector.refuse("3")
    collector.step(
        replace(STEP, num_rows=2, itl_s=(0.25, 0.25, 0.5), recomputed_tokens=7, num_pauses=1, generated_tokens=6), 1.0
    )
    collector.step(
        replace(
            STEP,
            step_s=3.0,
            used_blocks=8,
            reserved_blocks=0,
            generated_tokens=3,
            finished=(
                finished(0),
                finished(1, ttft_s=2.0, e2e_s=3.0),
                finished(2, tpot_s=None, ttft_s=3.0, e2e_s=3.5),
            ),
        ),
        4.0,
    )
    values = collector.result(4.0, Slo.parse(["ttft:2000 tpot:250", "e2el:3000"])).values
    assert values["output_tok_s"] == 9 / 4
    assert (values["completed"], values["refused"], values["request_rate"]) == (3, 1, 0.75)
    assert (values["ttft_p50_s"], values["e2e_p50_s"], values["itl_p50_s"]) == (2.0, 3.0, 0.25)
    assert values["ttft_p99_s"] == pytest.approx(np.percentile([1.0, 2.0, 3.0], 99))
    assert values["tpot_p99_s"] == 0.25  # of the two that have one
    assert (values["goodput_rate"], values["good_share"]) == (0.5, 0.5)  # a refused request is not good
    assert (values["pauses"], values["recomputed_tokens"]) == (1, 7)
    assert values["pool_used"] == pytest.approx((4 * 1 + 8 * 3) / (10 * 4))
    assert values["pool_promised"] == pytest.approx((6 * 1 + 8 * 3) / (10 * 4))
    assert values["pool_used_peak"] == 0.8
    assert values["declared_ratio"] == 2.0
    assert values["slot_use"] == 3 / 4


def test_a_request_without_a_time_per_token_keeps_its_limit() -> None:
    collector = Collector(workload(1), 10, 1)
    collector.step(replace(STEP, finished=(finished(0, tpot_s=None),)), 1.0)
    assert collector.result(1.0, Slo.parse(["tpot:1"])).values["good_share"] == 1.0


@pytest.mark.parametrize(
    ("stats", "complaint"),
    [
        (replace(STEP, finished=(finished(0), finished(0))), "ended twice"),
        (replace(STEP, finished=(finished(0, num_generated_tokens=2),)), "after 2 tokens, not after 3"),
        (replace(STEP, finished=(finished(0, reason=FinishReason.ERROR),)), "ended with 'error'"),
        (replace(STEP, step_errors=1), "failed a step"),
        (replace(STEP, audit_failures=1), "failed a step"),
    ],
)
def test_a_wrong_run_is_not_reported(stats: StepStats, complaint: str) -> None:
    with pytest.raises(ValidationFailedError, match=complaint):
        Collector(workload(2), 10, 1).step(stats, 1.0)


def test_a_request_that_never_ends_is_noticed() -> None:
    collector = Collector(workload(2), 10, 1)
    collector.step(replace(STEP, finished=(finished(0),)), 1.0)
    with pytest.raises(ValidationFailedError, match="Request 1 never ended"):
        collector.result(1.0, Slo())


def test_the_timeline_stays_small_and_covers_the_run() -> None:
    collector = Collector(workload(1), 10, 1)
    for number in range(10_000):
        collector.step(STEP, float(number))
    collector.refuse("0")
    samples = collector.result(1.0, Slo()).samples
    assert MAX_SAMPLES <= len(samples) < 2 * MAX_SAMPLES
    gaps = np.diff([sample.now_s for sample in samples])
    assert set(gaps.tolist()) == {16.0}
    assert samples[-1].now_s > 9_950


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "ttft:0", "itl:5", "e2el:nan"])
def test_bad_limits_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no limit"):
        Slo.parse([text])


def test_confidence_intervals_are_students() -> None:
    estimate = Estimate.of([1.0, 2.0, 3.0, 4.0])
    assert estimate.mean == 2.5
    assert estimate.margin == pytest.approx(3.182 * np.std([1, 2, 3, 4], ddof=1) / 2)
    assert np.isnan(Estimate.of([1.0]).margin)
    assert Estimate.of([5.0, 5.0]).margin == 0
