import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trtcb import __version__, errors
from trtcb.cli import main as cli
from trtcb.cli.doctor import cpu_features
from trtcb.cli.progress import LineDisplay
from trtcb.plan import PlanHeader, Section, write_plan
from trtcb.program import Call, Program, Value
from trtcb.spec import BuildLimits, KVDtype, ModelSpec

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    model = ModelSpec("toy", 64, 128, 2, 4, 2, 16, 256, 512)
    header = PlanHeader(
        "cpu", {"isa": "avx2"}, model, "bf16", KVDtype.FP8, BuildLimits(), {"model": "m"}, {"trtcb": "0"}
    )
    calls = (
        Call("embedding", (), ("r",), ("w",)),
        Call("rms_norm", ("r",), ("h",), ("g",), {"eps": 1e-5}),
        Call("linear", ("h",), ("logits",), ("w",)),
        Call("linear", ("h",), ("x",), ("w",)),
    )
    program = Program(calls, (Value("r", "tokens", 64, "fp32"),))
    path = tmp_path / "toy.plan"
    write_plan(path, header, [Section.of_json("program", program.to_json())], [])
    return path


def test_help_and_version(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for name, command in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", out, re.MULTILINE)
    assert run("--version")[:2] == (0, f"trtcb {__version__}\n")


def test_a_mistyped_command_is_named(run: Run) -> None:
    code, _, err = run("bild")
    assert code == 2
    assert "Did you mean 'build'" in err


def error_classes() -> list[type[errors.TrtcbError]]:
    return [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TrtcbError)]


@pytest.mark.parametrize("error", error_classes())
def test_an_error_is_one_sentence_and_its_exit_code(
    run: Run, error: type[errors.TrtcbError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error("This is what to do.")

    monkeypatch.setattr(cli.Command, "load", lambda self: fail)
    assert run("doctor") == (error.exit_code, "", "error: This is what to do.\n")


def test_the_exit_codes_are_the_documented_ones() -> None:
    listed = dict(re.findall(r"(\d+) (\w+)", " ".join((cli.__doc__ or "").split("Exit codes:")[1].split())))
    assert set(listed) == {*(str(c.exit_code) for c in error_classes()), "0", "130"}


def test_ctrl_c_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Command, "load", lambda self: interrupt)
    assert run("doctor") == (130, "", "interrupted\n")


def test_a_file_system_error_is_one_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        Path("/proc/nothing/here").read_text()

    monkeypatch.setattr(cli.Command, "load", lambda self: fail)
    assert run("doctor") == (1, "", "error: /proc/nothing/here: No such file or directory\n")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli.Command, "load", lambda self: fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_inspect(run: Run, plan: Path) -> None:
    code, out, _ = run("inspect", plan, "--verify", "--calls")
    assert code == 0
    assert "fp8  144 bytes a token (0.562 of fp16)" in out
    assert re.search(r"^  linear +2$", out, re.MULTILINE)
    assert "h = rms_norm(r, g)  eps 1e-05" in out
    assert "Every section matches" in out


def test_inspect_json(run: Run, plan: Path) -> None:
    code, out, _ = run("inspect", plan, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["program"] == {"num_calls": 4, "calls_by_op": {"embedding": 1, "rms_norm": 1, "linear": 2}}
    assert facts["kv_bytes_per_token"] == 144
    assert facts["model"]["num_layers"] == 2
    assert [s["name"] for s in facts["sections"]] == ["program", "tensors", "weights"]


def test_inspect_refuses(run: Run, plan: Path) -> None:
    code, _, err = run("inspect", plan.with_name("tou.plan"))
    assert code == 3
    assert "did you mean" in err
    data = bytearray(plan.read_bytes())
    data[100] ^= 1
    plan.write_bytes(data)
    code, out, err = run("inspect", plan)
    assert (code, out) == (4, "")
    assert err.count("\n") == 1
    assert "header_sha256" in err


def test_inspect_refuses_a_program_that_is_none(run: Run, tmp_path: Path) -> None:
    header = PlanHeader(
        "cpu", {}, ModelSpec("toy", 64, 128, 2, 4, 2, 16, 256, 512), "bf16", KVDtype.FP8, BuildLimits(), {}, {}
    )
    write_plan(tmp_path / "x.plan", header, [Section.of_json("program", {"calls": [1]})], [])
    code, _, err = run("inspect", tmp_path / "x.plan")
    assert code == 4
    assert "section 'program'" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "model is required"),
        (["-m", "x", "--target", "tensorrt"], 8, "--target cpu"),
        (["-m", "x", "--tp-size", "2"], 2, "one device"),
        (["-m", "x", "--pp-size", "2"], 2, "one device"),
        (["-m", "x", "--kv-cache-dtype", "int3"], 2, "kv_dtype"),
        (["-m", "x", "--tokens-per-block", "33"], 2, "multiple of 32"),
        (["-m", "x", "--kv-memory", "lots"], 2, "not a size"),
        (["-m", "no/such/folder/"], 3, "no/such/folder"),
        (["-m", "smolm2-135m"], 3, "smollm2-135m"),
        (["-m", "tiny-random", "--max-seq-len", "1000000"], 2, "use at most"),
        (["--mdel", "x"], 2, "--model"),
    ],
)
def test_build_refuses(run: Run, arguments: list[str], code: int, message: str) -> None:
    found, out, err = run("build", *arguments)
    assert (found, out) == (code, "")
    assert message in err


def test_build_shows_where_settings_come_from(run: Run, tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("tokens_per_block: 64\nkv_dtype: int8\n")
    code, out, _ = run("build", "-m", "x", "--config", tmp_path / "b.yaml", "--kv-dtype", "fp8", "--show-config")
    lines = {line.split()[0]: line.split(None, 2)[2] for line in out.splitlines()}
    assert code == 0
    assert re.fullmatch(r"fp8 +\(flag\)", lines["kv_dtype"])
    assert re.fullmatch(r"64 +\(.*b\.yaml\)", lines["block_size"])
    assert re.fullmatch(r"64 +\(default\)", lines["max_batch_size"])


def test_dry_run_needs_no_weights_and_writes_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    code, out, _ = run("build", "-m", "llama-2-7b", "--dry-run", "--kv-dtype", "fp16", "--kv-memory", "16GiB", "--json")
    result = json.loads(out)
    assert code == 0
    assert (result["kv_bytes_per_token"], result["num_blocks"], result["num_sequences"]) == (524_288, 1024, 8)
    assert list(tmp_path.iterdir()) == []


def test_lines_for_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from trtcb.cli import progress

    clock = iter([0.0, 1.0, 12.0, 12.5, 30.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with LineDisplay(sys.stdout) as display:
        display.on_stage("weights", 1 << 20)
        for _ in range(4):
            display.on_progress(256 << 10)
    assert capsys.readouterr().out.splitlines() == [
        "weights (1.0 MiB)",
        "weights 50%, 12 s left",
        "weights 100%, 0 s left",
    ]


def test_lines_of_a_stage_without_a_measure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from trtcb.cli import progress

    clock = iter([0.0, 1.0, 12.0, 13.0, 30.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with LineDisplay(sys.stdout) as display:
        display.on_stage("kernels", 0)
        for _ in range(4):
            display.on_progress(1)
    assert capsys.readouterr().out.splitlines() == ["kernels", "kernels, 2 so far", "kernels, 4 so far"]


def test_cpu_features_of_both_kinds() -> None:
    assert cpu_features("flags\t\t: fpu avx512f avx2 fma\n") == ["avx2", "fma", "avx512f"]
    assert cpu_features("Features\t: fp asimd i8mm bf16\n") == ["asimd", "bf16", "i8mm"]


def test_doctor(run: Run) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    assert re.search(r"^  cpu +works$", out, re.MULTILINE)
    assert f"trtcb {__version__}" in out
