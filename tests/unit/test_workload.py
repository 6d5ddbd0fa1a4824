"""Workloads: the same for the same seed, with the statistics asked for, and traces read strictly."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trtcb.bench.workload import RandomWorkload, TraceWorkload
from trtcb.errors import UsageError


def test_a_seed_decides_everything() -> None:
    source = RandomWorkload(num_prompts=50, request_rate=5, random_range_ratio=0.5, output_len_cv=1.0, max_tokens=200)
    first, again, other = (source.generate(seed) for seed in (3, 3, 4))
    assert list(first.requests(1000)) == list(again.requests(1000)) == list(first.requests(1000))
    assert list(first.requests(1000)) != list(other.requests(1000))
    for name in ("arrival_s", "prompt_len", "output_len", "max_tokens"):
        assert np.array_equal(getattr(first, name), getattr(again, name)), name


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    gaps = np.diff(RandomWorkload(num_prompts=40000, request_rate=8, burstiness=burstiness).generate(0).arrival_s)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert not RandomWorkload(num_prompts=5).generate(0).arrival_s.any()


def test_lengths_have_the_mean_and_the_spread() -> None:
    workload = RandomWorkload(
        num_prompts=40000, random_input_len=100, random_range_ratio=0.2, random_output_len=300, output_len_cv=0.5
    ).generate(1)
    assert (workload.prompt_len.min(), workload.prompt_len.max()) == (80, 120)
    assert workload.output_len.mean() == pytest.approx(300, rel=0.02)
    assert workload.output_len.std() / workload.output_len.mean() == pytest.approx(0.5, rel=0.04)
    assert workload.declared_ratio == 1.0


def test_declared_lengths_cut_answers_and_set_the_ratio() -> None:
    source = RandomWorkload(num_prompts=500, random_output_len=100, output_len_cv=1, max_tokens=150)
    workload, uncut = source.generate(0), replace(source, max_tokens=None).generate(0)
    assert workload.answer_len.tolist() == np.minimum(uncut.output_len, 150).tolist()
    assert (workload.ends == workload.prompt_len + workload.answer_len - 1).all()
    assert workload.num_cut == (uncut.output_len > 150).sum() > 0 == uncut.num_cut
    assert set(workload.max_tokens.tolist()) == {150}
    assert workload.declared_ratio == 500 * 150 / uncut.output_len.sum()
    assert RandomWorkload(num_prompts=3, max_tokens=64).generate(0).declared_ratio == 0.5
    assert "clients declare 150, where longer ones are cut" in str(source)


def test_a_limit_of_the_engine_cuts_answers_too() -> None:
    workload = RandomWorkload(num_prompts=4, random_input_len=20, random_output_len=60).generate(0).within(50)
    assert workload.answer_len.tolist() == [30] * 4
    assert (workload.num_cut, workload.declared_ratio) == (4, 0.5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "all at once; prompts of 128 tokens; answers of 128 tokens; clients declare exactly that"),
        ({"request_rate": 2.5, "burstiness": 0.3}, "2.5 a second in bursts (0.3); "),
        (
            {"random_prefix_len": 9, "random_range_ratio": 0.25},
            "of 128 ± 25 % tokens after 9 that all share; answers of",
        ),
        ({"output_len_cv": 2.0}, "answers of 128 on average (log-normal, variation 2) tokens"),
    ],
)
def test_a_workload_says_in_words_what_it_is(settings: dict[str, float], text: str) -> None:
    assert text in str(RandomWorkload(**settings))
    assert str(TraceWorkload(Path("t.jsonl"))) == "trace t.jsonl"


def test_requests_share_the_prefix_and_nothing_else() -> None:
    workload = RandomWorkload(num_prompts=4, random_input_len=20, random_prefix_len=30).generate(0)
    prompts = [request.prompt_token_ids for request in workload.requests(30000)]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({prompt[:30] for prompt in prompts}) == 1
    assert len({prompt[30:] for prompt in prompts}) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"num_prompts": 0},
        {"request_rate": 0.0},
        {"burstiness": float("nan")},
        {"random_range_ratio": 1.0},
        {"output_len_cv": -1.0},
        {"max_tokens": 0},
        *({"output_len_cv": value} for value in (float("nan"), float("inf"), 1e200)),
        *({"num_prompts": value} for value in (10**13, 10**25)),
        *({"random_input_len": value} for value in (10**13, 10**25)),
        {"random_prefix_len": 10**25},
        {"max_tokens": 10**25},
    ],
)
def test_impossible_workloads_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="--"):
        RandomWorkload(**settings)


def _trace(path: Path, *lines: dict[str, object] | str) -> TraceWorkload:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return TraceWorkload(path)


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    source = _trace(
        tmp_path / "t.jsonl",
        {"arrival_s": 2.5, "prompt_len": 7, "output_len": 9, "max_tokens": 5, "priority": 0.9, "user": "ada"},
        "",
        {"prompt_len": 3, "output_len": 4},
    )
    workload = source.generate(0)
    assert workload.arrival_s.tolist() == [0.0, 2.5]
    assert workload.answer_len.tolist() == [4, 5]
    assert workload.num_cut == 1
    assert [request.tenant for request in workload.requests(10)] == ["", "ada"]
    assert workload.max_tokens.tolist() == [4, 5]
    assert [request.priority for request in workload.requests(10)] == [0.5, 0.9]
    assert [len(request.prompt_token_ids) for request in workload.requests(10)] == [3, 7]
    assert TraceWorkload(source.path, max_tokens=64).generate(0).max_tokens.tolist() == [64, 5]


def test_a_trace_may_count_from_1970(tmp_path: Path) -> None:
    line = {"arrival_s": 1764489600.5, "prompt_len": 3, "output_len": 4}
    assert _trace(tmp_path / "t.jsonl", line).generate(0).arrival_s.tolist() == [1764489600.5]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2 is not JSON"),
        ({"prompt_len": 3}, "line 2: output_len: Field required"),
        ({"prompt_len": "3", "output_len": 1}, "line 2: prompt_len"),
        ({"prompt_len": 3, "output_len": 1, "arival_s": 1}, "line 2: arival_s"),
        ({"prompt_len": 3, "output_len": 0}, "line 2: output_len"),
        ("[1, 2]", r"line 2 is \[1, 2\]: write a JSON object"),
        ({"prompt_len": 3, "output_len": 1, "user": 7}, "line 2: user"),
        ('{"prompt_len": 3, "output_len": 1, "arrival_s": NaN}', "line 2: arrival_s"),
        ({"prompt_len": 3, "output_len": 1, "arrival_s": 1e308}, "line 2: arrival_s"),
        *(({"prompt_len": value, "output_len": 1}, "line 2: prompt_len") for value in (10**13, 10**30)),
        ({"prompt_len": 3, "output_len": 10**30}, "line 2: output_len"),
        ({"prompt_len": 3, "output_len": 1, "max_tokens": 10**30}, "line 2: max_tokens"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: dict[str, object] | str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        _trace(tmp_path / "t.jsonl", {"prompt_len": 3, "output_len": 4}, line).generate(0)


def test_an_empty_or_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is empty"):
        _trace(tmp_path / "t.jsonl", "").generate(0)
    with pytest.raises(UsageError, match=r"none cannot be read: No such file or directory\. Name a JSONL file\.$"):
        TraceWorkload(tmp_path / "none").generate(0)
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"bytes cannot be read: it is not UTF-8 text\. Name a JSONL file\.$"):
        TraceWorkload(tmp_path / "bytes").generate(0)
