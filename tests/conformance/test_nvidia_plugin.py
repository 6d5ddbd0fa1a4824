"""The TensorRT plugins over TensorRT's real Python bindings: what its builder would ask of them, without TensorRT."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.plugin_sizes import MB, SLOTS, B, S, T

LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")
CASES = [
    ("bf16", "bf16", 32, 8, 128, 80),
    ("bf16", "fp8", 32, 8, 128, 90),
    ("fp16", "int8", 9, 3, 64, 89),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a process that imports the bindings, over empty libraries, and compiles kernels."""
    if importlib.util.find_spec("tensorrt_bindings") is None:
        pytest.skip("TensorRT's Python bindings are not installed (tensorrt-cu13-bindings)")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to make stand-ins of TensorRT's libraries with")
    folder = tmp_path_factory.mktemp("tensorrt")
    for library in LIBRARIES:
        source = Path(__file__).with_name("stub_tensorrt.c")
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", folder / library], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"LD_LIBRARY_PATH": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plugin_lives_through_a_build(environment, case):
    command = [sys.executable, "-m", "tests.conformance.plugin_life", json.dumps(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    dtype, kv, heads, kv_heads, dim, _ = case
    model, is_quantized = {"fp16": "HALF", "bf16": "BF16"}[dtype], kv in ("int8", "fp8")
    pools = ["INT8", "INT8", "HALF", "HALF"] if is_quantized else [model] * 2
    pool_shapes = [[SLOTS, kv_heads, dim]] * 2 + [[SLOTS, kv_heads]] * (len(pools) - 2)

    write = found["write"]
    assert write["outputs"] == pools
    assert write["out_shapes"] == pool_shapes
    assert write["aliases"] == list(range(2, 2 + len(pools)))
    assert write["supported"] == [model, model, *pools, "INT32", *pools]
    assert [write["tactics"], write["grid"], write["block"], write["scalars"]] == [[], [T, kv_heads, 1], 32, []]

    for tactic, rows in {1: 16, 2: 64}.items():
        attend = found[f"attend{tactic}"]
        assert [attend["outputs"], attend["out_shapes"], attend["aliases"]] == [[model], [[T, heads, dim]], [-1]]
        assert attend["supported"] == [model, *pools, *["INT32"] * 5, model]
        assert attend["tactics"] == [1, 2]
        assert attend["grid"] == [-(-S * (heads // kv_heads) // rows), kv_heads, B]
        assert [attend["block"], attend["scalars"]] == [128, [MB]]
    assert all(found[name]["is_in_ptx"] for name in ("write", "attend1", "attend2"))
    for name in ("block_size", "scale"):
        assert f"has {name}=" in found[f"wrong {name}"]
        assert "build the plan again" in found[f"wrong {name}"]
