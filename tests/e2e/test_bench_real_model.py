"""The three capacity policies on the real model, loaded until a small pool runs out: every answer is its solo run's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.smollm2_plans import BuildPlan

pytestmark = pytest.mark.model
POLICIES = ("static_batch", "guaranteed_no_evict", "max_utilization")


def test_policies_in_a_small_pool_stream_the_tokens_of_the_solo_run(smollm2_plan: BuildPlan, tmp_path: Path) -> None:
    """Pool: five blocks of 32 tokens. A request declares three blocks, starts with one, and mostly ends in two."""
    out = tmp_path / "r.json"
    load = ("--num-prompts", "8", "--random-input-len", "24", "--random-output-len", "12", "--max-tokens", "64")
    limits = ("--max-seq-len", "96", "--max-batch-size", "6", "--num-blocks", "5")
    plan = ("--plan", str(smollm2_plan("fp32", "fp8")), "--check-tokens", "8", "--json", str(out))
    command = [sys.executable, "-m", "trtcb", "bench", "policy", *POLICIES, *plan, *load, *limits]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("8 requests, ")

    data = json.loads(out.read_text())
    pauses = {one["label"]: one["metrics"]["pauses"]["mean"] for one in data["results"]}
    assert [one["metrics"]["completed"]["mean"] for one in data["results"]] == [8, 8, 8]
    assert pauses["static_batch"] == pauses["guaranteed_no_evict"] == 0
    assert pauses["max_utilization"] > 0
    assert data["token_check"]["num_requests"] == 8
    assert data["token_check"]["num_paused"] > 0
    assert data["token_check"]["num_tokens"] == 8 * 12
