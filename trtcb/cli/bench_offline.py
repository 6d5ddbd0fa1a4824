"""``trtcb bench throughput`` and ``trtcb bench latency``: a plan in this process, without a server."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from trtcb.cli.bench_options import check_writable
from trtcb.cli.engine_flags import EngineFlags
from trtcb.cli.flag_groups import with_flag_groups

PlanArgument = Annotated[Path, typer.Argument(help="The plan to measure.", show_default=False)]
OutputJson = Annotated[Path | None, typer.Option("--output-json", "--json", help="Write all numbers to this file.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random prompts.")]


@with_flag_groups
def bench_throughput(
    plan: PlanArgument,
    num_prompts: Annotated[int, typer.Option(help="Requests to answer.")] = 1000,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each.")] = 128,
    output_len: Annotated[int, typer.Option(help="Output tokens of each; end tokens do not count.")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths are uniform within +- this share.")] = 0.0,
    prefix_len: Annotated[int, typer.Option(help="Tokens that all prompts begin with, extra.")] = 0,
    seed: Seed = 0,
    output_json: OutputJson = None,
    *,
    engine: EngineFlags,
) -> None:
    """Answer many requests at once; the flags are those of `vllm bench throughput`."""
    from trtcb.bench.offline import measure_throughput
    from trtcb.bench.workload import RandomWorkload
    from trtcb.cli.bench_progress import progress_bar
    from trtcb.executor.llm import LLM

    source = RandomWorkload(
        num_prompts=num_prompts,
        random_input_len=input_len,
        random_output_len=output_len,
        random_range_ratio=random_range_ratio,
        random_prefix_len=prefix_len,
    )
    check_writable(output_json)
    with (
        progress_bar("requests", num_prompts + 1) as advance,
        LLM(plan, **engine.settings(plan), on_step=lambda stats: advance(len(stats.finished))) as llm,
    ):
        throughput = measure_throughput(llm, source, seed)
    print(throughput)
    _write(output_json, throughput.to_json())


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
    *,
    engine: EngineFlags,
) -> None:
    """Answer one batch again and again; the flags are those of `vllm bench latency`."""
    from trtcb.bench.offline import measure_latency
    from trtcb.bench.workload import RandomWorkload
    from trtcb.cli.bench_progress import progress_bar
    from trtcb.executor.llm import LLM

    batch = RandomWorkload(num_prompts=batch_size, random_input_len=input_len, random_output_len=output_len)
    check_writable(output_json)
    settings = engine.settings(plan)
    with LLM(plan, **settings) as llm, progress_bar("batches", num_iters_warmup + num_iters) as advance:
        latencies = measure_latency(
            llm,
            batch,
            max_batch_size=settings["max_batch_size"],
            num_warmups=num_iters_warmup,
            num_iters=num_iters,
            seed=seed,
            on_iter=advance,
        )
    print(latencies)
    _write(output_json, latencies.to_json())


def _write(file: Path | None, data: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
