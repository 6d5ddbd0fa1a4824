"""``trtcb serve``: a plan behind the OpenAI API."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtcb.cli.plan_path import plan_path
from trtcb.config import ServeConfig
from trtcb.config_sources import resolve

if TYPE_CHECKING:
    from trtcb.executor.llm import AsyncLLM
    from trtcb.plan import PlanHeader
    from trtcb.server.run import HttpServer


def serve(
    plan: Annotated[Path | None, typer.Argument(help="The plan to serve.", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Serve engines/<model>.plan instead.", show_default=False)
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Settings that come with trtcb.", show_default=False)] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of these settings.", show_default=False)
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print every setting with its origin, and serve nothing.")
    ] = False,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one. [8000]")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name clients use. [the model's]")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys to accept, one a line. [none: anyone may ask]", show_default=False)
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Let other machines in without a key.", show_default=False)
    ] = None,
    scheduler_policy: Annotated[
        str | None,
        typer.Option(help="guaranteed_no_evict, max_utilization or static_batch. [guaranteed_no_evict]"),
    ] = None,
    chunk_policy: Annotated[
        str | None, typer.Option(help="first_come_first_served or equal_progress. [first_come_first_served]")
    ] = None,
    queue_policy: Annotated[
        str | None, typer.Option(help="Order of waiting requests: fcfs, priority, srtf or wfq. [fcfs]")
    ] = None,
    priority_ageing: Annotated[
        float | None, typer.Option(help="Seconds of waiting that outweigh any priority. [never]")
    ] = None,
    victim_policy: Annotated[
        str | None, typer.Option(help="Whom max_utilization pauses: newest or cheapest. [newest]")
    ] = None,
    watermark: Annotated[float | None, typer.Option(help="Share of the pool kept free at a start. [0]")] = None,
    stall_free: Annotated[
        bool | None, typer.Option("--stall-free/--no-stall-free", help="Decodes first in the token budget. [off]")
    ] = None,
    max_prefill_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens in one step. [what max_num_tokens leaves]")
    ] = None,
    overlap_depth: Annotated[
        int | None, typer.Option(help="Steps in flight while the next one is scheduled, 0 or 1. [0]")
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option("--max-batch-size", "--max-num-seqs", help="Sequences in one step. [the plan's]")
    ] = None,
    max_num_tokens: Annotated[
        int | None,
        typer.Option("--max-num-tokens", "--max-num-batched-tokens", help="Tokens in one step. [the plan's]"),
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option("--max-seq-len", "--max-model-len", help="Prompt and output tokens. [the plan's]")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", "--tokens-per-block", help="Must be the plan's. [the plan's]")
    ] = None,
    chunked_prefill: Annotated[
        bool | None, typer.Option("--chunked-prefill/--no-chunked-prefill", help="Split long prompts. [on]")
    ] = None,
    prefix_caching: Annotated[
        bool | None, typer.Option("--prefix-caching/--no-prefix-caching", help="Reuse equal prompt beginnings. [on]")
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV pool in blocks.", show_default=False)] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV pool in bytes, such as 2GiB.", show_default=False)] = None,
    kv_memory_fraction: Annotated[
        float | None, typer.Option(help="Share of the free memory for weights and pool. [0.9]")
    ] = None,
    max_queue_size: Annotated[int | None, typer.Option(help="Waiting requests before clients get 429. [256]")] = None,
    default_max_tokens: Annotated[
        int | None, typer.Option(help="For requests that name no limit. [what max_seq_len leaves]")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine. [one a core]")] = None,
    overload_status: Annotated[int | None, typer.Option(help="429 or 503 when the queue is full. [429]")] = None,
    shutdown_timeout: Annotated[
        float | None, typer.Option(help="Seconds that running requests get at SIGTERM. [30]")
    ] = None,
    verify: Annotated[str | None, typer.Option(help="full or header: how much of the plan is hashed. [full]")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. [info]")] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "--tp-size", hidden=True)
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None, typer.Option("--pipeline-parallel-size", "--pp-size", hidden=True)
    ] = None,
) -> None:
    """Serve a plan over HTTP as the OpenAI API, until SIGTERM or Ctrl-C."""
    flags = {
        "host": host,
        "port": port,
        "served_model_name": served_model_name,
        "api_key_file": api_key_file,
        "insecure": insecure,
        "scheduler_policy": scheduler_policy,
        "chunk_policy": chunk_policy,
        "queue_policy": queue_policy,
        "priority_ageing_s": priority_ageing,
        "victim_policy": victim_policy,
        "watermark": watermark,
        "stall_free": stall_free,
        "max_prefill_tokens": max_prefill_tokens,
        "overlap_depth": overlap_depth,
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "max_seq_len": max_seq_len,
        "block_size": block_size,
        "chunked_prefill": chunked_prefill,
        "prefix_caching": prefix_caching,
        "num_blocks": num_blocks,
        "kv_memory_bytes": kv_memory,
        "kv_memory_fraction": kv_memory_fraction,
        "max_queue_size": max_queue_size,
        "default_max_tokens": default_max_tokens,
        "threads": threads,
        "overload_status": overload_status,
        "shutdown_timeout_s": shutdown_timeout,
        "verify": verify,
        "log_level": log_level,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
    }
    resolved = resolve(ServeConfig, flags=flags, config_file=config, preset=preset)
    if show_config:
        print("\n".join(resolved.lines()))
    else:
        _serve(plan_path(plan, model), resolved.config)


def _serve(path: Path, config: ServeConfig) -> None:
    import logging

    from trtcb.plan import Plan
    from trtcb.server.run import serve as serve_http

    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with Plan.open(path, verify="header") as plan:
        header = plan.header
    config = config.fit(header.limits)

    def load() -> "AsyncLLM":
        from trtcb.executor.llm import AsyncLLM  # seconds of imports: only once the address is ours

        return AsyncLLM.from_plan(path, config.engine, verify=config.verify)

    code = serve_http(load, config.server, lambda server: print(banner(server, header, config), flush=True))
    raise typer.Exit(code)


def banner(server: "HttpServer", header: "PlanHeader", config: ServeConfig) -> str:
    """Say once, when ready, what is served and how."""
    pool = server.context.llm.engine.snapshot()
    size = config.engine.block_size
    num_keys = len(server.context.config.api_keys)
    rows = {
        "url": f"{server.url}/v1",
        "model": server.context.model_name,
        "target": f"{header.target}, weights {header.weight_dtype}, KV {header.kv_dtype.value}",
        "policy": f"{pool.policy}, chunks {config.chunk_policy}, queue {config.queue_policy}",
        "pool": f"{pool.num_blocks} blocks of {size} = {pool.num_blocks * size} tokens",
        "auth": f"{num_keys} key{'s'[: num_keys != 1]}" if num_keys else "none: anyone who reaches the port may ask",
    }
    return "\n".join(["trtcb is ready", *(f"  {name:<6} {value}" for name, value in rows.items())])
