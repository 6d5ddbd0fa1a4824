"""The search for the highest rate a configuration can be loaded with."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtcb.bench.ab import Comparison, Result, compare
from trtcb.bench.knee import Criterion, Knee, KneeSearch, merged_points
from trtcb.bench.metrics import Requests, RunResult, Slo, _kept_up
from trtcb.bench.table import knee_rows
from trtcb.bench.targets import Setup, SimTarget
from trtcb.bench.workload import RandomWorkload, Workload
from trtcb.cli.bench_policy import _what_was_finished
from trtcb.executor.step_time import StepTime

SETUP = Setup.parse("max_utilization", {}, 1)
DEFAULT = Criterion()
NOTHING = Requests(*(np.zeros(0) for _ in range(4)), num_pauses=np.zeros(0, np.int64))


def outcome(share: float, label: str = "a") -> Comparison:
    values = {"good_share": share, "kept_up": share, "output_tok_s": 100.0, "ttft_p95_s": 0.5}
    result = Result(replace(SETUP, label=label), (RunResult(values, NOTHING, ()),))
    return Comparison("t", "w", Slo(), 0, 1, (result,))


def search(limit: float, width: float = 0.1, label: str = "a", criterion: Criterion = DEFAULT) -> Knee:
    """Search a configuration that keeps up to ``limit`` requests a second."""
    return KneeSearch(lambda rate: outcome(0.95 if rate <= limit else 0.9499, label), criterion, width).run()


@given(st.floats(1e-3, 1e5), st.sampled_from([0.5, 0.1, 0.01]))
def test_the_knee_is_found_within_the_width(limit: float, width: float) -> None:
    knee = search(limit, width)
    assert knee.rate <= limit < knee.broken_at <= knee.rate * (1 + width) * (1 + 1e-12)
    rates = [point.rate for point in knee.points]
    assert rates == sorted(set(rates))
    assert {knee.rate, knee.broken_at, math.inf} <= set(rates)
    assert knee.result is not None
    assert len(rates) < 45


def test_what_always_holds_and_what_never_does() -> None:
    everything = search(math.inf)
    assert (everything.rate, [point.rate for point in everything.points]) == (math.inf, [math.inf])
    nothing = search(0.0)
    assert nothing.rate == 0
    assert nothing.result is None
    assert knee_rows([everything, nothing], Criterion())[1:] == [
        ["a", "all at once", "all at once", "95", "100", "500"],
        ["a", "none", "0.0002441", "-", "-", "-"],
    ]


def test_keeping_up_is_not_asked_of_requests_that_come_at_once() -> None:
    knee = search(3.0, criterion=Criterion.of(has_slo=False, share=0.95))
    assert math.inf not in {point.rate for point in knee.points}
    assert knee.rate <= 3 < knee.broken_at


def test_a_share_that_is_not_known_does_not_hold() -> None:
    assert not Criterion().holds(outcome(math.nan).results[0])


def test_points_of_several_searches_are_merged_by_rate() -> None:
    points = merged_points([search(3.0, label="a"), search(0.7, label="b")])
    tried = {point.rate: [result.setup.label for result in point.comparison.results] for point in points}
    assert list(tried) == sorted(tried)
    assert tried[1.0] == tried[math.inf] == ["a", "b"]
    assert tried[2.0] == ["a"]
    assert tried[0.5] == ["b"]


def _at(arrival_s: list[float], **changes) -> Workload:
    ones = np.ones(len(arrival_s), np.int64)
    return Workload(np.array(arrival_s), ones, ones, ones, np.full(len(arrival_s), 0.5), 0, 0, **changes)


def test_keeping_up_by_hand() -> None:
    arrival_s = [float(number) for number in range(11)]
    steady, slower = np.full(11, 3.0), 0.5 * np.arange(11.0)
    assert _kept_up(_at(arrival_s), steady) == 1.0
    assert _kept_up(_at(arrival_s), slower) == pytest.approx(1 / 1.5)
    half_refused = np.where(np.arange(11) % 2, np.nan, 3.0)
    assert _kept_up(_at(arrival_s), half_refused) == pytest.approx(6 / 11)
    assert math.isnan(_kept_up(_at([0.0] * 11), steady))
    assert math.isnan(_kept_up(_at(arrival_s, max_concurrency=2), steady))
    assert math.isnan(_kept_up(_at(arrival_s), np.full(11, np.nan)))


def test_the_default_criterion_finds_a_machines_capacity() -> None:
    """Eight slots, 25 ms a step and 20 tokens an answer are 16 requests a second; 5 % more are kept up to 95 %."""
    target = replace(SimTarget.load("builtin"), step_time=StepTime(0.025))
    setup = Setup.parse("guaranteed_no_evict:max_batch_size=8", target.engine, 400)
    source = RandomWorkload(num_prompts=400, random_input_len=8, random_output_len=20)

    def measure(rate: float) -> Comparison:
        at_rate = replace(source, request_rate=rate)
        return compare([setup], target, at_rate, slo=Slo(), seed=0, repeats=1, on_run=lambda *_: None)

    knee = KneeSearch(measure, Criterion.of(has_slo=False, share=0.95), 0.02).run()
    middle_s = np.subtract(*np.percentile(replace(source, request_rate=1.0).generate(0).arrival_s, [90, 10]))
    rate_drawn = knee.rate * 0.8 * 400 / middle_s  # 400 random gaps do not have the mean they were drawn from
    assert rate_drawn == pytest.approx(16 / 0.95, rel=0.03)


def test_command_line(tmp_path: Path) -> None:
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    arguments = (
        "policy",
        "max_utilization",
        "static_batch",
        "--rate",
        "auto",
        "--num-prompts",
        "40",
        "--knee-width",
        "1",
    )
    outputs = ("--goodput", "ttft:300", "--json", str(out), "--html", str(page))
    command = [sys.executable, "-m", "trtcb", "bench", *arguments, *outputs, "--max-batch-size", "8"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "static_batch at 1: " in result.stderr
    data = json.loads(out.read_text())
    knees = {knee["label"]: knee["rate"] for knee in data["search"]["knees"]}
    assert knees["max_utilization"] > knees["static_batch"] > 0
    assert f"{max(knees.values()):g} a second" in data["workload"]  # all are compared at the highest
    rates = [point["request_rate"] for point in data["frontier"]]
    assert rates[-1] == "inf"
    assert set(knees.values()) <= set(rates)
    assert "Knees: the highest rates with 95 % requests within SLO" in result.stdout
    assert page.read_text().count("<circle") == sum(len(point["results"]) for point in data["frontier"])
    impossible = subprocess.run([*command, "--step-time", "1"], capture_output=True, text=True, check=False)
    assert impossible.returncode == 1
    assert "No configuration has a knee" in impossible.stderr.splitlines()[-1]


def test_ctrl_c_shows_the_knees_that_were_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), _what_was_finished([Knee("static_batch", 2.0, 2.5, ())], Criterion()):
        raise KeyboardInterrupt
    assert capsys.readouterr().out.splitlines()[2].split()[:6] == ["|", "static_batch", "|", "2", "|", "2.5"]
