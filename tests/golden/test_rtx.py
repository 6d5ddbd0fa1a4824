"""Real engines of TensorRT-RTX, built without a GPU, and what becomes of builds that fail."""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from tests.golden.array_checkpoint import TINY, random_checkpoint
from trtcb.builder import rtx
from trtcb.builder.build import build, compile_options
from trtcb.builder.export import build_graph, write_onnx
from trtcb.builder.report import ignore_progress, ignore_stage
from trtcb.config import BuildConfig
from trtcb.errors import TargetUnavailableError, TrtcbError, UsageError
from trtcb.plan_format import PlanHeader
from trtcb.plan_writer import Section, write_plan
from trtcb.plugins.ports import graph_inputs, graph_outputs
from trtcb.spec import BuildLimits, KVDtype

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: it has wheels for x86-64 alone")

LIMITS = BuildLimits(max_batch_size=8, max_num_tokens=64, max_seq_len=128, block_size=32)
CASES = [
    *itertools.product(("fp16",), (KVDtype.FP16, KVDtype.INT8, KVDtype.FP8), [(89, 120)]),
    *itertools.product(("bf16",), (KVDtype.BF16, KVDtype.INT8, KVDtype.FP8), [(80,), (89, 120)]),
    *itertools.product(("bf16",), (KVDtype.FP32, KVDtype.FP16), [(89,)]),
]


def job(folder, dtype, kv_dtype, capabilities, **changes):
    """A two-layer model's graph in ``folder``, and the job to build it."""
    graph = build_graph(
        TINY,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=LIMITS.block_size,
        max_positions=LIMITS.max_seq_len,
        **{"deferred": True, **changes},
    )
    write_onnx(graph, random_checkpoint(TINY), folder / "model.onnx")
    described = rtx.rtx_job(folder / "model.onnx", TINY, kv_dtype, LIMITS, capabilities=capabilities)
    return dataclasses.replace(described, dtype=dtype)


@pytest.mark.parametrize(("dtype", "kv_dtype", "capabilities"), CASES, ids=str)
def test_an_engine_is_built_without_a_gpu(tmp_path, dtype, kv_dtype, capabilities):
    stages, steps = [], []
    built = rtx.run_job(
        job(tmp_path, dtype, kv_dtype, capabilities), lambda name, total: stages.append((name, total)), steps.append
    )
    engine, facts = built
    assert len(engine) > 100_000
    [(name, total)] = stages
    assert (name, sum(steps)) == ("engine", total)
    types = {"fp16": "half", "bf16": "bf16", "fp32": "float", "int8": "int8", "int32": "int32"}
    for ports, found in ((graph_inputs, facts["inputs"]), (graph_outputs, facts["outputs"])):
        expected = {port.name: types[port.dtype] for port in ports(TINY, kv_dtype, deferred=True)}
        assert {name: text.split()[0] for name, text in found.items()} == expected
    layers = Counter(facts["layers"])
    assert [layers["attention_input"], layers["attention_output"], layers["scatter"]] == [2, 2, 0]
    decode, mixed = facts["profiles"]
    assert [decode["q_range"], decode["input_ids"]] == [[[1], [1], [1]], [[1], [4], [8]]]
    assert mixed["q_range"] == mixed["input_ids"] == [[1], [32], [64]]
    assert decode["block_tables"] == [[1, 1], [4, 1], [8, 4]]


def test_a_graph_that_writes_its_pools_is_refused(tmp_path):
    described = job(tmp_path, "fp16", KVDtype.FP16, (89,), deferred=False)
    with pytest.raises(TrtcbError, match="writes into its pools"):
        rtx.run_job(described, ignore_stage, ignore_progress)


def test_what_cannot_be_built_is_said_in_a_sentence(tmp_path):
    with pytest.raises(TrtcbError, match=r"does not build for compute capability 1\.1"):
        rtx.run_job(job(tmp_path, "fp16", KVDtype.FP16, (11,)), ignore_stage, ignore_progress)
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    broken = job(tmp_path, "fp16", KVDtype.FP16, (89,))
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(TrtcbError, match=r"ended with status 1 and no engine, last words: .*DecodeError"):
        rtx.run_job(broken, ignore_stage, ignore_progress)


def test_a_build_that_dies_is_told_and_one_that_is_interrupted_is_killed(tmp_path, monkeypatch):
    started = []
    real = subprocess.Popen

    def recorded(*arguments, **options):
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(rtx.subprocess, "Popen", recorded)
    described = job(tmp_path, "fp16", KVDtype.FP16, (89,))

    def die(name, total):
        os.kill(started[-1].pid, signal.SIGABRT)

    with pytest.raises(TrtcbError, match=r"ended with status -6 and no engine.*use --target cpu"):
        rtx.run_job(described, die, ignore_progress)

    def interrupt(name, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rtx.run_job(described, interrupt, ignore_progress)
    assert started[-1].returncode == -signal.SIGKILL


def test_what_the_target_takes(monkeypatch):
    config = BuildConfig(model="x", target="tensorrt-rtx", weight_dtype="int8")
    with pytest.raises(UsageError, match="bf16 weights and not int8: use --weight-dtype bf16"):
        compile_options(config, TINY, "bf16")
    monkeypatch.setattr(rtx.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetUnavailableError, match=r"pip install 'trtcb\[rtx\]'"):
        build(config)  # before anybody looks for the model


def test_what_a_library_prints_is_not_taken_for_progress(tmp_path):
    """A line on descriptor 1, as C++ writes it, from within the build."""
    noisy = tmp_path / "sitecustomize.py"
    noisy.write_text("import atexit, os\natexit.register(os.write, 1, b'not ours')\n")
    described = job(tmp_path, "fp16", KVDtype.FP16, (11,))
    (tmp_path / "job.json").write_text(described.to_json())
    command = [sys.executable, "-m", "trtcb.builder.rtx_process", tmp_path / "job.json", tmp_path / "engine"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert [list(json.loads(line)) for line in done.stdout.splitlines()] == [["error"]]
    assert "not ours" in done.stderr


@pytest.mark.parametrize(
    "network",
    ["[]", "7", "{}", '{"layers": {"a": "b"}, "profiles": []}', '{"layers": {}, "profiles": [7]}', '{"layers": 1}'],
)
def test_a_network_that_is_none_is_told(tmp_path, network):
    path = tmp_path / "x.plan"
    header = PlanHeader("tensorrt-rtx", {}, TINY, "bf16", KVDtype.FP8, LIMITS, {}, {})
    write_plan(path, header, [Section.of_bytes("network", network.encode())], [])
    shown = trtcb("inspect", path)
    assert (shown.returncode, shown.stderr.count("\n")) == (4, 1)
    assert "section 'network' is not one" in shown.stderr


def trtcb(*arguments):
    return subprocess.run([sys.executable, "-m", "trtcb", *map(str, arguments)], capture_output=True, text=True)


def test_a_plan_from_the_command_line(tmp_path):
    path = tmp_path / "tiny.plan"
    flags = ("--model", "tiny-random", "--target", "tensorrt-rtx", "--weight-dtype", "bf16", "--kv-dtype", "fp8")
    done = trtcb("build", *flags, "--output", path)
    assert done.returncode == 0, done.stderr
    assert "cannot run them yet" in done.stdout
    shown = trtcb("inspect", path, "--verify")
    assert shown.returncode == 0, shown.stderr
    for text in (
        "tensorrt-rtx  capabilities 8.0 8.6 8.9 12.0",
        "attention_input",
        "profile 1",
        "block_tables",
        "engine ",
    ):
        assert text in shown.stdout
    facts = json.loads(trtcb("inspect", path, "--json").stdout)
    assert facts["network"]["capabilities"] == [80, 86, 89, 120]
    served = trtcb("generate", path, "x")
    assert served.returncode == 8
    assert "rebuild it with --target cpu" in served.stderr
    assert trtcb("build", *flags, "--output", path, "--eval").returncode == 2
    assert trtcb("build", *flags, "--weight-dtype", "int8", "--dry-run").returncode == 2
