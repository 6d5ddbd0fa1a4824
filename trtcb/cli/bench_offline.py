"""``trtcb bench throughput`` and ``trtcb bench latency``: a plan in this process, without a server."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtcb.cli.bench_options import check_writable, write_results
from trtcb.cli.engine_flags import EngineFlags
from trtcb.cli.flag_groups import with_flag_groups

if TYPE_CHECKING:
    from trtcb.bench.step_breakdown import StepBreakdown

PlanArgument = Annotated[Path, typer.Argument(help="The plan to measure.", show_default=False)]
OutputJson = Annotated[Path | None, typer.Option("--output-json", "--json", help="Write all numbers to this file.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random prompts.")]


@with_flag_groups
def bench_throughput(
    plan: PlanArgument,
    num_prompts: Annotated[int, typer.Option(help="Requests to answer.")] = 1000,
    input_len: Annotated[int, typer.Option("--input-len", "--random-input-len", help="Prompt tokens of each.")] = 128,
    output_len: Annotated[
        int,
        typer.Option("--output-len", "--random-output-len", help="Output tokens of each; end tokens do not count."),
    ] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths are uniform within +- this share.")] = 0.0,
    prefix_len: Annotated[
        int, typer.Option("--prefix-len", "--random-prefix-len", help="Tokens that all prompts begin with, extra.")
    ] = 0,
    seed: Seed = 0,
    output_json: OutputJson = None,
    *,
    engine: EngineFlags,
) -> None:
    """Answer many requests at once; flags are named as in `vllm bench throughput`."""
    from trtcb.bench.offline import check_lengths, measure_throughput
    from trtcb.bench.workload import RandomWorkload, check_count
    from trtcb.cli.bench_progress import progress_bar
    from trtcb.executor.llm import LLM
    from trtcb.executor.request import FinishReason
    from trtcb.executor.stats import StepStats

    check_count("--input-len", input_len, 1)
    check_count("--output-len", output_len, 1)
    check_count("--prefix-len", prefix_len, 0)
    source = RandomWorkload(
        num_prompts=num_prompts,
        random_input_len=input_len,
        random_output_len=output_len,
        random_range_ratio=random_range_ratio,
        random_prefix_len=prefix_len,
    )
    check_writable(output_json)
    settings = _settings(engine, plan)
    check_lengths(source, seed, settings["max_seq_len"])
    is_warm = False

    def on_step(stats: StepStats) -> None:
        if is_warm:
            advance(
                sum(request.reason is FinishReason.LENGTH for request in stats.finished)
            )  # Ctrl-C aborts the others

    def on_warm() -> None:
        nonlocal is_warm
        is_warm = True

    with progress_bar("requests", num_prompts) as advance, LLM(plan, **settings, on_step=on_step) as llm:
        throughput = measure_throughput(llm, source, seed, on_warm)
    print(throughput)
    ran = {"plan": str(plan), "workload": str(source), "seed": seed, "engine": settings}
    write_results(output_json, json.dumps({**throughput.to_json(), **ran}, indent=1) + "\n")


@with_flag_groups
def bench_latency(
    plan: PlanArgument,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each request.")] = 32,
    output_len: Annotated[int, typer.Option(help="Output tokens of each; end tokens do not count.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Requests of a batch.")] = 8,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before the clock starts.")] = 10,
    num_iters: Annotated[int, typer.Option(min=1, help="Batches to measure.")] = 30,
    seed: Seed = 0,
    output_json: OutputJson = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Tell where the time of prefill and decode steps goes; needs whole_step.")
    ] = False,
    *,
    engine: EngineFlags,
) -> None:
    """Answer one batch again and again; flags are named as in `vllm bench latency`."""
    from trtcb.bench.offline import AfterWarmUp, check_batch, check_lengths, measure_latency
    from trtcb.bench.profiled_llm import empty_breakdown, open_profiled
    from trtcb.bench.token_times import TokenTimes
    from trtcb.bench.workload import RandomWorkload, check_count
    from trtcb.cli.bench_progress import progress_bar
    from trtcb.executor.llm import LLM

    counts = {"--batch-size": batch_size, "--input-len": input_len, "--output-len": output_len}
    for flag, count in counts.items():
        check_count(flag, count, 1)
    batch = RandomWorkload(num_prompts=batch_size, random_input_len=input_len, random_output_len=output_len)
    check_writable(output_json)
    settings = _settings(engine, plan)
    check_batch(batch, settings["max_batch_size"])
    check_lengths(batch, seed, settings["max_seq_len"])
    times = TokenTimes()
    breakdown = empty_breakdown(plan) if profile else None
    observers = [times.step] if breakdown is None else [times.step, breakdown.step]
    on_step = AfterWarmUp(num_iters_warmup * batch_size, *observers)
    opened = (
        LLM(plan, on_step=on_step, **settings)
        if breakdown is None
        else open_profiled(plan, breakdown, on_step, **settings)
    )
    with opened as llm, progress_bar("batches", num_iters_warmup + num_iters) as advance:
        latencies = measure_latency(
            llm,
            batch,
            num_warmups=num_iters_warmup,
            num_iters=num_iters,
            seed=seed,
            on_iter=advance,
        )
    print(f"{latencies}\n\n{times}")
    report = {**latencies.to_json(), **times.to_json()}
    if breakdown is not None:
        report["profile"] = _show(breakdown)
    ran = {"plan": str(plan), "workload": str(batch), "seed": seed, "engine": settings}
    write_results(output_json, json.dumps({**report, **ran}, indent=1) + "\n")


def _show(breakdown: "StepBreakdown") -> dict[str, Any]:
    """Measure what this machine can do, print where the time went, and return it as JSON values."""
    from concurrent.futures import ThreadPoolExecutor

    from trtcb.bench.machine_limits import MachineLimits, read_bandwidth
    from trtcb.plugins.cpu.peak import peak_flops

    with ThreadPoolExecutor(1) as thread:  # its team of OpenMP workers ends with it, see CpuRuntime
        limits = MachineLimits(thread.submit(read_bandwidth).result(), thread.submit(peak_flops).result())
    phases = breakdown.phases()
    for phase in phases:
        print(f"\n{phase.text(limits)}")
    print(f"\nlimits of this machine, measured now: {limits}")
    return {"limits": asdict(limits), **{phase.name: phase.to_json(limits) for phase in phases}}


def _settings(engine: EngineFlags, plan: Path) -> dict[str, Any]:
    from trtcb.errors import UsageError

    if engine.default_max_tokens is not None:
        raise UsageError("Every request here has a limit of its own: leave --default-max-tokens out.")
    return engine.settings(plan)
