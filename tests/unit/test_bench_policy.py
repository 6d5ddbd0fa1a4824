"""``trtcb bench policy`` from arguments to tables, JSON and HTML; and the articles' examples, number by number."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.dom import minidom

import numpy as np
import pytest

from trtcb.bench.ab import Comparison, Estimate, Interrupted, compare
from trtcb.bench.metrics import Slo
from trtcb.bench.report import html_report
from trtcb.bench.svg import Line, line_chart, look
from trtcb.bench.table import per_request, rows, shown, text_table, to_json
from trtcb.bench.targets import Setup, SimTarget
from trtcb.bench.workload import RandomWorkload, TraceWorkload
from trtcb.errors import UsageError
from trtcb.executor.step_time import StepTime

TRACES = Path(__file__).resolve().parents[2] / "examples" / "traces"
POLICIES = ["static_batch", "guaranteed_no_evict", "max_utilization"]


def run(policies: list[str], source, *, step_s: float | None = None, repeats: int = 1, **common) -> Comparison:
    target = SimTarget.load("builtin")
    if step_s is not None:
        target = SimTarget("sim", StepTime(step_s), target.engine)
    setups = [Setup.parse(text, {**target.engine, **common}, 10**6) for text in policies]
    slo = Slo.parse(["ttft:1000"])
    return compare(setups, target, source, slo=slo, seed=7, repeats=repeats, on_run=lambda *_: None)


def test_article_static_batch_of_eight() -> None:
    """765 tokens in 5 s are 153 tokens/s, and 52.2 % of the slot-steps are wasted."""
    source = TraceWorkload(TRACES / "eight-lengths.jsonl")
    (static,) = run(["static_batch"], source, step_s=0.025, max_batch_size=8).results
    values = static.runs[0].values
    assert values["duration_s"] == pytest.approx(5.0)
    assert values["output_tok_s"] == pytest.approx(153)
    assert values["slot_use"] == pytest.approx(765 / 1600)
    assert round(100 * (1 - values["slot_use"]), 1) == 52.2
    still_running = static.runs[0].requests.e2e_s > 100 * 0.025 + 1e-9
    assert still_running.sum() == 3  # after iteration 100


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_article_in_flight_with_the_same_lengths_repeating(policy: str) -> None:
    """Each freed slot is taken in the next step: request 9 starts at 500 ms, the last of the eight at 3 s."""
    source = TraceWorkload(TRACES / "eight-lengths-twice.jsonl")
    static, in_flight = run(["static_batch", policy], source, step_s=0.025, max_batch_size=8).results
    starts = in_flight.runs[0].requests.queue_s[8:]
    assert starts.tolist() == pytest.approx([0.5, 1.0, 1.125, 1.5, 2.0, 2.125, 2.25, 3.0])
    assert static.runs[0].requests.queue_s[8:].tolist() == pytest.approx([5.0] * 8)
    assert in_flight.runs[0].values["duration_s"] == pytest.approx(8.0)
    assert static.runs[0].values["duration_s"] == pytest.approx(10.0)


def test_article_four_requests() -> None:
    """In flight they end at 100, 500, 1,000 and 2,000 ms; the median is 750. A static batch is held for 2,000 ms."""
    source = TraceWorkload(TRACES / "four-lengths.jsonl")
    static, in_flight = run(["static_batch", "guaranteed_no_evict"], source, step_s=0.01, max_batch_size=4).results
    assert in_flight.runs[0].requests.e2e_s.tolist() == pytest.approx([0.1, 0.5, 1.0, 2.0])
    assert in_flight.runs[0].values["e2e_p50_s"] == pytest.approx(0.75)
    assert static.runs[0].values["duration_s"] == pytest.approx(2.0)


@pytest.mark.parametrize(("cv", "batch"), [(0.0, 8), (0.5, 8), (0.5, 32)])
def test_the_gain_of_in_flight_is_the_longest_of_a_batch_over_the_mean(cv: float, batch: int) -> None:
    source = RandomWorkload(num_prompts=20 * batch, random_input_len=8, random_output_len=50, output_len_cv=cv)
    static, in_flight = run(POLICIES[:2], source, step_s=0.025, max_batch_size=batch, num_blocks=20_000).results
    lengths = source.generate(7).output_len
    longest = lengths.reshape(20, batch).max(axis=1)
    assert static.runs[0].values["steps"] == longest.sum()
    assert static.runs[0].values["slot_use"] == pytest.approx(lengths.mean() / longest.mean())
    # In flight, all slots are busy until the queue is empty; then the last answers end.
    assert lengths.sum() / batch <= in_flight.runs[0].values["steps"] <= lengths.sum() / batch + lengths.max()


def test_article_memory_set_aside() -> None:
    """2,048 tokens for every request waste 83 % on a log-normal mix; blocks of 16 tokens 2 %."""
    lengths = RandomWorkload(num_prompts=20_000, random_output_len=350, output_len_cv=1, max_tokens=2048).generate(0)
    total = lengths.output_len.sum()
    assert 1 - total / (2048 * len(lengths)) == pytest.approx(0.83, abs=0.01)
    assert 1 - total / (16 * np.ceil(lengths.output_len / 16)).sum() == pytest.approx(0.02, abs=0.005)


def test_declared_lengths_decide_between_the_policies() -> None:
    """Far too long declarations cost NO_EVICT throughput; with exact ones it does as well as MAX_UTILIZATION."""
    load = {"num_prompts": 300, "request_rate": 14, "random_input_len": 100, "random_output_len": 100}
    overstated = run(POLICIES, RandomWorkload(**load, output_len_cv=1.0, max_tokens=512))
    static, no_evict, max_utilization = (result.runs[0].values for result in overstated.results)
    assert static["output_tok_s"] < no_evict["output_tok_s"] < max_utilization["output_tok_s"]
    assert static["ttft_p50_s"] > no_evict["ttft_p50_s"] > max_utilization["ttft_p50_s"]
    assert no_evict["pauses"] == static["pauses"] == 0
    assert no_evict["pool_promised"] <= 1.0 < max_utilization["pool_promised"]
    _, no_evict, max_utilization = (r.runs[0].values for r in run(POLICIES, RandomWorkload(**load)).results)
    assert no_evict["output_tok_s"] == pytest.approx(max_utilization["output_tok_s"], rel=0.02)


def test_a_tight_pool_makes_max_utilization_pause_and_recompute() -> None:
    source = RandomWorkload(num_prompts=100, request_rate=50, random_input_len=40, random_output_len=80)
    no_evict, max_utilization = (r.runs[0].values for r in run(POLICIES[1:], source, num_blocks=40).results)
    assert max_utilization["pauses"] > 0
    assert max_utilization["recomputed_tokens"] > 0
    assert no_evict["pauses"] == no_evict["recomputed_tokens"] == 0
    assert no_evict["completed"] == max_utilization["completed"] == 100


def test_answers_beyond_max_seq_len_are_cut_as_an_engine_cuts_them() -> None:
    source = RandomWorkload(num_prompts=40, random_input_len=20, random_output_len=60)
    (result,) = run(["max_utilization"], source, step_s=1.0, max_seq_len=50).results
    assert result.runs[0].values["completed"] == 40
    assert result.runs[0].values["output_tok_s"] * result.runs[0].values["duration_s"] == pytest.approx(40 * 30)


def test_a_closed_loop_bounds_the_requests_in_the_engine() -> None:
    target = SimTarget.load("builtin")
    setup = Setup.parse("max_utilization", target.engine, 40)
    source = RandomWorkload(num_prompts=40, random_output_len=20)
    comparison = compare(
        [setup], target, source, slo=Slo(), seed=0, repeats=1, on_run=lambda *_: None, max_concurrency=3
    )
    (one,) = comparison.results[0].runs
    assert max(sample.num_running + sample.num_waiting for sample in one.samples) == 3
    assert one.values["completed"] == 40
    assert one.values["queue_p99_s"] == 0


@pytest.mark.slow
def test_no_evict_never_pauses_in_ten_thousand_requests() -> None:
    source = RandomWorkload(
        num_prompts=10_000,
        request_rate=200,
        burstiness=0.3,
        random_input_len=60,
        random_range_ratio=0.9,
        random_output_len=40,
        output_len_cv=1.5,
        max_tokens=300,
    )
    for label in ("guaranteed_no_evict", "guaranteed_no_evict:chunk_policy=equal_progress,max_num_tokens=64"):
        (result,) = run([label], source, num_blocks=150).results
        assert result.runs[0].values["pauses"] == 0
        assert result.runs[0].values["completed"] == 10_000


def test_runs_are_repeatable_and_repeats_differ() -> None:
    source = RandomWorkload(num_prompts=60, request_rate=20, output_len_cv=1.0)
    first, again = (run(POLICIES, source, repeats=2) for _ in range(2))
    assert to_json(first) == to_json(again)
    one, two = first.results[0].runs
    assert one.values["output_tok_s"] != two.values["output_tok_s"]
    assert first.results[0].estimate("output_tok_s").margin > 0
    assert first.results[0].speedup(first.results[0]).mean == 1


def test_checking_contents_changes_no_number() -> None:
    source = RandomWorkload(num_prompts=40, request_rate=30, random_prefix_len=40, output_len_cv=0.5)
    blank = SimTarget.load("builtin")
    checked = SimTarget("sim", blank.step_time, blank.engine, check_contents=True)
    for policy in POLICIES:
        setup = Setup.parse(policy, {**blank.engine, "num_blocks": 60}, 40)
        one, other = (target.run(setup.config, source.generate(0), Slo()) for target in (blank, checked))
        assert one.values == other.values
        assert one.values["prefix_hit_tokens"] > 0


def test_a_setup_takes_the_settings_of_serve() -> None:
    setup = Setup.parse(
        "max_utilization:max-num-seqs=3,prefix_caching=false", {"num_blocks": 9, "max_batch_size": 8}, 70
    )
    config = setup.config
    assert (config.scheduler_policy, config.max_batch_size, config.num_blocks) == ("max_utilization", 3, 9)
    assert config.prefix_caching is False
    assert config.max_queue_size == 70
    assert Setup.parse("static_batch:max_queue_size=5", {}, 70).config.max_queue_size == 5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_utilisation", "there is no policy 'max_utilisation'; did you mean 'max_utilization'?"),
        ("best", "there is no policy 'best'; there are guaranteed_no_evict, max_utilization, static_batch."),
        ("static_batch:foo=1", "the engine has no setting 'foo'; there are scheduler_policy, chunk_policy, "),
        ("static_batch:watermark=2", "'static_batch:watermark=2': watermark"),
        ("static_batch:victim_policy=cheapest", "'static_batch:victim_policy=cheapest': static_batch never pauses"),
        ("static_batch:max_num_seqs=3,max_batch_size=4", "max_batch_size is given twice"),
        ("static_batch:num_blok=3", "did you mean 'num_blocks'"),
        ("static_batch:num_blocks", "name=value"),
        ("static_batch:num_blocks=8,num-blocks=9", "num_blocks is given twice"),
        ("static_batch:scheduler_policy=max_utilization", "scheduler_policy is given twice"),
        ("static_batch:num_blocks=many", "num_blocks"),
        ("static_batch:port=80", "the engine has no setting 'port'"),
    ],
)
def test_bad_setups_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        Setup.parse(text, {}, 10)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("static_batch:threads=2", "threads has no effect here, because a simulated machine has no CPU"),
        ("static_batch:kv_memory=2GiB", "kv_memory_bytes has no effect"),
        ("static_batch:default_max_tokens=9", "default_max_tokens has no effect"),
        ("static_batch:queue_policy=wfq", "queue_policy=wfq has no effect here, because all requests have one user"),
        ("static_batch:queue_policy=priority,priority_ageing_s=5", "priority_ageing_s has no effect"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(text: str, complaint: str) -> None:
    drawn = RandomWorkload(num_prompts=3).generate(0)
    with pytest.raises(UsageError, match=re.escape(complaint)):
        Setup.parse(text, {}, 3).check_effect(drawn, is_simulated=True)
    varied = replace(drawn, users=("a", "b", "a"), priority=np.array([0.0, 1.0, 0.5]))
    if "default_max_tokens" not in text:
        Setup.parse(text, {}, 3).check_effect(varied, is_simulated=False)


def test_users_of_a_trace_are_the_tenants_of_wfq(tmp_path: Path) -> None:
    """A burst of one user and a late request of another: fair queueing lets that one in first."""
    burst = [{"prompt_len": 8, "output_len": 20, "user": "burst"} for _ in range(12)]
    late = {"arrival_s": 0.5, "prompt_len": 8, "output_len": 20, "user": "late"}
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join(map(json.dumps, [*burst, late])))
    setups = ["guaranteed_no_evict", "guaranteed_no_evict:queue_policy=wfq"]
    fcfs, fair = run(setups, TraceWorkload(trace), step_s=0.1, max_batch_size=2).results
    assert fcfs.runs[0].requests.queue_s[12] > 11.0
    assert fair.runs[0].requests.queue_s[12] < 2.0
    assert fair.runs[0].values["steps"] == fcfs.runs[0].values["steps"]


def test_a_run_in_which_every_request_is_refused_says_why() -> None:
    source = RandomWorkload(num_prompts=3, random_input_len=50, random_output_len=5)
    with pytest.raises(
        UsageError, match=r"All requests of the workload were refused.*--random-input-len.*the pool has 4"
    ):
        run(["guaranteed_no_evict"], source, num_blocks=4, block_size=10, max_num_tokens=64)


def test_the_same_setup_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="are the same"):
        run(["static_batch", "static_batch"], RandomWorkload(num_prompts=1))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("step_time: [", "not valid YAML"),
        ("engine: {}", "step_time: Field required"),
        ("step_time: {base_s: 0}", "A step takes time"),
        ("step_time: {base_s: -1}", "m.yaml: step_time: A step takes time"),
        ("step_time: {base: 1}", "step_time.base_s"),
        ("[1]", "m.yaml: write 'name: value' lines."),
    ],
)
def test_bad_machines_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(complaint)):
        SimTarget.load(str(file))
    with pytest.raises(UsageError, match=r"none.yaml cannot be read: No such file or directory\."):
        SimTarget.load(str(tmp_path / "none.yaml"))


def test_a_machine_without_a_pool_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("step_time: {base_s: 0.01}")
    target = SimTarget.load(str(file))
    setup = Setup.parse("static_batch", target.engine, 1)
    with pytest.raises(UsageError, match="set num_blocks"):
        target.run(setup.config, RandomWorkload(num_prompts=1).generate(0), Slo())


class _Links(HTMLParser):
    """Collects whatever a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [name for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        self.found += [tag] if tag in ("script", "link", "iframe", "img", "object") else []


def test_the_report_is_well_formed_and_needs_nothing_else() -> None:
    comparison = run(["max_utilization:num_blocks=50", *POLICIES], RandomWorkload(num_prompts=60, request_rate=30))
    html = html_report(comparison, "trtcb bench policy '<&>'")
    document = minidom.parseString(html.removeprefix("<!DOCTYPE html>\n"))
    charts = [one for one in document.getElementsByTagName("svg") if one.getAttribute("role") == "img"]
    assert len(charts) == 2 + 4
    assert len(charts[0].getElementsByTagName("path")) == 4
    links = _Links()
    links.feed(html)
    assert links.found == []
    assert "url(" not in html
    assert "@import" not in html
    assert "prefers-color-scheme:dark" in html
    assert ".mark{fill:var(--back);" in html  # else black, in the dark as well
    assert "&lt;&amp;&gt;" in html
    cells = [[c.firstChild.data if c.firstChild else "" for c in row.childNodes] for row in _rows(document)]
    assert cells == rows(comparison)


def test_each_line_has_the_look_that_its_legend_shows() -> None:
    setups = [f"max_utilization:max_batch_size={size}" for size in range(1, 9)]
    html = html_report(run(setups, RandomWorkload(num_prompts=10, request_rate=30)), "")
    keys = re.findall(r'<svg class="key".*?class="line (c\d d\d)".*?</svg>([^<]+)<', html)[:8]
    drawn = re.findall(r'class="line (c\d d\d)" d="[^"]*"><title>([^<]+)<', html)[:8]
    assert keys == drawn
    assert [label for _, label in keys] == setups
    assert len({classes for classes, _ in keys}) == 8
    for classes, _ in keys:
        for name in classes.split():
            assert f".{name}{{stroke" in html


def test_all_lines_of_a_chart_look_different() -> None:
    assert len({look(number) for number in range(30)}) == 30


def _rows(document: minidom.Document) -> list[minidom.Element]:
    return document.getElementsByTagName("tr")


def test_a_chart_puts_points_where_they_belong() -> None:
    svg = line_chart("t", [Line("a", 0, [(0.0, 0.0), (10.0, 1.0)])], x_title="x", y_title="y", y_max=1.0)
    assert 'd="M56.0 220.0L506.0 12.0"' in svg
    ticks = re.findall(r'y="236" text-anchor="(?:middle|end)">([^<]+)<', svg)
    assert ticks == ["0", "2.5", "5", "7.5", "10"]


def test_a_logarithmic_axis_has_a_tick_a_decade() -> None:
    line = Line("a", 0, [(0.0, 0.0), (0.01, 0.5), (100.0, 1.0)])
    svg = line_chart("t", [line], x_title="x", y_title="y", y_max=1.0, log_x=True)
    assert re.findall(r'y="236" text-anchor="(?:middle|end)">([^<]+)<', svg) == ["0.01", "0.1", "1", "10", "100"]
    assert 'd="M56.0 220.0L56.0 116.0L506.0 12.0"' in svg


@pytest.mark.parametrize("log_x", [False, True])
def test_an_empty_chart_has_axes(log_x: bool) -> None:
    assert "<svg" in line_chart("t", [Line("a", 0, [])], x_title="x", y_title="y", log_x=log_x)


@pytest.mark.parametrize(
    ("mean", "margin", "unit", "text"),
    [
        (0.0276, 0.00044, "ms", "27.6 ± 0.44"),
        (140.5071, 36.014, "ms", "140,507 ± 36,000"),
        (0.719, 0.00959, "%", "71.9 ± 0.96"),
        (8.0, 0.0, "", "8 ± 0"),
        (0.000123, float("nan"), "", "0.00012"),
        (float("nan"), float("nan"), "ms", "-"),
    ],
)
def test_values_are_shown_with_the_digits_that_count(mean: float, margin: float, unit: str, text: str) -> None:
    assert shown(Estimate(mean, margin), unit) == text


def test_the_table_is_markdown() -> None:
    lines = text_table([["", "a"], ["metric", "1.5"]]).splitlines()
    assert lines == ["|        |   a |", "| ------ | --: |", "| metric | 1.5 |"]


def _trtcb(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trtcb", "bench", *arguments], capture_output=True, text=True, check=False
    )


def test_limits_are_shown_only_where_there_are_some() -> None:
    comparison = run(["static_batch"], RandomWorkload(num_prompts=3))
    titles = {"goodput (requests/s)", "requests within SLO (%)"}
    assert titles <= {row[0] for row in rows(comparison)}
    assert not titles & {row[0] for row in rows(replace(comparison, slo=Slo()))}


def test_answers_that_are_cut_are_counted() -> None:
    (result,) = run(["static_batch"], RandomWorkload(num_prompts=5, random_output_len=40, max_tokens=10)).results
    assert (result.runs[0].values["cut_answers"], result.runs[0].values["declared_ratio"]) == (5, 0.25)


def test_a_refused_request_is_listed_as_such() -> None:
    source = RandomWorkload(num_prompts=6, random_input_len=20, random_output_len=5)
    table = per_request(run(["static_batch:max_queue_size=4"], source))
    assert [row[1] for row in table[5:]] == ["refused", "refused"]
    assert "nan" not in str(table)


@pytest.mark.parametrize(("num_runs", "finished"), [(0, None), (1, [1]), (2, [1, 1]), (3, [1, 1]), (4, [2, 2])])
def test_ctrl_c_keeps_what_was_finished(num_runs: int, finished: list[int] | None) -> None:
    target = SimTarget.load("builtin")
    setups = [Setup.parse(text, target.engine, 5) for text in POLICIES[:2]]
    started = []

    def on_run(label: str, repeat: int) -> None:
        if len(started) == num_runs:
            raise KeyboardInterrupt
        started.append(label)

    with pytest.raises(Interrupted) as stop:
        compare(setups, target, RandomWorkload(num_prompts=5), slo=Slo(), seed=0, repeats=3, on_run=on_run)
    kept = stop.value.finished
    assert (None if kept is None else [len(result.runs) for result in kept.results]) == finished


def test_ctrl_c_on_the_command_line_prints_the_table_of_what_was_finished() -> None:
    words = ("policy", "static_batch", "max_utilization", "--num-prompts", "5000", "--random-output-len", "400")
    handler = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a background job ignores it
    command = [sys.executable, "-c", f"{handler}; from trtcb.cli.main import main; main()", "bench", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("running max_utilization"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, err) == (130, "interrupted\n")
    assert "static_batch" in out.splitlines()[3]
    assert "max_utilization" not in out


def test_command_line(tmp_path: Path) -> None:
    result = _trtcb(
        *("policy", "max_utilization", "guaranteed_no_evict:max_batch_size=4", "--num-prompts", "12"),
        *("--request-rate", "20", "--repeats", "2", "--goodput", "ttft:500 e2el:9000", "--requests"),
        *("--rates", "40,5", "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")),
    )
    assert result.returncode == 0, result.stderr
    assert "guaranteed_no_evict:max_batch_size=4" in result.stdout
    assert " ± " in result.stdout
    data = json.loads((tmp_path / "r.json").read_text())
    assert [r["config"]["max_batch_size"] for r in data["results"]] == [64, 4]
    assert data["results"][0]["metrics"]["completed"] == {"mean": 12.0, "ci95": 0.0, "runs": [12.0, 12.0]}
    assert data["slo_s"] == {"ttft": 0.5, "e2el": 9.0}
    assert (tmp_path / "r.html").read_text().count('role="img"') == 2 + 1 + 2
    assert result.stderr.endswith(f"wrote {tmp_path}/r.json\nwrote {tmp_path}/r.html\n")
    assert "12 requests, seed 0, 2 repeats" in result.stdout
    slow, fast = data["frontier"]
    assert "5 a second" in slow["workload"]
    assert (slow["request_rate"], fast["request_rate"]) == (5, 40)
    assert slow["results"][0]["metrics"]["request_rate"]["mean"] < fast["results"][0]["metrics"]["request_rate"]["mean"]
    table = result.stdout.split("requests within SLO (%):\n\n")[1].split("\n\n")[0]
    assert [line.split()[1] for line in table.splitlines()[2:]] == ["5", "40"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("policy", "max_utilization", "--plan", "x.plan", "--sim", "builtin"),
        ("policy", "nothing"),
        ("policy", "max_utilization", "--request-rate", "-1"),
        ("policy", "max_utilization", "--sim", "nowhere.yaml"),
        ("policy", "max_utilization", "--rates", "1,x"),
        ("policy", "max_utilization", "--rates", "1", "--trace", str(TRACES / "four-lengths.jsonl")),
        ("policy", "max_utilization", "--html", "no/such/folder/report.html"),
        ("policy", "max_utilization", "--plan", "no.plan"),
        ("policy", "max_utilization", "--step-time", "0"),
        ("policy", "max_utilization", "--watermark", "0.05"),
        ("policy", "max_utilization", "--rate", "fast"),
        ("policy", "max_utilization", "--rate", "auto", "--rates", "1,2"),
        ("policy", "max_utilization", "--rate", "auto", "--max-concurrency", "3"),
        ("policy", "max_utilization", "--rate", "auto", "--trace", str(TRACES / "four-lengths.jsonl")),
    ],
)
def test_command_line_mistakes_are_one_sentence(arguments: tuple[str, ...]) -> None:
    result = _trtcb(*arguments)
    assert result.returncode == (3 if "no.plan" in arguments else 2)
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_cdf_ends_below_one_if_requests_were_refused() -> None:
    from trtcb.bench.report import _cdf

    points = _cdf(np.array([3.0, 1.0, np.nan, 2.0]))
    assert points == [(1.0, 0.0), (1.0, 0.25), (2.0, 0.5), (3.0, 0.75)]
    assert _cdf(np.array([np.nan])) == []
