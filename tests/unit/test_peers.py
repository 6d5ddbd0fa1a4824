"""The comparison with other systems: workers behind the protocol, ratios and targets, and what a failure spoils."""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import peer_footprint
import peer_worker
import peers
import pytest
from peer_http import Range, http_lengths, is_within_limits, knee, mixed_workload, print_http
from peer_lines import CONFIGURATIONS, Line, Places, Sizes, lines, mixed_lengths, prompt
from peer_link import Worker, WorkerError
from peer_models import made, write_gguf, write_hf_folder
from peer_server import server
from peer_systems import Ask, Load, Trtcb
from peer_table import Measured, Outcome, accuracy_of, table

from tests.unit.tiny_gguf import write_tiny
from trtcb.builder.gguf_checkpoint import GgufCheckpoint
from trtcb.builder.hf import HfCheckpoint
from trtcb.errors import RequestError
from trtcb.executor.request import Request
from trtcb.executor.served_model import ServedModel

KNOWN = {configuration.name: configuration for configuration in CONFIGURATIONS}
LINE = Line(
    "a line", "single", 2.0, ("trtcb int8", "openvino int8", "llama.cpp q8_0"), "decode", 1, lambda _: [([5], 9)]
)

FAKE = """
import json, sys
print(json.dumps({"facts": {"fake": "1"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["measure"] == "die":
        print("out of memory", file=sys.stderr)
        sys.exit(3)
    if asked["measure"] == "hang":
        import time
        time.sleep(60)
    reply = {"error": "no such model"} if asked["measure"] == "fail" else {"rate": len(asked["asks"])}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Worker]:
    with Worker([sys.executable, "-c", FAKE], tmp_path / "log", timeout_s=20.0) as worker:
        yield worker


class Scripted:
    """A worker with its answers given; an exception is raised."""

    def __init__(self, *answers: float | BaseException) -> None:
        self.answers = list(answers)

    def ask(self, message: dict) -> float:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def test_a_worker_answers_and_survives_its_own_errors(fake: Worker) -> None:
    assert fake.facts == {"fake": "1"}
    with pytest.raises(WorkerError, match="no such model") as caught:
        fake.ask({"measure": "fail"})
    assert not caught.value.is_dead
    assert fake.ask({"measure": "decode", "asks": [1, 2, 3]}) == 3.0


def test_a_worker_stands_still_between_questions(fake: Worker) -> None:
    stat = Path(f"/proc/{fake._process.pid}/stat")
    fake.ask({"measure": "decode", "asks": []})
    for _ in range(1000):  # the signal is on its way
        if stat.read_text().rpartition(")")[2].split()[0] == "T":
            return
    pytest.fail("the process was not stopped")


def test_a_dead_worker_says_how_it_died(fake: Worker) -> None:
    with pytest.raises(WorkerError, match=r"died \(exit code 3\): out of memory") as caught:
        fake.ask({"measure": "die"})
    assert caught.value.is_dead
    with pytest.raises(WorkerError, match="died"):
        fake.ask({"measure": "decode", "asks": []})


def test_a_worker_that_never_answers_is_ended(tmp_path: Path) -> None:
    with Worker([sys.executable, "-c", FAKE], tmp_path / "log", timeout_s=20.0) as worker:
        worker._timeout_s = 0.1
        with pytest.raises(WorkerError, match=r"no answer for 0\.1 s") as caught:
            worker.ask({"measure": "hang"})
    assert caught.value.is_dead
    assert worker._process.returncode == -signal.SIGKILL


def test_a_worker_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """The worker is the real one, with a system that is loaded at once."""
    folder = Path(peers.__file__).parent
    worker = f"""
import sys
sys.path.insert(0, {str(folder)!r})
import peer_systems, peer_worker
peer_systems.SYSTEMS["none"] = lambda *arguments: type("None_", (), {{"facts": {{}}}})
sys.argv = ["", "none", "", "2", "{{}}"]
peer_worker.main()
"""
    parent = f"""
import sys
sys.path.insert(0, {str(folder)!r})
from pathlib import Path
from peer_link import Worker
worker = Worker([sys.executable, "-c", {worker!r}], Path({str(tmp_path / "log")!r}), timeout_s=20.0)
print(worker._process.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        process.kill()
    deadline_s = time.monotonic() + 20
    while _is_running(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="No module named 'no_such_peer'"):
        Worker([sys.executable, "-c", "import no_such_peer"], tmp_path / "log", timeout_s=20.0)


def test_what_cannot_be_executed_is_an_error(tmp_path: Path) -> None:
    """Such as the Python of an environment that was moved."""
    (tmp_path / "python").touch()
    with pytest.raises(WorkerError, match=r"cannot be started: .*Permission denied"):
        Worker([tmp_path / "python"], tmp_path / "log", timeout_s=20.0)
    command: list[str | Path] = [tmp_path / "python"]
    with pytest.raises(RuntimeError, match="cannot be started"), server(command, 1, "/", tmp_path / "log"):
        pass


@pytest.mark.parametrize("first", ["Welcome!", "7", "{}"])
def test_a_first_line_that_is_none_of_ours_is_an_error(tmp_path: Path, first: str) -> None:
    with pytest.raises(WorkerError, match=f"answered b'{first}'") as caught:
        Worker([sys.executable, "-c", f"print({first!r}); input()"], tmp_path / "log", timeout_s=20.0)
    assert caught.value.is_dead


def test_a_worker_that_hangs_as_it_is_taken_down_is_ended(tmp_path: Path) -> None:
    code = "import os, time; os.close(1); time.sleep(600)"
    with pytest.raises(WorkerError, match=r"died \(exit code -9\)"):
        Worker([sys.executable, "-c", code], tmp_path / "log", timeout_s=1.0)


@pytest.mark.parametrize("output", ["", "nowhere/peers.json"])
def test_an_output_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py", "--peers", str(tmp_path), "--output", str(tmp_path / output)])
    with pytest.raises(SystemExit, match="2"):
        peers.main()
    assert "--output: " in capsys.readouterr().err


def test_medians_ratio_and_verdict() -> None:
    workers = {
        "trtcb int8": Scripted(10.0, 30.0, 20.0),
        "openvino int8": Scripted(8.0, 8.0, 80.0),
        "llama.cpp q8_0": Scripted(1.0, 1.0, 1.0),
    }
    (outcome,) = peers.compare(workers, [LINE], 3)
    assert [m.median for m in outcome.measured] == [20.0, 8.0, 1.0]
    assert outcome.ratio == 2.5
    assert outcome.verdict == "met"
    assert outcome.to_json()["systems"][1] == {
        "name": "openvino int8",
        "median": 8.0,
        "rates": [8.0, 8.0, 80.0],
        "error": None,
    }
    ours, best, other = (row.split("|")[2:9] for row in table([outcome], {"trtcb int8": "KL 0.1"}).splitlines()[2:])
    assert [cell.strip() for cell in ours] == ["trtcb int8", "20", "10..30", "2.50", ">= 2", "met", "KL 0.1"]
    assert [cell.strip() for cell in best] == ["openvino int8", "8", "8..80", "1.00", "", "", ""]
    assert other[0].strip() == "llama.cpp q8_0"


def test_a_line_without_ours_shows_its_target() -> None:
    outcome = Outcome(LINE, (Measured(KNOWN["openvino int8"], [1.0]), Measured(KNOWN["llama.cpp q8_0"], [2.0])))
    first, second = (row.split("|") for row in table([outcome], {}).splitlines()[2:])
    assert [cell.strip() for cell in first[6:8]] == [">= 2", "not judged"]
    assert [cell.strip() for cell in second[6:8]] == ["", ""]


def test_a_target_that_is_just_missed() -> None:
    workers = {"trtcb int8": Scripted(*[19.9] * 5), "openvino int8": Scripted(*[10.0] * 5)}
    assert peers.compare(workers, [LINE], 3)[0].verdict == "missed"
    assert peers.compare(workers, [LINE], 2)[0].verdict == "not judged"  # too few rounds


def test_ctrl_c_leaves_what_was_measured() -> None:
    workers = {"trtcb int8": Scripted(20.0, 20.0), "openvino int8": Scripted(5.0, KeyboardInterrupt())}
    first, second = peers.compare(workers, [LINE, LINE], 2)
    assert (first.ratio, second.ratio) == (4.0, None)
    assert "not measured" in table([second], {})


def test_the_best_peer_is_the_one_to_beat_and_ours_is_the_best_of_ours() -> None:
    line = next(line for line in lines(Sizes()) if line.group == "offline")
    rates = {"trtcb int8": 30.0, "trtcb bf16": 40.0, "openvino int8": 10.0, "llama.cpp q4_0": 20.0}
    measured = tuple(Measured(KNOWN[name], [rate]) for name, rate in rates.items())
    assert Outcome(line, measured).ratio == 2.0


def test_a_failure_is_shown_and_spoils_nothing_else() -> None:
    workers = {
        "trtcb int8": Scripted(20.0, 20.0, 20.0, 20.0),
        "openvino int8": Scripted(5.0, WorkerError("bad shape", is_dead=False), 5.0),  # not asked again for the first
        "llama.cpp q8_0": Scripted(WorkerError("died (exit code -11): ", is_dead=True)),
    }
    first, second = peers.compare(workers, [LINE, LINE], 2)
    assert first.measured[0].rates == second.measured[0].rates == [20.0, 20.0]
    assert [m.error for m in first.measured] == [None, None, "died (exit code -11): "]
    assert [m.error for m in second.measured] == [None, "bad shape", "died (exit code -11): "]
    assert first.ratio == 4.0
    assert second.ratio is None
    assert second.verdict == "not judged"
    text = table([second], {})
    assert "failed: a line, openvino int8: bad shape" in text.splitlines()
    assert "not measured" in text


def test_every_configuration_comes_first_in_turn_and_time_ends_between_rounds() -> None:
    order = []

    class Noting(Scripted):
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, message: dict) -> float:
            order.append(self.name)
            return 1.0

    workers = {name: Noting(name) for name in LINE.configurations}
    time_left = iter([True, False])
    peers.compare(workers, [LINE], 5, lambda: next(time_left))
    a, b, c = LINE.configurations
    assert order == [a, b, c, b, c, a]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    places = Places(tmp_path / "peers", tmp_path / "models", tmp_path / "plans")
    assert places.missing(KNOWN["trtcb int4"]) == f"no {tmp_path}/plans/int4.plan"
    assert places.missing(KNOWN["openvino int8"]) == f"no {tmp_path}/peers/openvino/bin/python"
    (tmp_path / "peers/openvino/bin").mkdir(parents=True)
    (tmp_path / "peers/openvino/bin/python").touch()
    assert places.missing(KNOWN["openvino int8"]) == f"no {tmp_path}/models/openvino-int8"
    (tmp_path / "models/openvino-int8").mkdir(parents=True)
    assert places.missing(KNOWN["openvino int8"]) is None


def test_lines_name_configurations_and_groups_that_exist() -> None:
    found = list(lines(Sizes()))
    assert {name for line in found for name in line.configurations} == set(KNOWN)
    assert {line.group for line in found} == set(peers.GROUPS)
    assert len({line.name for line in found}) == len(found)
    assert {(line.name, line.target) for line in found} >= {
        ("8-bit single stream, decode", 2.5),
        ("4-bit single stream, decode", 1.8),
        ("16-bit batch 64, decode", 1.3),
        ("64 mixed requests, batch 32", 1.8),
    }


def test_the_workload_is_seeded_and_its_lengths_are_as_said() -> None:
    assert mixed_lengths(64, 0) == mixed_lengths(64, 0) != mixed_lengths(64, 1)
    many = mixed_lengths(4000, 0)
    assert all(32 <= num_prompt <= 512 and 8 <= num_output <= 256 for num_prompt, num_output in many)
    assert statistics.median(num_prompt for num_prompt, _ in many) == pytest.approx(128, rel=0.05)  # log-uniform
    assert statistics.mean(num_output for _, num_output in many) == pytest.approx(63, abs=3)
    assert prompt("a", 5) == prompt("a", 5) != prompt("b", 5)


def test_only_kept_prompts_come_again() -> None:
    for line in lines(Sizes()):
        first, second = line.asks(0), line.asks(1)
        assert [(len(p), n) for p, n in first] == [(len(p), n) for p, n in second]
        assert (first == second) == line.is_kept
        assert first == line.asks(0)


def test_the_same_requests_over_http() -> None:
    asked, small = (SimpleNamespace(small=small, seed=0) for small in (False, True))
    lengths = http_lengths(asked, 8)
    workload = mixed_workload(lengths, 0, 2.0, prompt_seed=5)
    assert list(zip(workload.prompt_len, workload.max_tokens, strict=True)) == mixed_lengths(8, 0)
    twice = mixed_workload(lengths, 0, 4.0, prompt_seed=6)
    assert np.allclose(workload.arrival_s, 2 * twice.arrival_s)
    assert not mixed_workload(lengths, 0, float("inf"), prompt_seed=0).arrival_s.any()
    assert all(num_prompt <= 64 and num_output <= 16 for num_prompt, num_output in http_lengths(small, 8))


@pytest.mark.parametrize("small", [False, True])
def test_memory_is_counted_of_the_last_start_under_load(tmp_path: Path, monkeypatch, small: bool) -> None:
    events = []

    @contextmanager
    def started(command, port, path, log):
        events.append("start")
        yield SimpleNamespace(url="http://server", pid=os.getpid(), start_s=float(len(events)))

    monkeypatch.setattr(peer_footprint, "server", started)
    monkeypatch.setattr(peer_footprint, "load", lambda url, workload: events.append((url, len(workload.prompt_len))))
    monkeypatch.setattr(peer_footprint, "weight_and_pool_bytes", lambda path, num_blocks: 10**6)
    asked = SimpleNamespace(small=small, seed=0, threads=2)
    found = peer_footprint.measure_plan(Path("any.plan"), asked, tmp_path)
    assert events == [*["start"] * 4, ("http://server", 4 if small else 64)]
    assert found["beyond_mb"] == pytest.approx(found["resident_mb"] - 1, abs=0.11)
    assert [found["starts_s"], found["start_s"], found["is_start_met"]] == [[2.0, 3.0, 4.0], 3.0, True]


@pytest.mark.parametrize("limit", [0.2, 1.0, 3.3, 40.0])
def test_the_knee_is_found(limit: float) -> None:
    tried = []

    def keeps(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = knee(keeps, Range())
    assert found <= limit < found * 1.15
    assert len(tried) < 16


@pytest.mark.parametrize(("limit", "found"), [(0.1, 0.0), (0.6, 0.5), (1.5, 1.0), (9.0, 2.0)])
def test_a_small_run_tries_two_rates(limit: float, found: float) -> None:
    tried = []

    def keeps(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    assert knee(keeps, Range.small()) == found
    assert len(tried) == 2


def test_short_gaps_behind_a_queue_are_not_enough() -> None:
    assert is_within_limits(60.0, 0.9)
    assert not is_within_limits(60.1, 0.9)
    assert not is_within_limits(10.0, 0.2)


def test_no_rate_at_all() -> None:
    assert knee(lambda rate: False, Range()) == 0.0


def test_a_server_that_failed_does_not_spoil_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"trtcb int8": {"highest_rate": 1.5}, "llama.cpp q8_0": {"error": "died:\n" + 90 * "x"}}
    print_http(rates, {"ratio": 0.95, "target": 0.93})
    out = capsys.readouterr().out.splitlines()
    assert all(len(line) < 90 for line in out[:4])
    assert out[3].startswith("| llama.cpp q8_0")
    assert out[3].endswith("failed |")
    assert out[4] == "failed: llama.cpp q8_0: died:"


def test_rates_of_a_load() -> None:
    load = Load((), 2, is_kept=False)
    times = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
    assert peer_worker.decode_rate(0.0, load, times) == 2.0  # from 2 to 6 s: 4 tokens of each
    assert peer_worker.output_rate(1.0, load, times) == 2.0
    with pytest.raises(RuntimeError, match="ask for more tokens"):
        peer_worker.decode_rate(0.0, load, [[1.0, 2.0], [2.0, 3.0]])


def test_kept_prompts_are_served_once_before_the_clock_starts() -> None:
    served = []

    class Counting:
        def generate(self, load: Load) -> list[list[float]]:
            served.append([ask.max_tokens for ask in load.asks])
            return [[float(step) for step in range(ask.max_tokens)] for ask in load.asks]

    message = {"measure": "decode", "asks": [[[5], 6], [[7], 6]], "in_flight": 2, "is_kept": True}
    assert peer_worker.measure(Counting(), message) == 2.0
    assert peer_worker.measure(Counting(), {**message, "is_kept": False}) == 2.0
    assert served == [[1, 1], [6, 6], [6, 6]]


def test_a_refused_request_leaves_none_of_its_load_running(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        """Refuses long prompts, and ends the others some time later."""

        def __init__(self, on_deltas: Callable[[list[SimpleNamespace]], None]) -> None:
            self.on_deltas = on_deltas
            self.running: list[str] = []

        def start(self) -> None:
            pass

        def submit(self, request: Request) -> None:
            if len(request.prompt_token_ids) > 2:
                raise RequestError("too long")
            self.running.append(request.request_id)
            threading.Timer(0.05, self.end).start()

        def end(self) -> None:
            ended = {"token_ids": (7,), "finish_reason": "length", "error": None}
            self.on_deltas([SimpleNamespace(request_id=self.running.pop(0), **ended)])

    monkeypatch.setattr(ServedModel, "from_plan", lambda *_, **__: SimpleNamespace(engine=Engine))
    system = Trtcb("", 1, {})
    short, long = Ask([5], 1), Ask([5] * 3, 1)
    with pytest.raises(RequestError, match="too long"):
        system.generate(Load((short, short, short, long), 3, False))
    assert system._engine.running == []
    assert list(map(len, system.generate(Load((short,) * 5, 2, False)))) == [1] * 5


def test_an_answer_that_is_too_short_is_an_error() -> None:
    class Short:
        def generate(self, load: Load) -> list[list[float]]:
            return [[1.0] * (ask.max_tokens - 1) for ask in load.asks]

    line = json.dumps({"measure": "output", "asks": [[[5], 3]], "in_flight": 1, "is_kept": False})
    assert peer_worker.answer(Short(), line) == {"error": "RuntimeError: a request got 2 tokens, not 3"}


def test_accuracy_is_that_of_the_reports() -> None:
    plan = {"weight_dtype": "int8", "kv_dtype": "fp8"}
    reports = [
        {"plan": plan, "drift": {"mean_kl": 0.01234, "top1": 0.951}},
        {"plan": {**plan, "weight_dtype": "bf16"}, "drift": None},
    ]
    assert accuracy_of(reports) == {"trtcb int8": "KL 0.0123, top-1 95.1% (KV fp8)"}


def test_the_hugging_face_folder_is_the_same_model(tmp_path: Path) -> None:
    source = GgufCheckpoint(write_tiny(tmp_path / "tiny.gguf"), name="tiny")
    folder = tmp_path / "hf"
    folder.mkdir()
    write_hf_folder(source, folder)
    copy = HfCheckpoint(folder, name="tiny")
    assert copy.spec == source.spec
    assert copy.assets.tokenizer_json == source.assets.tokenizer_json
    for name in source.tensor_names():
        assert np.array_equal(copy.tensor(name), source.tensor(name)), name


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.02), ("Q4_0", 0.7)])
def test_a_requantised_gguf_is_the_same_model_nearly(tmp_path: Path, kind: str, error: float) -> None:
    source = GgufCheckpoint(write_tiny(tmp_path / "tiny.gguf"), name="tiny")
    write_gguf(source.path, tmp_path / "q.gguf", gguf.GGMLQuantizationType[kind])
    copy = GgufCheckpoint(tmp_path / "q.gguf", name="tiny")
    assert copy.spec == source.spec
    assert copy.assets.tokenizer_json == source.assets.tokenizer_json
    assert copy.weight_dtype == kind.lower()
    norm, matrix = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
    assert np.array_equal(copy.tensor(norm), source.tensor(norm))
    assert 0 < np.abs(copy.tensor(matrix) - source.tensor(matrix)).max() < error
    table = np.abs(copy.tensor("model.embed_tokens.weight") - source.tensor("model.embed_tokens.weight"))
    assert table.max() < 0.02  # at 8 bits in both files


def test_a_conversion_that_fails_leaves_nothing_under_its_name(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        made(tmp_path / "model", fail)
    assert not (tmp_path / "model").exists()
    assert sorted(p.name for p in made(tmp_path / "model", lambda folder: (folder / "whole").touch()).iterdir()) == [
        "whole"
    ]
