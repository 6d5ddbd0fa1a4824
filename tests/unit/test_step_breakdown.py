"""The tables of ``trtcb bench latency``: steps by what they spent their time on, requests by when their tokens came."""

import dataclasses

import numpy as np
import pytest

from trtcb.bench.machine_limits import MachineLimits
from trtcb.bench.offline import AfterWarmUp
from trtcb.bench.step_breakdown import StepBreakdown
from trtcb.bench.step_work import CallWork, work_of_calls
from trtcb.bench.token_times import TokenTimes
from trtcb.executor.request import FinishReason
from trtcb.executor.stats import FinishedRequest, StepStats
from trtcb.executor.step_profile import StepProfile
from trtcb.executor.step_time import StepLoad
from trtcb.plugins.cpu.step import CallTimes
from trtcb.program import Call, Program, Value

MS = 1_000_000
WORKS = [
    CallWork("norm", "", "tokens"),
    CallWork("GEMM", "qkv 4 x 2", "tokens", weight_bytes=8_000_000, flops_per_row=16),
    CallWork("attention", "", "tokens", bytes_per_context_token=1000, flops_per_attended_token=8),
    CallWork("GEMM", "logits 9 x 2", "logits", weight_bytes=1_000_000, flops_per_row=36),
]
LIMITS = MachineLimits(read_bytes_per_s=10e9, flops=1e6)


def stats(**changed):
    zeros = {field.name: 0 for field in dataclasses.fields(StepStats)}
    lists = {"policy": "", "step_s": 0.020, "ttft_s": (), "itl_s": (), "finished": (), "num_rows": 1}
    return StepStats(**{**zeros, **lists, **changed})


def profile(tokens, logits):
    """A step of 10 ms in its calls, which took 1, 4, 2 and 2 ms, on two threads that both worked half of each."""
    wall_ns = np.array([1, 4, 2, 2]) * MS
    calls = CallTimes(began_ns=0, ended_ns=10 * MS, num_threads=2, wall_ns=wall_ns, busy_ns=wall_ns)
    return StepProfile(StepLoad(tokens, 1, 50), logits, 60, calls, draw_ns=3 * MS)


def finished(ttft_s, tpot_s=None):
    return FinishedRequest("", FinishReason.LENGTH, 1, 0, 2, 0, 0.0, ttft_s, tpot_s, 1.0)


def add(breakdown, found, **changed):
    breakdown.profile(found)
    breakdown.step(stats(**changed))


def test_lines_add_up_to_the_step_and_rates_are_of_whole_calls():
    breakdown = StepBreakdown(WORKS)
    add(breakdown, profile(5, 0), prompt_tokens=5)
    for _ in range(2):
        add(breakdown, profile(1, 1))
    prefill, decode = (phase.to_json(LIMITS) for phase in breakdown.phases())
    assert (prefill["num_steps"], prefill["tokens_per_step"], decode["num_steps"]) == (1, 5, 2)
    assert decode["step_ms"] == pytest.approx(20)
    lines = {line["name"]: line for line in decode["lines"]}
    assert [line["name"] for line in decode["lines"]] == [
        *("GEMM", "qkv 4 x 2", "logits 9 x 2", "attention", "norm", "sampling", "Python", "waiting")
    ]
    expected = {"GEMM": 3, "attention": 1, "norm": 0.5, "sampling": 3, "Python": 7, "waiting": 5.5}
    assert {name: lines[name]["ms"] for name in expected} == pytest.approx(expected)
    assert sum(expected.values()) == 20
    assert (lines["qkv 4 x 2"]["part_of"], lines["qkv 4 x 2"]["ms"]) == ("GEMM", pytest.approx(2))
    assert lines["qkv 4 x 2"]["waiting_ms"] == pytest.approx(2)
    assert lines["qkv 4 x 2"]["gb_per_s"] == pytest.approx(8e6 / 0.004 / 1e9)
    assert lines["qkv 4 x 2"]["share_of_read"] == pytest.approx(0.2)
    assert lines["attention"]["share_of_read"] == pytest.approx(50 * 1000 / 0.002 / 10e9)
    assert lines["attention"]["share_of_peak"] == pytest.approx(60 * 8 / 0.002 / 1e6)
    assert lines["norm"]["gb_per_s"] is None
    # the prompt's chunk wanted no logits, so nothing of their weights is needed
    prefill_lines = {line["name"]: line for line in prefill["lines"]}
    assert prefill_lines["logits 9 x 2"]["num_bytes"] == prefill_lines["logits 9 x 2"]["flops"] == 0
    assert prefill_lines["qkv 4 x 2"]["flops"] == 5 * 16


def test_the_table_shows_each_line_once_in_milliseconds_a_step():
    breakdown = StepBreakdown(WORKS)
    add(breakdown, profile(1, 1))
    [decode] = breakdown.phases()
    head, titles, _, *rows = decode.text(LIMITS).splitlines()
    assert head == "decode: 1 step of 1 tokens, on 2 threads"
    assert titles.split("|")[1].strip() == "ms a step"
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert cells[0] == ["GEMM", "3", "15.0 %", "3", "1.50", "15.0 %", "8.7e-06", "0.9 %"]
    assert rows[1].startswith("|   qkv 4 x 2 ")
    assert cells[-1][:3] == ["step", "20", "100 %"]


def test_an_operator_of_another_version_is_a_group_of_its_own():
    program = Program(
        (Call("embedding", outputs=("x",)), Call("new_op", ("x",), ("x",))), (Value("x", "tokens", 4, "fp32"),)
    )
    works = work_of_calls(program, None, {})
    assert [work.group for work in works] == ["embedding, gather", "new_op"]


def test_failed_and_empty_passes_do_not_count():
    breakdown = StepBreakdown(WORKS)
    breakdown.step(stats(num_rows=0))
    add(breakdown, profile(1, 1), step_errors=1)
    assert breakdown.phases() == []


def test_times_of_tokens_after_the_warm_up():
    times = TokenTimes()
    observe = AfterWarmUp(2, times.step)
    observe(stats(finished=(finished(9.0, 9.0),)))
    observe(stats(finished=(finished(9.0, 9.0),)))
    assert times.to_json()["mean_ttft_ms"] is None
    observe(stats(finished=(finished(0.1, 0.01), finished(0.3))))
    found = times.to_json()
    assert (found["mean_ttft_ms"], found["median_ttft_ms"]) == (pytest.approx(200), pytest.approx(200))
    assert (found["mean_tpot_ms"], found["p99_tpot_ms"]) == (pytest.approx(10), pytest.approx(10))
    assert str(times).splitlines()[2].split("|")[2].strip() == "200"
