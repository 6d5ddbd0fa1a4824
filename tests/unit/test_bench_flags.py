"""Flags of ``trtcb bench``: groups and their help."""

from dataclasses import dataclass, fields
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from trtcb.bench.workload import RandomWorkload
from trtcb.cli.bench import app
from trtcb.cli.bench_options import WorkloadFlags
from trtcb.cli.engine_flags import EngineFlags
from trtcb.cli.flag_groups import GroupedCommand, with_flag_groups
from trtcb.config_sources import ALIASES
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
