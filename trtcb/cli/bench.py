"""``trtcb bench``: compare scheduling configurations under one workload, and fit a simulated machine to a real one."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trtcb.bench.ab import WorkloadSource
    from trtcb.bench.targets import Target
    from trtcb.bench.workload import RandomWorkload

app = typer.Typer(help="Compare scheduling configurations, and calibrate the simulated machine.", no_args_is_help=True)


@app.command("policy")
def bench_policy(
    setups: Annotated[
        list[str],
        typer.Argument(
            help="Configurations, POLICY[:setting=value,...]; settings are those of serve.", metavar="SETUP"
        ),
    ],
    sim: Annotated[str | None, typer.Option(help="Simulated machine: a YAML file, or 'builtin'. [builtin]")] = None,
    plan: Annotated[Path | None, typer.Option(help="Run this plan instead of a simulation.")] = None,
    step_time: Annotated[float | None, typer.Option(help="Every simulated step takes this many seconds.")] = None,
    check_contents: Annotated[
        bool, typer.Option("--check-contents", help="Keep token ids in the simulated KV blocks and read them back.")
    ] = False,
    max_batch_size: Annotated[int | None, typer.Option(help="Requests a step, for all configurations.")] = None,
    max_num_tokens: Annotated[int | None, typer.Option(help="Tokens a step, for all configurations.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Prompt and output, for all configurations.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens a KV block, for all configurations.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV pool in blocks, for all configurations.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests to send.")] = 1000,
    request_rate: Annotated[float, typer.Option(help="Requests a second; inf sends all at once.")] = float("inf"),
    rates: Annotated[
        str | None, typer.Option(help="Also run at these rates, such as 2,4,8, and show the frontier.")
    ] = None,
    burstiness: Annotated[float, typer.Option(help="1 is Poisson; below 1, arrivals come in bursts.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Unfinished requests at most.")] = None,
    random_input_len: Annotated[int, typer.Option(help="Mean prompt length in tokens.")] = 128,
    random_output_len: Annotated[int, typer.Option(help="Mean output length in tokens.")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths are uniform within +- this share.")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="Tokens that all prompts begin with, extra.")] = 0,
    output_len_cv: Annotated[float, typer.Option(help="Log-normal output lengths of this variation.")] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Output length clients declare. [the true one]")] = None,
    trace: Annotated[Path | None, typer.Option(help="JSONL with arrival_s, prompt_len, output_len a line.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first repeat's workload.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Workloads to draw; over 1, intervals are shown.")] = 1,
    goodput: Annotated[list[str] | None, typer.Option(help="Limits such as 'ttft:200 e2el:5000', in ms.")] = None,
    requests: Annotated[bool, typer.Option("--requests", help="Also list each request's times.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a report with plots to this file.")] = None,
) -> None:
    """Compare configurations under the same arrivals."""
    from functools import partial

    from trtcb.bench.ab import compare
    from trtcb.bench.metrics import Slo
    from trtcb.bench.report import html_report
    from trtcb.bench.table import frontier_rows, per_request, rows, text_table, to_json
    from trtcb.bench.targets import Setup
    from trtcb.bench.workload import RandomWorkload, TraceWorkload

    _check_writable(json_file, html_file)
    source: WorkloadSource
    if trace is not None:
        source = TraceWorkload(trace, max_tokens)
    else:
        source = RandomWorkload(
            num_prompts=num_prompts,
            request_rate=request_rate,
            burstiness=burstiness,
            random_input_len=random_input_len,
            random_output_len=random_output_len,
            random_range_ratio=random_range_ratio,
            random_prefix_len=random_prefix_len,
            output_len_cv=output_len_cv,
            max_tokens=max_tokens,
        )
    target = _target(sim, plan, step_time, check_contents)
    limits = {
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "max_seq_len": max_seq_len,
        "block_size": block_size,
        "num_blocks": num_blocks,
    }
    common = {**target.engine, **{name: value for name, value in limits.items() if value is not None}}
    num_requests = len(source.generate(seed))
    run = partial(
        compare,
        [Setup.parse(text, common, num_requests) for text in setups],
        target,
        slo=Slo.parse(goodput or []),
        seed=seed,
        repeats=repeats,
        on_run=_report_run,
        max_concurrency=max_concurrency,
    )
    sources = _at_rates(source, rates)
    comparison = run(source)
    frontier = [run(source) for source in sources]
    print(f"{comparison.target}; {comparison.num_requests} requests, seed {seed}, {repeats} repeats\n")
    print(text_table(rows(comparison)))
    if frontier:
        print("\nOutput tokens/s / TTFT p95 (ms) / requests within the SLO (%):\n")
        print(text_table(frontier_rows([source.request_rate for source in sources], frontier)))
    if requests:
        print("\nQueue wait / first token / end, in seconds from arrival:\n")
        print(text_table(per_request(comparison)))
    if json_file is not None:
        report = {**to_json(comparison), "frontier": [to_json(point) for point in frontier]}
        json_file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    if html_file is not None:
        html_file.write_text(html_report(comparison, _command(), frontier), "utf-8")


@app.command("calibrate")
def calibrate(
    plan: Annotated[Path, typer.Argument(help="The plan to measure.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="YAML file to write, for --sim.")] = Path("sim.yaml"),
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests to measure with.")] = 48,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workload.")] = 0,
) -> None:
    """Fit the simulated machine to a plan: seconds of a step by tokens, sequences and context."""
    from trtcb.bench.calibration import calibrate_plan
    from trtcb.cli.plan_path import plan_path

    calibration = calibrate_plan(plan_path(plan, None), num_prompts=num_prompts, seed=seed)
    output.write_text(calibration.to_yaml(), "utf-8")
    print(calibration.summary())
    print(f"wrote {output}")


def _target(sim: str | None, plan: Path | None, step_time: float | None, check_contents: bool) -> "Target":
    from dataclasses import replace

    from trtcb.bench.targets import PlanTarget, SimTarget
    from trtcb.cli.plan_path import plan_path
    from trtcb.errors import UsageError
    from trtcb.executor.step_time import StepTime

    if plan is not None:
        if sim is not None or step_time is not None or check_contents:
            raise UsageError("--plan runs a real engine: leave --sim, --step-time and --check-contents out.")
        path = plan_path(plan, None)
        return PlanTarget(f"plan {path.name}", path, {})
    target = replace(SimTarget.load(sim or "builtin"), check_contents=check_contents)
    if step_time is None:
        return target
    return replace(target, step_time=StepTime(step_time), description=f"sim, {step_time:g} s a step")


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


def _check_writable(*files: Path | None) -> None:
    """Find out before a long run, not after it."""
    from trtcb.errors import UsageError

    for file in files:
        if file is not None and not file.parent.is_dir():
            raise UsageError(f"{file} cannot be written: there is no folder {file.parent}.")


def _report_run(label: str, repeat: int) -> None:
    print(f"running {label}, repeat {repeat + 1}", file=sys.stderr)


def _command() -> str:
    import shlex

    return shlex.join(["trtcb", *sys.argv[1:]])
