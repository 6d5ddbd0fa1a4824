"""``trtcb bench`` on a real engine: a small plan is compared, calibrated, and its calibration simulated."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trtcb.builder.build import build
from trtcb.config import BuildConfig


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
    said = trtcb("calibrate", plan, "--output", machine, "--num-prompts", "12")
    assert "off by" in said
    settings = yaml.safe_load(machine.read_text())
    assert settings["engine"]["max_batch_size"] == 8
    assert settings["engine"]["block_size"] == 32
    assert settings["step_time"]["host_s"] > 0
    assert sum(settings["step_time"].values()) > settings["step_time"]["host_s"]
    assert min(settings["step_time"].values()) >= 0
    assert "requests/s" in trtcb("policy", "static_batch", "--sim", machine, "--num-prompts", "8")
