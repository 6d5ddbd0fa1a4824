"""``trtcb bench policy``: scheduling configurations side by side under one workload."""

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from trtcb.cli.bench_options import Goodput, WorkloadFlags, check_writable, parse_slo
from trtcb.cli.flag_groups import with_flag_groups

if TYPE_CHECKING:
    from trtcb.bench.ab import WorkloadSource
    from trtcb.bench.targets import Target
    from trtcb.bench.workload import RandomWorkload


@dataclass(frozen=True)
class MachineFlags:
    """What the configurations are compared on."""

    title: ClassVar[str] = "Machine"

    sim: Annotated[str | None, typer.Option(help="Simulated machine: a YAML file, or 'builtin'. [builtin]")] = None
    plan: Annotated[Path | None, typer.Option(help="Run this plan instead of a simulation.")] = None
    step_time: Annotated[float | None, typer.Option(help="Every simulated step takes this many seconds.")] = None
    check_contents: Annotated[
        bool, typer.Option("--check-contents", help="Keep token ids in the simulated KV blocks and read them back.")
    ] = False

    def target(self) -> "Target":
        """Return the machine."""
        from dataclasses import replace

        from trtcb.bench.targets import PlanTarget, SimTarget
        from trtcb.errors import UsageError
        from trtcb.executor.step_time import StepTime

        if self.plan is not None:
            if self.sim is not None or self.step_time is not None or self.check_contents:
                raise UsageError("--plan runs a real engine: leave --sim, --step-time and --check-contents out.")
            return PlanTarget(f"plan {self.plan.name}", self.plan, {})
        target = replace(SimTarget.load(self.sim or "builtin"), check_contents=self.check_contents)
        if self.step_time is None:
            return target
        return replace(target, step_time=StepTime(self.step_time), description=f"sim, {self.step_time:g} s a step")


@dataclass(frozen=True)
class LimitFlags:
    """Settings of all configurations, unless one has its own."""

    title: ClassVar[str] = "For all configurations"

    max_batch_size: Annotated[int | None, typer.Option(help="Requests a step.")] = None
    max_num_tokens: Annotated[int | None, typer.Option(help="Tokens a step.")] = None
    max_seq_len: Annotated[int | None, typer.Option(help="Prompt and output.")] = None
    block_size: Annotated[int | None, typer.Option(help="Tokens a KV block.")] = None
    num_blocks: Annotated[int | None, typer.Option(help="KV pool in blocks.")] = None

    def given(self) -> dict[str, Any]:
        """Return those that were given."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ReportFlags:
    """What is shown, and where it is kept."""

    title: ClassVar[str] = "Results"

    goodput: Goodput = None
    requests: Annotated[bool, typer.Option("--requests", help="Also list each request's times.")] = False
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a report with plots to this file.")] = None


@with_flag_groups
def bench_policy(
    setups: Annotated[
        list[str],
        typer.Argument(
            help="Configurations, POLICY[:setting=value,...]; settings are those of serve.", metavar="SETUP"
        ),
    ],
    request_rate: Annotated[
        float, typer.Option("--request-rate", "--rate", help="Requests a second; inf sends all at once.")
    ] = float("inf"),
    rates: Annotated[
        str | None, typer.Option(help="Also run at these rates, such as 2,4,8, and show the frontier.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Workloads to draw; over 1, intervals are shown.")] = 1,
    *,
    machine: MachineFlags,
    workload: WorkloadFlags,
    limits: LimitFlags,
    report: ReportFlags,
) -> None:
    """Compare configurations under the same arrivals."""
    from functools import partial

    from trtcb.bench.ab import compare
    from trtcb.bench.report import html_report
    from trtcb.bench.table import frontier_rows, per_request, rows, text_table, to_json
    from trtcb.bench.targets import Setup

    check_writable(report.json_file, report.html_file)
    source = workload.source(request_rate)
    target = machine.target()
    common = {**target.engine, **limits.given()}
    num_requests = len(source.generate(workload.seed))
    run = partial(
        compare,
        [Setup.parse(text, common, num_requests) for text in setups],
        target,
        slo=parse_slo(report.goodput),
        seed=workload.seed,
        repeats=repeats,
        on_run=_report_run,
        max_concurrency=workload.max_concurrency,
    )
    sources = _at_rates(source, rates)
    comparison = run(source)
    frontier = [run(source) for source in sources]
    print(f"{comparison.target}; {comparison.num_requests} requests, seed {workload.seed}, {repeats} repeats\n")
    print(text_table(rows(comparison)))
    if frontier:
        print("\nOutput tokens/s / TTFT p95 (ms) / requests within the SLO (%):\n")
        print(text_table(frontier_rows([source.request_rate for source in sources], frontier)))
    if report.requests:
        print("\nQueue wait / first token / end, in seconds from arrival:\n")
        print(text_table(per_request(comparison)))
    if report.json_file is not None:
        data = {**to_json(comparison), "frontier": [to_json(point) for point in frontier]}
        report.json_file.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    if report.html_file is not None:
        report.html_file.write_text(html_report(comparison, _command(), frontier), "utf-8")


def _at_rates(source: "WorkloadSource", rates: str | None) -> "list[RandomWorkload]":
    """Return the workload at each of these rates, in ascending order."""
    from dataclasses import replace

    from trtcb.bench.workload import RandomWorkload
    from trtcb.errors import UsageError

    if rates is None:
        return []
    if not isinstance(source, RandomWorkload):
        raise UsageError("A trace has its own rate: leave --rates out.")
    try:
        values = sorted({float(rate) for rate in rates.split(",")})
    except ValueError:
        raise UsageError(f"--rates '{rates}' is no list of numbers: write them as 2,4,8.") from None
    return [replace(source, request_rate=rate) for rate in values]


def _report_run(label: str, repeat: int) -> None:
    print(f"running {label}, repeat {repeat + 1}", file=sys.stderr)


def _command() -> str:
    import shlex

    return shlex.join(["trtcb", *sys.argv[1:]])
