"""Flags that the benchmarks share: the workload, and the limits it is judged by."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

if TYPE_CHECKING:
    from trtcb.bench.ab import WorkloadSource
    from trtcb.bench.metrics import Slo


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
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Output length clients declare. [the true one]")] = None
    trace: Annotated[Path | None, typer.Option(help="JSONL with arrival_s, prompt_len, output_len a line.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workload, of the first one if repeated.")] = 0

    def source(self, request_rate: float) -> "WorkloadSource":
        """Return the workload; a trace has its own rate."""
        from trtcb.bench.workload import RandomWorkload, TraceWorkload

        if self.trace is not None:
            return TraceWorkload(self.trace, self.max_tokens)
        names = {field.name for field in fields(RandomWorkload)} - {"request_rate"}
        return RandomWorkload(request_rate=request_rate, **{name: getattr(self, name) for name in names})


Goodput = Annotated[list[str] | None, typer.Option(help="Limits such as 'ttft:200 e2el:5000', in ms.")]


def parse_slo(goodput: list[str] | None) -> "Slo":
    """Read the limits of ``--goodput``."""
    from trtcb.bench.metrics import Slo

    return Slo.parse(goodput or [])


def check_writable(*files: Path | None) -> None:
    """Find out before a long run, not after it."""
    from trtcb.errors import UsageError

    for file in files:
        if file is not None and not file.parent.is_dir():
            raise UsageError(f"{file} cannot be written: there is no folder {file.parent}.")
