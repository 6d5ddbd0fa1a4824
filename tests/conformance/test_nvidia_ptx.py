"""Kernels compiled ahead of time for processors that are not here: arguments, PTX version, shared memory, assembler."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from trtcb.plugins.nvidia.shape import FIRST_WITH_E4M3

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"  # a newer one, which knows all processors
SHARED_LIMIT = 48 << 10
LLAMA, SMOLLM = (32, 8, 128), (9, 3, 64)
CASES = [
    *[(capability, "bf16", "fp8", *LLAMA) for capability in (80, 89, 90, 100, 120)],
    *[(capability, "bf16", kv, *LLAMA) for capability in (80, 90, 120) for kv in ("bf16", "int8")],
    *[(89, "fp16", kv, *SMOLLM) for kv in ("fp16", "int8", "fp8")],
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Kernels by case."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.conformance.ptx_kernels", json.dumps(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plugin_can_launch_what_was_compiled(compiled, case, tmp_path):
    capability, _, kv, *_ = case
    is_quantized = kv in ("int8", "fp8")
    pools = 4 if is_quantized else 2
    expected = {"write": "p" * (2 + pools + 1 + pools), **dict.fromkeys(("decode", "mixed"), "p" * (6 + pools) + "ip")}
    for name, kernel in compiled[case].items():
        assert kernel["parameters"] == expected[name]
        assert kernel["ptx"].count(".visible .entry") == 1
        assert kernel["shared_bytes"] <= SHARED_LIMIT
        assert kernel["threads"] == (32 if name == "write" else 128)
        assert re.search(r"\.version (\S+)", kernel["ptx"])[1] == ("8.1" if capability <= 90 else "8.7")
        if kv == "fp8" and name != "write":
            assert ("e4m3x2" in kernel["ptx"]) == (capability >= FIRST_WITH_E4M3)
        target = re.search(r"\.target (\w+)", kernel["ptx"])[1]
        assert target.startswith(f"sm_{capability}")
        source = tmp_path / f"{name}.ptx"
        source.write_text(kernel["ptx"])
        done = subprocess.run(
            [PTXAS, f"-arch={target}", source, "-o", tmp_path / "cubin"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
