"""Flags that the benchmarks share: the workload, the limits it is judged by, the engine."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

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


@dataclass(frozen=True)
class EngineFlags:
    """The engine's settings, as ``trtcb serve`` has them; None where it decides."""

    title: ClassVar[str] = "Engine, as in trtcb serve"

    scheduler_policy: Annotated[
        str | None, typer.Option(help="guaranteed_no_evict, max_utilization or static_batch. [guaranteed_no_evict]")
    ] = None
    chunk_policy: Annotated[
        str | None, typer.Option(help="first_come_first_served or equal_progress. [first_come_first_served]")
    ] = None
    queue_policy: Annotated[str | None, typer.Option(help="fcfs, priority, srtf or wfq. [fcfs]")] = None
    priority_ageing: Annotated[float | None, typer.Option(help="Seconds that outweigh any priority. [never]")] = None
    victim_policy: Annotated[str | None, typer.Option(help="newest or cheapest. [newest]")] = None
    watermark: Annotated[float | None, typer.Option(help="Share of the pool kept free at a start. [0]")] = None
    stall_free: Annotated[bool | None, typer.Option("--stall-free/--no-stall-free", help="Decodes first. [off]")] = None
    max_prefill_tokens: Annotated[int | None, typer.Option(help="Prompt tokens in one step. [no cap]")] = None
    overlap_depth: Annotated[int | None, typer.Option(help="Steps in flight while scheduling, 0 or 1. [0]")] = None
    max_batch_size: Annotated[
        int | None, typer.Option("--max-batch-size", "--max-num-seqs", help="Sequences in one step. [the plan's]")
    ] = None
    max_num_tokens: Annotated[
        int | None,
        typer.Option("--max-num-tokens", "--max-num-batched-tokens", help="Tokens in one step. [the plan's]"),
    ] = None
    max_seq_len: Annotated[
        int | None, typer.Option("--max-seq-len", "--max-model-len", help="Prompt and output tokens. [the plan's]")
    ] = None
    block_size: Annotated[
        int | None, typer.Option("--block-size", "--tokens-per-block", help="Must be the plan's. [the plan's]")
    ] = None
    chunked_prefill: Annotated[
        bool | None, typer.Option("--chunked-prefill/--no-chunked-prefill", help="Split long prompts. [on]")
    ] = None
    prefix_caching: Annotated[
        bool | None, typer.Option("--prefix-caching/--no-prefix-caching", help="Reuse equal prompt beginnings. [on]")
    ] = None
    num_blocks: Annotated[int | None, typer.Option(help="KV pool in blocks.", show_default=False)] = None
    kv_memory: Annotated[str | None, typer.Option(help="KV pool in bytes, such as 2GiB.", show_default=False)] = None
    kv_memory_fraction: Annotated[
        float | None, typer.Option(help="Share of the free memory for weights and pool. [0.9]")
    ] = None
    max_queue_size: Annotated[int | None, typer.Option(help="Waiting requests in the engine at most. [256]")] = None
    default_max_tokens: Annotated[int | None, typer.Option(hidden=True)] = None
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine. [one a core]")] = None

    def settings(self, plan: Path) -> dict[str, Any]:
        """Return the settings of an engine for a plan, checked and filled from its limits."""
        from trtcb.config import ServeConfig
        from trtcb.config_sources import resolve
        from trtcb.plan import Plan

        with Plan.open(plan, verify="header") as opened:
            limits = opened.header.limits
        flags = {field.name: getattr(self, field.name) for field in fields(self)}
        engine = resolve(ServeConfig, flags=flags).config.fit(limits).engine
        return {field.name: getattr(engine, field.name) for field in fields(engine)}


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
