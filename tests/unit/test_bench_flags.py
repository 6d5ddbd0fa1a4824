"""Flags of ``trtcb bench``: groups and their help."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from trtcb.bench.workload import RandomWorkload
from trtcb.cli.bench import app
from trtcb.cli.bench_options import WorkloadFlags, check_folder, check_writable, one_flag_a_limit
from trtcb.cli.engine_flags import EngineFlags
from trtcb.cli.flag_groups import GroupedCommand, with_flag_groups
from trtcb.config_sources import ALIASES
from trtcb.errors import UsageError
from trtcb.executor.config import EngineConfig


@dataclass(frozen=True)
class _Colours:
    title: ClassVar[str] = "Colours"

    red: Annotated[int, typer.Option(help="How red.")] = 3
    blue: Annotated[bool, typer.Option("--blue", help="Whether blue.")] = False


@dataclass(frozen=True)
class _MoreColours(_Colours):
    red: Annotated[int, typer.Option(help="How red, by default more.")] = 30


def test_a_group_becomes_flags_and_comes_back_as_one_value() -> None:
    seen: list[object] = []

    @with_flag_groups
    def paint(what: Annotated[str, typer.Argument()], colours: _MoreColours, times: int = 1) -> None:
        """Paint it."""
        seen.extend([what, colours, times])

    painter = typer.Typer(rich_markup_mode=None)
    painter.command(cls=GroupedCommand)(paint)
    assert CliRunner().invoke(painter, ["door", "--blue", "--times", "2"]).exit_code == 0
    assert seen == ["door", _MoreColours(red=30, blue=True), 2]
    lines = [line.strip() for line in CliRunner().invoke(painter, ["--help"]).output.splitlines()]
    assert lines.index("Arguments:") < lines.index("Options:") < lines.index("Colours:")
    assert "more" in " ".join(lines[lines.index("Colours:") :])


def test_engine_flags_name_every_setting_of_the_engine_but_those_of_files() -> None:
    names = {ALIASES.get(field.name, field.name) for field in fields(EngineFlags)}
    assert names == {field.name for field in fields(EngineConfig)} - {"tenant_weights"}


def test_workload_flags_have_the_workloads_names_and_defaults() -> None:
    flags = WorkloadFlags()
    for field in fields(RandomWorkload):
        if field.name != "request_rate":
            assert getattr(flags, field.name) == field.default, field.name
    assert flags.source(3.0) == RandomWorkload(request_rate=3.0)


@pytest.mark.parametrize("command", ["serve", "throughput", "latency", "policy", "calibrate"])
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--seed" in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--goodput ttft:200 e2el:5000", "--goodput ttft:200 --goodput e2el:5000"),
        (
            "static_batch --goodput=ttft:200 tpot:5 --seed 1",
            "static_batch --goodput=ttft:200 --goodput tpot:5 --seed 1",
        ),
        ("--goodput ttft:200 --goodput tpot:5 e2el:9", "--goodput ttft:200 --goodput tpot:5 --goodput e2el:9"),
        ("--goodput ttft:200 static_batch:num_blocks=9 e2el:9", "--goodput ttft:200 static_batch:num_blocks=9 e2el:9"),
        ("ttft:200 --goodput", "ttft:200 --goodput"),
        ("--seed 1 e2el:9", "--seed 1 e2el:9"),
    ],
)
def test_several_limits_may_follow_one_goodput(words: str, expected: str) -> None:
    assert one_flag_a_limit(words.split()) == expected.split()
    assert one_flag_a_limit(["--goodput", "ttft:200 e2el:9"]) == ["--goodput", "ttft:200 e2el:9"]


def test_what_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    old, link, pipe = tmp_path / "old.json", tmp_path / "link.json", tmp_path / "pipe"
    old.write_text("kept")
    link.symlink_to("nowhere.json")
    os.mkfifo(pipe)
    check_writable(None, old, link, pipe, tmp_path / "new.json", Path("/dev/stdout"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "old.json", "pipe"]
    assert old.read_text() == "kept"


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        (Path("/tmp"), "is a folder: name a file in it"),
        (Path("/proc/x.html"), r"\(No such file or directory\): name another file"),
        (Path("no/folder/x.json"), "there is no folder no/folder; make it"),
        (Path("/tmp") / ("x" * 300), "File name too long"),
    ],
)
def test_what_cannot_be_written_is_found_before_the_run(file: Path, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_writable(file)


def test_a_folder_for_results_may_be_new(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b", "--result-dir")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (Path("/proc"), tmp_path / "file", tmp_path / "file" / "b"):
        with pytest.raises(UsageError, match=r"--result-dir .* takes no files"):
            check_folder(folder, "--result-dir")


TRACE = ("--trace", str(Path(__file__).resolve().parents[2] / "examples" / "traces" / "four-lengths.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        *(
            (("policy", "static_batch", *TRACE, flag, "9"), f"A trace says what arrives when: leave {flag} out")
            for flag in (
                "--num-prompts",
                "--random-input-len",
                "--random-output-len",
                "--random-prefix-len",
                "--random-range-ratio",
                "--output-len-cv",
                "--burstiness",
                "--request-rate",
                "--rates",
            )
        ),
        (("policy", "static_batch", *TRACE, "--repeats", "3"), "the same way every time: leave --repeats out"),
        (("policy", "static_batch", *TRACE, "--seed", "3"), "the same way every time: leave --seed out"),
        (("policy", "static_batch", "--threads", "2"), "leave --threads out"),
        (("policy", "static_batch", "--knee-share", "0.9"), "leave --knee-share out"),
        (("policy", "static_batch", "--knee-width", "0.9"), "leave --knee-width out"),
        (("policy", "static_batch", "--burstiness", "0.5"), "leave --burstiness out"),
        (("policy", "static_batch", "--watermark", "0.05"), "write it as POLICY:watermark=VALUE"),
        (("policy", "static_batch", "--kv-memory=2GiB"), "write it as POLICY:kv_memory=VALUE"),
        (("policy", "static_batch:queue_policy=wfq"), "all requests have one user"),
        (("serve", *TRACE, "--request-rate", "2"), "leave --request-rate out"),
        (("serve", "--burstiness", "2"), "leave --burstiness out"),
        (("serve", "--max-tokens", "9", "--output-len-cv", "2"), "leave --output-len-cv out"),
        (("serve", "--max-tokens", "9", "--random-output-len", "2"), "leave --random-output-len out"),
        (("serve", "--result-dir", "x"), "leave --result-dir out"),
        (("serve", "--base-url", "http://x", "--port", "1"), "leave --port out"),
        (("serve", "--base-url", "127.0.0.1:8123"), "write http://127.0.0.1:8123"),
        (("serve", "--base-url", "ftp://x"), "write http://x"),
        (("throughput", "x.plan", "--input-len", "0"), "--input-len must be from 1"),
        (("throughput", "x.plan", "--default-max-tokens", "9"), "leave --default-max-tokens out"),
        (("latency", "x.plan", "--batch-size", "0"), "--batch-size must be from 1"),
        (("latency", "x.plan", "--output-len", "0"), "--output-len must be from 1"),
    ],
)
def test_what_would_have_no_effect_or_no_meaning_is_one_sentence(arguments: tuple[str, ...], complaint: str) -> None:
    error = CliRunner().invoke(app, list(arguments)).exception
    assert isinstance(error, UsageError)
    assert complaint in str(error)


def test_an_unknown_flag_is_still_unknown() -> None:
    result = CliRunner().invoke(app, ["policy", "static_batch", "--watermrk", "0.05"])
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_names_of_other_engines_are_known_to_policy() -> None:
    words = (
        "--max-num-seqs",
        "3",
        "--max-num-batched-tokens",
        "64",
        "--max-model-len",
        "300",
        "--tokens-per-block",
        "8",
    )
    result = CliRunner().invoke(app, ["policy", "static_batch", "--num-prompts", "2", *words])
    assert result.exit_code == 0, result.exception
