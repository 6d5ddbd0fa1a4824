"""The token law on the real model under load: ``trtcb bench policy`` serves requests together and alone."""

import pytest

from trtcb.bench.ab import compare
from trtcb.bench.metrics import Slo
from trtcb.bench.targets import PlanTarget, Setup
from trtcb.bench.workload import RandomWorkload

pytestmark = [pytest.mark.model, pytest.mark.slow]  # test_token_law.py holds the engine itself to the law

POLICIES = ["static_batch", "guaranteed_no_evict", "max_utilization"]


def test_three_policies_in_a_small_pool_stream_every_request_its_solo_tokens(smollm2_plan) -> None:
    path = smollm2_plan("fp32", "fp8")
    source = RandomWorkload(
        num_prompts=5, random_input_len=24, random_output_len=20, random_range_ratio=0.3, max_tokens=40
    )
    # One thread: faster than two that wait for each other beside other busy processes, and the tokens are the same.
    settings = {"num_blocks": 5, "max_batch_size": 8, "threads": 1}
    setups = [Setup.parse(text, settings, 5) for text in POLICIES]
    comparison = compare(
        setups,
        PlanTarget("plan", path, {}),
        source,
        slo=Slo(),
        seed=0,
        repeats=1,
        on_run=lambda *_: None,
        num_checked=5,
    )
    static, no_evict, max_utilization = (result.runs[0].values for result in comparison.results)
    assert static["completed"] == no_evict["completed"] == max_utilization["completed"] == 5
    assert static["pauses"] == no_evict["pauses"] == 0
    assert max_utilization["pauses"] > 0
    assert comparison.check is not None
    assert comparison.check.num_requests == 5
    assert comparison.check.num_paused > 0
    assert comparison.check.num_tokens == source.generate(0).output_len.sum()
