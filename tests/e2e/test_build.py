"""``trtcb build`` and ``export`` as processes: what they leave on disk if they finish, are interrupted or killed."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from trtcb.plan import Plan
from trtcb.program import Program
from trtcb.spec import KVDtype

MODEL = ("--model", "tiny-random")

# Runs the command line and sends itself a signal at the n-th piece of the plan that is written.
STRIKE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a script inherits "ignore"
from trtcb.builder import build
from trtcb.cli.main import main
number, at = int(sys.argv[1]), int(sys.argv[2])
write_plan, pieces = build.write_plan, 0
def struck(path, header, sections, tensors, on_bytes):
    def count(size):
        global pieces
        pieces += 1
        if pieces == at:
            os.kill(os.getpid(), number)
        on_bytes(size)
    write_plan(path, header, sections, tensors, count)
    print("PIECES", pieces)
build.write_plan = struck
main(sys.argv[3:])
"""


def trtcb(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trtcb", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def struck(number: int, at: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", STRIKE, str(number), str(at), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "tiny.plan"
    result = trtcb("build", *MODEL, "--kv-dtype", "fp8", "--max-num-seqs", "4", "-o", path)
    assert result.returncode == 0, result.stderr
    assert str(path) in result.stdout
    assert "blocks of" in result.stdout
    assert "sequences of full length" in result.stdout
    return path


def test_a_build_is_one_whole_plan(built: Path) -> None:
    assert [p.name for p in built.parent.iterdir()] == [built.name]
    with Plan.open(built) as plan:
        assert plan.header.model.name == "tiny-random"
        assert plan.header.kv_dtype is KVDtype.FP8
        assert plan.header.limits.max_batch_size == 4
        program = Program.from_json(json.loads(bytes(plan.section("program"))))
        used = {name for call in program.calls for name in call.weights}
        assert used <= set(plan.tensors)
        layers = plan.header.model.num_layers
        assert sum(call.op == "paged_attention" for call in program.calls) == layers
        assert sum(call.op == "rope_kv_write" for call in program.calls) == layers


def test_an_int4_build_says_that_it_rounded_and_the_plan_generates(tmp_path: Path) -> None:
    path = tmp_path / "x.plan"
    result = trtcb("build", *MODEL, "--weight-dtype", "int4", "-o", path)
    assert result.returncode == 0, result.stderr
    assert "warning: 14 of 14 matrices are not stored in blocks of 4 bits" in result.stderr
    text = trtcb("generate", path, "abc", "--max-tokens", "4", "--temperature", "0")
    assert text.returncode == 0, text.stderr


def test_the_same_build_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.plan"
    result = trtcb("build", *MODEL, "--kv-dtype", "fp8", "--max-num-seqs", "4", "-o", again, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["plan_bytes"] == again.stat().st_size
    assert again.read_bytes() == built.read_bytes()


@pytest.mark.parametrize("at", [1, 5])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, at: int) -> None:
    result = struck(signal.SIGINT, at, "build", *MODEL, "-o", tmp_path / "new" / "x.plan")
    assert result.returncode == 130, result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_build_killed_anywhere_leaves_the_old_plan_or_the_new(built: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.plan"
    finished = struck(signal.SIGKILL, -1, "build", *MODEL, "-o", path)
    pieces = int(finished.stdout.split("PIECES ")[1].split()[0])
    new = path.read_bytes()
    points = random.Random(0).choices(range(1, pieces + 1), k=50)
    for index, at in enumerate(points):
        if index % 2:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(built.read_bytes())
        result = struck(signal.SIGKILL, at, "build", *MODEL, "-o", path)
        assert result.returncode == -signal.SIGKILL
        left = [p.name for p in tmp_path.iterdir()]
        assert left == ([] if index % 2 else ["x.plan"])
        if not index % 2:
            assert path.read_bytes() == built.read_bytes()
    assert new != built.read_bytes()


def test_export_writes_a_graph_and_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "tiny.onnx"
    result = trtcb("export", *MODEL, "--dtype", "fp32", "--kv-dtype", "bf16", "-o", path)
    assert result.returncode == 0, result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.onnx", "tiny.onnx.data"]
    graph = onnx.load(str(path), load_external_data=False).graph
    assert f"{len(graph.node)} nodes" in result.stdout
    assert {"PagedAttention", "KVCacheWrite"} <= {node.op_type for node in graph.node}


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = trtcb("build", *MODEL, "-o", tmp_path / "file" / "x.plan")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr


def test_a_file_that_is_no_plan_is_not_overwritten(tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("mine")
    result = trtcb("build", *MODEL, "-o", notes)
    assert result.returncode == 2
    assert "will not be overwritten" in result.stderr
    assert notes.read_text() == "mine"


def test_a_dry_run_of_what_cannot_be_served_says_so(tmp_path: Path) -> None:
    result = trtcb("build", "--model", "llama-2-7b", "--random-weights", "--dry-run", "--kv-memory", "1KiB")
    assert result.returncode == 5
    assert "0 blocks" in result.stdout
    assert "serving this needs" in result.stderr


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for output in (tmp_path / "pipe", tmp_path / "link", tmp_path, Path("/dev/full")):
        for command in ("build", "export"):
            result = trtcb(command, *MODEL, "-o", output)
            assert result.returncode == 2, (command, output, result.stderr)
            assert "regular file" in result.stderr
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert Path("/dev/full").is_char_device()


def test_what_could_not_be_served_is_not_built(tmp_path: Path) -> None:
    for limits in (("--max-num-tokens", "16"), ("--block-size", "1024"), ("--max-seq-len", "1")):
        result = trtcb("build", *MODEL, *limits, "-o", tmp_path / "x.plan")
        assert result.returncode == 2
        assert limits[0] in result.stderr
    assert not (tmp_path / "x.plan").exists()
