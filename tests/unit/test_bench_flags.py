"""Flags of ``trtcb bench``: groups, their help, and that they stay those of ``trtcb serve``."""

import inspect
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from trtcb.bench.workload import RandomWorkload
from trtcb.cli.bench import app
from trtcb.cli.bench_options import EngineFlags, WorkloadFlags
from trtcb.cli.flag_groups import GroupedCommand, with_flag_groups
from trtcb.cli.serve import serve
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


def test_engine_flags_are_those_of_serve() -> None:
    mine, theirs = get_type_hints(EngineFlags, include_extras=True), get_type_hints(serve, include_extras=True)
    names = {name for name in inspect.signature(serve).parameters if ALIASES.get(name, name) in _engine_settings()}
    assert {field.name for field in fields(EngineFlags)} == names
    for name in names:
        assert mine[name].__metadata__[0].param_decls == theirs[name].__metadata__[0].param_decls, name
        assert mine[name].__origin__ == theirs[name].__origin__, name


def _engine_settings() -> set[str]:
    return {field.name for field in fields(EngineConfig)}


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
