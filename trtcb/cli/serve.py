"""``trtcb serve``: a plan behind the OpenAI API."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from trtcb.cli.engine_flags import EngineFlags
from trtcb.cli.flag_groups import with_flag_groups
from trtcb.cli.plan_path import plan_path
from trtcb.config import ServeConfig
from trtcb.config_sources import resolve

if TYPE_CHECKING:
    from trtcb.executor.llm import AsyncLLM
    from trtcb.plan import PlanHeader
    from trtcb.server.run import HttpServer


@dataclass(frozen=True)
class ServerFlags:
    """The HTTP server's settings by their flags; None where it decides."""

    title: ClassVar[str] = "Server"

    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one. [8000]")] = None
    served_model_name: Annotated[str | None, typer.Option(help="The name clients use. [the model's]")] = None
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys to accept, one a line. [none: anyone may ask]", show_default=False)
    ] = None
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Let other machines in without a key.", show_default=False)
    ] = None
    overload_status: Annotated[int | None, typer.Option(help="429 or 503 when the queue is full. [429]")] = None
    shutdown_timeout: Annotated[
        float | None, typer.Option(help="Seconds that running requests get at SIGTERM. [30]")
    ] = None
    verify: Annotated[str | None, typer.Option(help="full or header: how much of the plan is hashed. [full]")] = None
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. [info]")] = None
    tensor_parallel_size: Annotated[int | None, typer.Option("--tensor-parallel-size", "--tp-size", hidden=True)] = None
    pipeline_parallel_size: Annotated[
        int | None, typer.Option("--pipeline-parallel-size", "--pp-size", hidden=True)
    ] = None


@with_flag_groups
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
    *,
    server: ServerFlags,
    engine: EngineFlags,
) -> None:
    """Serve a plan over HTTP as the OpenAI API, until SIGTERM or Ctrl-C."""
    flags = {**asdict(server), **engine.given()}
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
