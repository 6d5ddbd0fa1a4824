"""``trtcb bench policy``: scheduling configurations side by side under one workload."""

import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from trtcb.cli.bench_options import (
    BenchCommand,
    Goodput,
    WorkloadFlags,
    check_writable,
    parse_slo,
    refuse_given,
    write_results,
)
from trtcb.cli.flag_groups import with_flag_groups
from trtcb.config_sources import ALIASES
from trtcb.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trtcb.bench.ab import Comparison, WorkloadSource
    from trtcb.bench.knee import Criterion, Knee
    from trtcb.bench.metrics import RunResult
    from trtcb.bench.targets import Setup, Target


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
    check_tokens: Annotated[
        int, typer.Option(min=0, help="Serve so many requests alone as well, and compare every token.")
    ] = 0

    def check(self, context: typer.Context, *, is_trace: bool) -> None:
        """Raise for flags that would have no effect on this machine."""
        if self.plan is not None:
            return
        refuse_given(context, "A simulated machine has no CPU threads", "threads")
        if is_trace and not self.check_contents:
            refuse_given(context, "A simulated machine runs a trace the same way every time", "repeats", "seed")

    def target(self) -> "Target":
        """Return the machine."""
        from dataclasses import replace

        from trtcb.bench.targets import PlanTarget, SimTarget
        from trtcb.executor.step_time import MAX_COEFFICIENTS_S, StepTime
        from trtcb.plan import Plan

        if self.plan is not None:
            if self.sim is not None or self.step_time is not None or self.check_contents:
                raise UsageError("--plan runs a real engine: leave --sim, --step-time and --check-contents out.")
            Plan.open(self.plan, verify="header").close()  # what is wrong with it shows before anything runs
            return PlanTarget(f"plan {self.plan.name}", self.plan, {})
        if self.check_tokens and not self.check_contents:
            raise UsageError("A simulated model has tokens only with --check-contents: add it to --check-tokens.")
        target = replace(SimTarget.load(self.sim or "builtin"), check_contents=self.check_contents)
        if self.step_time is None:
            return target
        if not 0 < self.step_time <= MAX_COEFFICIENTS_S:
            raise UsageError(
                f"--step-time must be above 0 and at most {MAX_COEFFICIENTS_S:g} seconds, not {self.step_time:g}."
            )
        return replace(target, step_time=StepTime(self.step_time), description=f"sim, {self.step_time:g} s a step")


@dataclass(frozen=True)
class LimitFlags:
    """Settings of all configurations, unless one has its own."""

    title: ClassVar[str] = "For all configurations"

    max_batch_size: Annotated[
        int | None, typer.Option("--max-batch-size", "--max-num-seqs", help="Requests a step.")
    ] = None
    max_num_tokens: Annotated[
        int | None, typer.Option("--max-num-tokens", "--max-num-batched-tokens", help="Tokens a step.")
    ] = None
    max_seq_len: Annotated[int | None, typer.Option("--max-seq-len", "--max-model-len", help="Prompt and output.")] = (
        None
    )
    block_size: Annotated[int | None, typer.Option("--block-size", "--tokens-per-block", help="Tokens a KV block.")] = (
        None
    )
    num_blocks: Annotated[int | None, typer.Option(help="KV pool in blocks.")] = None
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the engine, with --plan.")] = None

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


@dataclass(frozen=True)
class RateFlags:
    """At which rates requests arrive."""

    title: ClassVar[str] = "Rate"

    request_rate: Annotated[
        str,
        typer.Option(
            "--request-rate", "--rate", help="Requests a second; inf: all at once; auto: the highest knee of them all."
        ),
    ] = "inf"
    rates: Annotated[
        str | None, typer.Option(help="Also run at these rates, such as 2,4,8, and show the frontier.")
    ] = None
    knee_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="With auto: share of requests within --goodput, or rate kept up.")
    ] = 0.95
    knee_width: Annotated[float, typer.Option(min=0.001, help="With auto: how well a knee is known, relative.")] = 0.1

    @property
    def is_auto(self) -> bool:
        """Whether the rate is to be found."""
        return self.request_rate == "auto"

    @property
    def value(self) -> float:
        """The rate; any number stands for one that is to be found."""
        try:
            return 1.0 if self.is_auto else float(self.request_rate)
        except ValueError:
            raise UsageError(f"--request-rate '{self.request_rate}': write a number, inf or auto.") from None

    def others(self) -> list[float]:
        """Return the rates to run besides, in ascending order."""
        try:
            return sorted({float(rate) for rate in self.rates.split(",")}) if self.rates is not None else []
        except ValueError:
            raise UsageError(f"--rates '{self.rates}' is no list of numbers: write them as 2,4,8.") from None

    def check(self, context: typer.Context, workload: WorkloadFlags) -> None:
        """Raise for what does not go together."""
        has_rate = self.is_auto or self.value < float("inf") or any(rate < float("inf") for rate in self.others())
        workload.check(context, has_rate=has_rate)
        if not self.is_auto:
            refuse_given(context, "Only --request-rate auto searches a knee", "knee_share", "knee_width")
        if self.is_auto and self.rates is not None:
            raise UsageError("--request-rate auto chooses its rates: leave --rates out.")
        if self.is_auto and workload.max_concurrency is not None:
            raise UsageError("--max-concurrency sets the pace itself: leave it out, or --request-rate auto.")


class PolicyCommand(BenchCommand):
    """``trtcb bench policy``: knows which flags of serve belong into a SETUP."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raise an error that names the fix for a flag of serve."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Typer keeps its NoSuchOption to itself, and where it is differs between versions.
            name = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
            if type(error).__name__ == "NoSuchOption" and ALIASES.get(name, name) in _setup_settings():
                raise UsageError(
                    f"--{name.replace('_', '-')} is a setting of a configuration: write it as POLICY:{name}=VALUE."
                ) from None
            raise


def _setup_settings() -> "tuple[str, ...]":
    from trtcb.executor.config import EngineConfig

    return tuple(field.name for field in fields(EngineConfig))


@with_flag_groups
def bench_policy(
    context: typer.Context,
    setups: Annotated[
        list[str],
        typer.Argument(
            help="Configurations, POLICY[:setting=value,...]; settings are those of serve.", metavar="SETUP"
        ),
    ],
    repeats: Annotated[int, typer.Option(min=1, help="Workloads to draw; over 1, intervals are shown.")] = 1,
    *,
    machine: MachineFlags,
    rate: RateFlags,
    workload: WorkloadFlags,
    limits: LimitFlags,
    report: ReportFlags,
) -> None:
    """Compare configurations under the same arrivals."""
    from functools import partial

    from trtcb.bench.ab import LoadPoint, compare
    from trtcb.bench.knee import Criterion, KneeSearch, merged_points
    from trtcb.bench.policy_report import PolicyReport
    from trtcb.bench.targets import Setup

    check_writable(report.json_file, report.html_file)
    rate.check(context, workload)
    machine.check(context, is_trace=workload.trace is not None)
    at_rate = workload.source
    source = at_rate(rate.value)
    for other in rate.others():
        at_rate(other)  # what is wrong with it shows before anything runs
    target = machine.target()
    drawn = source.generate(workload.seed)
    parsed = [Setup.parse(text, {**target.engine, **limits.given()}, len(drawn)) for text in setups]
    for setup in parsed:
        setup.check_effect(drawn, is_simulated=machine.plan is None)
    slo = parse_slo(report.goodput)
    run = partial(
        compare,
        target=target,
        slo=slo,
        seed=workload.seed,
        repeats=repeats,
        on_run=_report_run,
        on_done=_report_done,
        max_concurrency=workload.max_concurrency,
    )
    criterion = Criterion.of(bool(slo.limits), rate.knee_share)
    knees: list[Knee] = []
    with _what_was_finished(knees, criterion):
        if rate.is_auto:
            for setup in parsed:
                measure = partial(_measure, run, setup, at_rate)
                knees.append(KneeSearch(measure, criterion, rate.knee_width, partial(_report_point, criterion)).run())
            source = at_rate(_highest(knees, criterion))
        comparison = run(parsed, source=source, num_checked=machine.check_tokens)
    with _what_was_finished(knees, criterion, comparison):
        others = [LoadPoint(other, run(parsed, source=at_rate(other))) for other in rate.others()]
    found = PolicyReport(comparison, merged_points(knees) or others, knees, criterion)
    print(found.text(with_requests=report.requests))
    write_results(report.json_file, json.dumps(found.to_json(), indent=1) + "\n")
    write_results(report.html_file, found.html(_command()))


@contextmanager
def _what_was_finished(
    knees: "list[Knee]", criterion: "Criterion", comparison: "Comparison | None" = None
) -> "Iterator[None]":
    """At Ctrl-C, print the tables of what was finished before; the interrupt goes on."""
    from trtcb.bench.ab import Interrupted
    from trtcb.bench.policy_report import PolicyReport
    from trtcb.bench.table import knee_rows, text_table

    try:
        yield
    except KeyboardInterrupt as stop:
        finished = comparison or (stop.finished if isinstance(stop, Interrupted) else None)
        if finished is not None:
            print(PolicyReport(finished, (), knees, criterion).text(with_requests=False))
        elif knees:
            print(text_table(knee_rows(knees, criterion)))
        raise


def _measure(
    run: "Callable[..., Comparison]", setup: "Setup", at_rate: "Callable[[float], WorkloadSource]", rate: float
) -> "Comparison":
    from trtcb.bench.ab import Interrupted

    try:
        return run([setup], source=at_rate(rate), on_run=lambda *_: None, on_done=lambda *_: None)
    except Interrupted:  # a rate of the search that is half done tells nothing
        raise KeyboardInterrupt from None


def _highest(knees: "Sequence[Knee]", criterion: "Criterion") -> float:
    from trtcb.errors import TrtcbError

    highest = max(knee.rate for knee in knees)
    if not highest:
        raise TrtcbError(
            f"No configuration has a knee: even at {knees[0].broken_at:.2g} requests/s fewer than "
            f"{100 * criterion.share:g} % {criterion.title}; allow more in --goodput, or lower --knee-share."
        )
    return highest


def _report_point(criterion: "Criterion", label: str, rate: float, share: float, holds: bool) -> None:
    from trtcb.bench.table import shown_rate

    verdict = "holds" if holds else "broken"
    print(f"{label} at {shown_rate(rate)}: {100 * share:.1f} % {criterion.title}, {verdict}", file=sys.stderr)


def _report_run(label: str, repeat: int) -> None:
    print(f"running {label}, repeat {repeat + 1}", file=sys.stderr)


def _report_done(label: str, repeat: int, run: "RunResult") -> None:
    from trtcb.bench.table import counted, shown_number

    count, rate = counted(round(run.values["completed"]), "request"), shown_number(run.values["output_tok_s"])
    print(f"{label}, repeat {repeat + 1}: {count}, {rate} output tokens/s", file=sys.stderr)


def _command() -> str:
    import shlex

    return shlex.join(["trtcb", *sys.argv[1:]])
