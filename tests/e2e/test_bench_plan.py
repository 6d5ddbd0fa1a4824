"""``trtcb bench`` on a real engine: a small plan is compared, calibrated, and its calibration simulated."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trtcb.builder.build import build
from trtcb.cli.bench import app
from trtcb.config import BuildConfig
from trtcb.errors import UsageError
from trtcb.executor.served_model import ServedModel


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "tiny.plan"
    build(BuildConfig(model="tiny-random", output=path, max_seq_len=256, max_batch_size=8, max_num_tokens=128))
    return path


def trtcb(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "trtcb", "bench", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_policies_on_a_plan(plan: Path, tmp_path: Path) -> None:
    """A run is reported only if every request got exactly its tokens; a pool this small forces pauses."""
    out = tmp_path / "r.json"
    load = ("--num-prompts", "12", "--random-input-len", "24", "--random-output-len", "40", "--max-tokens", "64")
    setups = ("max_utilization", "guaranteed_no_evict", "max_utilization:overlap_depth=1")
    trtcb("policy", *setups, "--plan", plan, *load, "--num-blocks", "6", "--json", out)
    max_utilization, no_evict, overlap = (result["metrics"] for result in json.loads(out.read_text())["results"])
    assert overlap["completed"]["mean"] == 12
    assert overlap["pauses"]["mean"] > 0
    assert max_utilization["completed"]["mean"] == no_evict["completed"]["mean"] == 12
    assert max_utilization["pauses"]["mean"] > 0
    assert no_evict["pauses"]["mean"] == 0
    assert max_utilization["steps"]["mean"] < no_evict["steps"]["mean"]


def test_a_calibrated_machine_can_be_simulated(plan: Path, tmp_path: Path) -> None:
    machine = tmp_path / "machine.yaml"
    said = trtcb("calibrate", plan, "--output", machine, "--num-prompts", "12", "--threads", "1")
    assert "off by" in said
    settings = yaml.safe_load(machine.read_text())
    assert settings["engine"]["max_batch_size"] == 8
    assert settings["engine"]["block_size"] == 32
    assert settings["step_time"]["host_s"] > 0
    assert sum(settings["step_time"].values()) > settings["step_time"]["host_s"]
    assert min(settings["step_time"].values()) >= 0
    assert "requests/s" in trtcb("policy", "static_batch", "--sim", machine, "--num-prompts", "8")


def test_throughput_of_a_plan(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    load = ("--num-prompts", "20", "--input-len", "24", "--output-len", "10", "--prefix-len", "8")
    said = trtcb("throughput", plan, *load, "--max-queue-size", "4", "--num-blocks", "12", "--output-json", out)
    data = json.loads(out.read_text())
    assert (data["num_requests"], data["total_num_tokens"]) == (20, 20 * (24 + 8 + 10))
    assert data["tokens_per_second"] == pytest.approx(data["total_num_tokens"] / data["elapsed_time"])
    assert f"{data['requests_per_second']:.2f} requests/s" in said
    assert data["plan"] == str(plan)
    assert (data["engine"]["num_blocks"], data["engine"]["max_batch_size"]) == (12, 8)
    assert "prompts of 24 tokens after 8 that all share" in data["workload"]


def test_latency_of_a_plan(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    shape = ("--input-len", "16", "--output-len", "4", "--batch-size", "3")
    said = trtcb("latency", plan, *shape, "--num-iters-warmup", "1", "--num-iters", "4", "--output-json", out)
    data = json.loads(out.read_text())
    assert len(data["latencies"]) == 4
    assert data["avg_latency"] == pytest.approx(sum(data["latencies"]) / 4)
    assert min(data["latencies"]) <= data["percentiles"]["10"] <= data["percentiles"]["99"] <= max(data["latencies"])
    assert "90% percentile latency" in said
    assert 0 < data["median_tpot_ms"] < data["median_ttft_ms"] < 1000 * max(data["latencies"])
    assert "| TTFT, time to first token " in said
    assert "profile" not in data


def test_a_profile_tells_where_the_time_of_steps_goes(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    shape = ("--input-len", "16", "--output-len", "4", "--batch-size", "3", "--num-iters-warmup", "1")
    flags = ("--num-iters", "2", "--profile", "--cpu-engine", "whole_step", "--threads", "1")
    said = trtcb("latency", plan, *shape, *flags, "--output-json", out)
    found = json.loads(out.read_text())["profile"]
    assert found["limits"]["read_bytes_per_s"] > 1e8
    assert found["limits"]["flops"] > 1e8
    tokens = {name: found[name]["num_steps"] * found[name]["tokens_per_step"] for name in ("prefill", "decode")}
    assert sum(tokens.values()) == pytest.approx(2 * 3 * (16 + 3))  # the last token of an answer is never computed on
    for name in ("prefill", "decode"):
        phase = found[name]
        groups = [line for line in phase["lines"] if line["part_of"] is None]
        assert sum(line["ms"] for line in groups) == pytest.approx(phase["step_ms"])
        assert {line["name"] for line in groups} >= {"GEMM", "attention", "norm", "sampling", "Python", "waiting"}
        [gemm] = [line for line in groups if line["name"] == "GEMM"]
        products = [line for line in phase["lines"] if line["part_of"] == "GEMM"]
        assert [line["name"].split()[0] for line in products] == [
            *("q_k_v_proj", "o_proj", "gate_up_proj", "down_proj", "logits")
        ]
        assert sum(line["ms"] for line in products) == pytest.approx(gemm["ms"])
        assert all(line["num_bytes"] > 0 and line["flops"] > 0 for line in products)
        assert f"\n{name}: " in said
    assert "\nlimits of this machine, measured now: " in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("throughput", "--scheduler-policy", "max_utilisation"), "'max_utilization'"),
        (("throughput", "--max-batch-size", "9"), "use at most 8"),
        (
            ("throughput", "--input-len", "200", "--output-len", "57", "--num-prompts", "2"),
            "takes 256: lower --input-len",
        ),
        (("throughput", "--num-prompts", "0"), "--num-prompts must be from 1 to"),
        (("latency", "--batch-size", "9"), "use at most 8"),
        (("latency", "--output-len", "225"), "built with --max-seq-len 257"),
        (("latency", "--output-len", "90", "--max-seq-len", "100"), "takes 100: lower --input-len or --output-len"),
        (("latency", "--output-json", "no/folder/r.json"), "no folder"),
        (("latency", "--profile", "--cpu-engine", "portable"), "add --cpu-engine whole_step"),
        (("latency", "--profile", "--overlap-depth", "1"), "leave --overlap-depth out"),
        (("throughput", "--output-json", "/tmp"), "is a folder"),
        (("calibrate", "-o", "/proc/x.yaml"), "name another file"),
    ],
)
def test_offline_mistakes_are_one_sentence(plan: Path, arguments: tuple[str, ...], complaint: str) -> None:
    name, *rest = arguments
    command = [sys.executable, "-m", "trtcb", "bench", name, str(plan), *rest]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode in (1, 2)
    assert result.stderr.startswith("error: ")
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [("--output-len", "225"), ("--batch-size", "9"), ("--profile", "--cpu-engine", "portable")]
)
def test_nothing_is_loaded_for_what_cannot_be_measured(
    plan: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(ServedModel, "from_plan", load)
    result = CliRunner().invoke(app, ["latency", str(plan), *arguments])
    assert isinstance(result.exception, UsageError)
