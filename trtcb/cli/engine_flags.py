"""The engine's flags, the same for every command that runs a plan."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

CPU_ENGINE_HELP = "auto, portable or whole_step: what runs a cpu plan. [auto]"


@dataclass(frozen=True)
class EngineFlags:
    """The engine's settings by their flags; None where the engine, or the plan, decides."""

    title: ClassVar[str] = "Engine"

    scheduler_policy: Annotated[
        str | None,
        typer.Option(help="guaranteed_no_evict, max_utilization or static_batch. [guaranteed_no_evict]"),
    ] = None
    chunk_policy: Annotated[
        str | None, typer.Option(help="first_come_first_served or equal_progress. [first_come_first_served]")
    ] = None
    queue_policy: Annotated[
        str | None, typer.Option(help="Order of waiting requests: fcfs, priority, srtf or wfq. [fcfs]")
    ] = None
    priority_ageing: Annotated[
        float | None, typer.Option(help="Seconds of waiting that outweigh any priority. [never]")
    ] = None
    victim_policy: Annotated[
        str | None, typer.Option(help="Whom max_utilization pauses: newest or cheapest. [newest]")
    ] = None
    watermark: Annotated[float | None, typer.Option(help="Share of the pool kept free at a start. [0]")] = None
    stall_free: Annotated[
        bool | None, typer.Option("--stall-free/--no-stall-free", help="Decodes first in the token budget. [off]")
    ] = None
    max_prefill_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens in one step. [what max_num_tokens leaves]")
    ] = None
    overlap_depth: Annotated[
        int | None, typer.Option(help="Steps in flight while the next one is scheduled, 0 or 1. [0]")
    ] = None
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
    max_queue_size: Annotated[
        int | None, typer.Option(help="Waiting requests at most; serve then answers 429. [256]")
    ] = None
    default_max_tokens: Annotated[
        int | None, typer.Option(help="For requests that name no limit. [what max_seq_len leaves]")
    ] = None
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine. [one a core]")] = None
    cpu_engine: Annotated[str | None, typer.Option(help=CPU_ENGINE_HELP)] = None

    def given(self) -> Mapping[str, Any]:
        """Return all of them by name, for :func:`~trtcb.config_sources.resolve`."""
        return asdict(self)

    def settings(self, plan: Path) -> dict[str, Any]:
        """Return the settings of an engine for a plan, checked and filled from its limits."""
        from trtcb.config import ServeConfig
        from trtcb.config_sources import resolve
        from trtcb.plan import Plan

        with Plan.open(plan, verify="header") as opened:
            limits = opened.header.limits
        engine = resolve(ServeConfig, flags=self.given()).config.fit(limits).engine
        return {field.name: getattr(engine, field.name) for field in fields(engine)}
