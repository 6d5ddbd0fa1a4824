"""Flags that the benchmarks share: the workload, the limits it is judged by, and the files that results go to."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from trtcb.cli.flag_groups import GroupedCommand

if TYPE_CHECKING:
    from trtcb.bench.ab import WorkloadSource
    from trtcb.bench.metrics import Slo

_LIMIT = re.compile(r"[a-z0-9]+:[0-9.]+")


@dataclass(frozen=True)
class WorkloadFlags:
    """What arrives when, under the names of ``vllm bench serve``."""

    title: ClassVar[str] = "Workload"

    num_prompts: Annotated[int, typer.Option(help="Requests to send.")] = 1000
    burstiness: Annotated[float, typer.Option(help="1 is Poisson; below 1, arrivals come in bursts.")] = 1.0
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Unfinished requests at most.")] = None
    random_input_len: Annotated[int, typer.Option(help="Mean prompt length in tokens.")] = 128
    random_output_len: Annotated[int, typer.Option(help="Mean output length in tokens.")] = 128
    random_range_ratio: Annotated[float, typer.Option(help="Lengths are uniform within +- this share.")] = 0.0
    random_prefix_len: Annotated[int, typer.Option(help="Tokens that all prompts begin with, extra.")] = 0
    output_len_cv: Annotated[float, typer.Option(help="Log-normal output lengths of this variation.")] = 0.0
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Output length clients declare; answers are cut there. [the true one]")
    ] = None
    trace: Annotated[Path | None, typer.Option(help="JSONL with arrival_s, prompt_len, output_len a line.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workload, of the first one if repeated.")] = 0

    def source(self, request_rate: float) -> "WorkloadSource":
        """Return the workload; a trace has its own rate."""
        from trtcb.bench.workload import RandomWorkload, TraceWorkload

        if self.trace is not None:
            return TraceWorkload(self.trace, self.max_tokens)
        names = {field.name for field in fields(RandomWorkload)} - {"request_rate"}
        return RandomWorkload(request_rate=request_rate, **{name: getattr(self, name) for name in names})

    def check(self, context: typer.Context, *, has_rate: bool) -> None:
        """Raise for flags that would have no effect. ``has_rate``: requests come at a rate, not all at once."""
        if self.trace is not None:
            random = ("num_prompts", "burstiness", "output_len_cv")
            lengths = tuple(field.name for field in fields(self) if field.name.startswith("random_"))
            refuse_given(context, "A trace says what arrives when", "request_rate", "rates", *random, *lengths)
        elif not has_rate:
            refuse_given(context, "Without --request-rate everything arrives at once", "burstiness")


Goodput = Annotated[
    list[str] | None, typer.Option(help="Limits in ms, such as ttft:200 e2el:5000; of ttft, tpot and e2el.")
]


class BenchCommand(GroupedCommand):
    """A command with ``--goodput``, which takes several limits in a row, as in vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give each limit a flag of its own, which is what Typer understands."""
        return super().parse_args(ctx, one_flag_a_limit(args))


def one_flag_a_limit(words: Sequence[str]) -> list[str]:
    """Repeat ``--goodput`` before each limit that follows another one."""
    found: list[str] = []
    may_follow = False
    for word in words:
        is_limit = _LIMIT.fullmatch(word) is not None
        if may_follow and is_limit and found[-1] != "--goodput":
            found.append("--goodput")
        found.append(word)
        may_follow = word.split("=")[0] == "--goodput" or (may_follow and is_limit)
    return found


def parse_slo(goodput: list[str] | None) -> "Slo":
    """Read the limits of ``--goodput``."""
    from trtcb.bench.metrics import Slo

    return Slo.parse(goodput or [])


def is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter of the command was written on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_given(context: typer.Context, why: str, *names: str) -> None:
    """Raise if one of these parameters was given, because it would have no effect."""
    from trtcb.errors import UsageError

    for parameter in context.command.params:
        if parameter.name in names and is_given(context, parameter.name):
            raise UsageError(f"{why}: leave {parameter.opts[0]} out.")


def check_writable(*files: Path | None) -> None:
    """Raise ``UsageError`` for a file that cannot be written, before a long run and not after it; changes nothing."""
    from trtcb.errors import UsageError

    for file in files:
        if file is None:
            continue
        if os.path.isdir(file):
            raise UsageError(f"{file} cannot be written, because it is a folder: name a file in it.")
        if not os.path.isdir(file.parent):
            raise UsageError(f"{file} cannot be written: there is no folder {file.parent}; make it, or name another.")
        try:
            _try_to_write(file)
        except OSError as error:
            raise UsageError(f"{file} cannot be written ({error.strerror}): name another file.") from None


def check_folder(folder: Path, flag: str) -> None:
    """Raise ``UsageError`` unless files can be put into ``folder``, which may not exist yet."""
    import tempfile

    from trtcb.errors import UsageError

    asked = folder.absolute()
    there = next(parent for parent in (asked, *asked.parents) if os.path.exists(parent))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UsageError(f"{flag} {folder} takes no files ({error.strerror}): name another folder.") from None


def write_results(file: Path | None, text: str) -> None:
    """Write a file, and say so."""
    if file is not None:
        file.write_text(text, "utf-8")
        print(f"wrote {file}", file=sys.stderr)


def _try_to_write(file: Path) -> None:
    """Open a file as writing it will. Permissions alone do not tell: some file systems take no files from anybody."""
    if file.exists():
        if file.is_file():  # a pipe would notice
            file.open("ab").close()
        return
    made = Path(os.path.realpath(file))  # of a link that leads nowhere yet, what it leads to
    made.open("xb").close()
    made.unlink()
