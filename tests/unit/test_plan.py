import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from trtcb.errors import ModelNotFoundError, OutOfMemoryError, PlanError
from trtcb.plan import Plan, PlanHeader, Section, TensorSource, plan_size, write_plan
from trtcb.spec import BuildLimits, KVDtype, ModelSpec, RopeScaling

MODEL = ModelSpec(
    name="toy",
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=256,
    max_position=512,
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 256),
    tie_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2, 3),
)
HEADER = PlanHeader(
    target="cpu",
    fingerprint={"isa": "avx2"},
    model=MODEL,
    weight_dtype="bf16",
    kv_dtype=KVDtype.FP8,
    limits=BuildLimits(),
    source={"model": "toy", "digest": "0" * 64},
    versions={"trtcb": "0.1.0"},
)
ARRAYS = {
    "a": np.arange(33, dtype=np.float32).reshape(3, 11),
    "b": np.arange(-8, 8).reshape(4, 4).astype(ml_dtypes.bfloat16),
    "c": np.arange(5, dtype=np.float16),
    "d": np.arange(-128, 128, dtype=np.int8).reshape(2, 128),
    "e": np.arange(256, dtype=np.uint8).reshape(128, 2),
}
DTYPES = {"a": "fp32", "b": "bf16", "c": "fp16", "d": "int8", "e": "uint8"}


def sources() -> list[TensorSource]:
    return [TensorSource(n, DTYPES[n], a.shape, lambda a=a: a) for n, a in ARRAYS.items()]


def sections() -> list[Section]:
    return [
        Section.of_bytes("graph", b"onnx" * 3000),
        Section.of_json("program", {"calls": []}),
        Section("empty", 0, list),
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "toy.plan"
    write_plan(target, HEADER, sections(), sources())
    return target


def test_round_trip(path: Path) -> None:
    with Plan.open(path) as plan:
        assert plan.header == HEADER
        assert plan.size == path.stat().st_size == plan_size(HEADER, sections(), sources())
        assert bytes(plan.section("graph")) == b"onnx" * 3000
        assert bytes(plan.section("empty")) == b""
        assert plan.has_section("program")
        assert not plan.has_section("engine")
        assert [s.offset % 4096 for s in plan.sections] == [0] * 5
        for name, array in ARRAYS.items():
            read = plan.tensor(name)
            assert read.dtype == array.dtype
            assert read.shape == array.shape
            assert read.tobytes() == array.tobytes()
            assert not read.flags.writeable
            assert read.ctypes.data % 64 == 0


def test_release_keeps_the_contents(path: Path) -> None:
    with Plan.open(path) as plan:
        for name, array in ARRAYS.items():
            view = plan.tensor(name)
            plan.release(name)
            assert view.tobytes() == array.tobytes()


def test_views_outlive_close(path: Path) -> None:
    plan = Plan.open(path)
    view = plan.tensor("a")
    plan.close()
    plan.close()
    assert view.tobytes() == ARRAYS["a"].tobytes()


def test_unknown_names_are_named(path: Path) -> None:
    with Plan.open(path) as plan:
        with pytest.raises(PlanError, match="no section 'engine'"):
            plan.section("engine")
        with pytest.raises(PlanError, match="no tensor 'zz'"):
            plan.tensor("zz")


def test_a_plan_without_tensors(tmp_path: Path) -> None:
    write_plan(tmp_path / "x.plan", HEADER, [], [])
    with Plan.open(tmp_path / "x.plan") as plan:
        assert dict(plan.tensors) == {}


def test_writing_reports_every_byte_and_obeys_umask(tmp_path: Path) -> None:
    target = tmp_path / "new" / "x.plan"
    seen: list[int] = []
    old = os.umask(0o027)
    try:
        write_plan(target, HEADER, sections(), sources(), seen.append)
    finally:
        os.umask(old)
    with Plan.open(target) as plan:
        assert sum(seen) == sum(s.size for s in plan.sections)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("unnamed", [True, False])
def test_interrupted_write_leaves_the_old_plan_and_nothing_else(
    path: Path, error: type[BaseException], unnamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not unnamed:
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_RDWR)  # EISDIR, as file systems without it answer
    before = path.read_bytes()

    def load() -> np.ndarray:
        raise error

    with pytest.raises(error):
        write_plan(path, HEADER, sections(), [*sources(), TensorSource("last", "fp32", (4,), load)])
    assert [p.name for p in path.parent.iterdir()] == ["toy.plan"]
    assert path.read_bytes() == before


def test_named_temporary_file_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_RDWR)
    write_plan(tmp_path / "x.plan", HEADER, sections(), sources())
    assert [p.name for p in tmp_path.iterdir()] == ["x.plan"]
    Plan.open(tmp_path / "x.plan").close()


def test_killed_writer_leaves_the_old_plan_or_none(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        import numpy as np
        sys.path.insert(0, sys.argv[2])
        from test_plan import HEADER
        from trtcb.plan import TensorSource, write_plan
        def load():
            print("writing", flush=True)
            time.sleep(60)
        write_plan(sys.argv[1], HEADER, [], [TensorSource("a", "fp32", (4,), load)])
        """
    )
    target = tmp_path / "x.plan"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(target), str(Path(__file__).parent)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not target.exists()
    # Only a file system without unnamed files may keep a hidden temporary one.
    assert all(p.name.startswith(".x.plan.") for p in tmp_path.iterdir())


def test_tensor_that_is_not_what_was_declared(tmp_path: Path) -> None:
    wrong = TensorSource("a", "fp32", (3,), lambda: np.zeros(3, np.float16))
    with pytest.raises(ValueError, match="tensor 'a' was declared fp32"):
        write_plan(tmp_path / "x.plan", HEADER, [], [wrong])
    with pytest.raises(ValueError, match="section 'graph' was declared 9 bytes"):
        write_plan(tmp_path / "x.plan", HEADER, [Section("graph", 9, lambda: [b"four"])], [])
    with pytest.raises(ValueError, match="repeats section 'graph'"):
        write_plan(tmp_path / "x.plan", HEADER, [Section.of_bytes("graph", b"")] * 2, [])
    assert list(tmp_path.iterdir()) == []


def test_no_room_on_the_disk(tmp_path: Path) -> None:
    def never() -> Iterator[bytes]:
        raise AssertionError("nothing may be produced for a plan that cannot fit")

    with pytest.raises(OutOfMemoryError, match="bytes of disk"):
        write_plan(tmp_path / "new" / "er" / "x.plan", HEADER, [Section("graph", 1 << 45, never)], [])
    assert list(tmp_path.iterdir()) == []


def test_missing_plan_names_a_near_one(path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"did you mean .*toy\.plan"):
        Plan.open(path.parent / "tiy.plan")
    with pytest.raises(ModelNotFoundError, match=r"did you mean .*toy\.plan"):
        Plan.open(path.parent / "toy")
    with pytest.raises(ModelNotFoundError, match=r"is a folder.*toy\.plan"):
        Plan.open(path.parent)
    with pytest.raises(ModelNotFoundError, match="trtcb build"):
        Plan.open(path.parent / "nowhere" / "x.plan")


def test_importing_the_reader_is_light() -> None:
    heavy = ("torch", "onnx", "numba", "pydantic", "ml_dtypes")
    code = f"import sys, trtcb.plan; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
