"""``trtcb bench serve``: load a running server, ours or another, and say how it held up."""

import asyncio
import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from trtcb.cli.bench_options import (
    Goodput,
    WorkloadFlags,
    check_folder,
    check_writable,
    is_given,
    parse_slo,
    refuse_given,
    write_results,
)
from trtcb.cli.flag_groups import with_flag_groups

if TYPE_CHECKING:
    from trtcb.bench.http_load import LoadRun
    from trtcb.bench.load_report import LoadReport
    from trtcb.bench.workload import Workload

INTERRUPTED = 130


@dataclass(frozen=True)
class ServerFlags:
    """Which server, and how it is asked."""

    title: ClassVar[str] = "Server"

    base_url: Annotated[
        str | None, typer.Option(help="Address, if not http://HOST:PORT; /v1 at its end is optional.")
    ] = None
    host: Annotated[str, typer.Option(help="Where the server is.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Its port.")] = 8000
    endpoint: Annotated[str, typer.Option(help="Route; one that ends in chat/completions is sent messages.")] = (
        "/v1/completions"
    )
    model: Annotated[str | None, typer.Option(help="Its name there. [the first that the server lists]")] = None
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key to send.")] = None
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers run to their full length; vLLM and trtcb know this.")
    ] = False
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompts are random token ids below this.")] = 10000
    num_warmups: Annotated[int, typer.Option(min=1, help="Requests before the clock starts.")] = 1

    @property
    def address(self) -> str:
        """Base address of the server."""
        return self.base_url or f"http://{self.host}:{self.port}"

    def check(self, context: typer.Context) -> None:
        """Raise for an address that is none, and for one that is given twice."""
        from trtcb.errors import UsageError

        if self.base_url is not None:
            refuse_given(context, "--base-url names the server", "host", "port")
            if not self.base_url.startswith(("http://", "https://")):
                host = self.base_url.split("://")[-1]
                raise UsageError(f"--base-url '{self.base_url}' is no web address: write http://{host}.")


@dataclass(frozen=True)
class LoadFlags(WorkloadFlags):
    """The workload, with the default lengths of ``vllm bench serve``."""

    random_input_len: Annotated[int, typer.Option(help="Mean prompt length in tokens.")] = 1024


@dataclass(frozen=True)
class ResultFlags:
    """What is shown, and where it is kept."""

    title: ClassVar[str] = "Results"

    goodput: Goodput = None
    percentile_metrics: Annotated[str, typer.Option(help="Latencies to show.")] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, typer.Option(help="Their percentiles.")] = "95,99"
    save_result: Annotated[bool, typer.Option("--save-result", help="Write a JSON file, named after the run.")] = False
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="With every request in it.")] = False
    result_dir: Annotated[Path, typer.Option(help="Folder of that file.")] = Path()
    result_filename: Annotated[str | None, typer.Option(help="Its name, if another.")] = None
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None

    def report(self, run: "LoadRun") -> "LoadReport":
        """Sum a run up."""
        from trtcb.bench.load_report import LoadReport

        return LoadReport(run, parse_slo(self.goodput), self._latencies(), self._percentiles())

    @property
    def is_saved(self) -> bool:
        """Whether a file goes to ``result_dir``."""
        return self.save_result or self.save_detailed or self.result_filename is not None

    def check(self, context: typer.Context) -> None:
        """Raise for what could not be shown or written, before anything runs."""
        from trtcb.bench.http_load import LoadRun

        self.report(LoadRun((), 0, 0, 0.0))
        check_writable(self.json_file)
        if not self.is_saved:
            refuse_given(context, "Without --save-result no file is written there", "result_dir")
            return
        check_folder(self.result_dir, "--result-dir")
        if self.result_filename is not None and self.result_dir.is_dir():
            check_writable(self.result_dir / self.result_filename)

    def files(self, label: str) -> list[Path]:
        """Where the results go."""
        name = self.result_filename or f"{label}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        saved = [self.result_dir / name] if self.is_saved else []
        return saved if self.json_file is None else [*saved, self.json_file]

    def _latencies(self) -> tuple[str, ...]:
        from trtcb.bench.load_report import LATENCIES
        from trtcb.errors import UsageError

        names = tuple(name.strip() for name in self.percentile_metrics.split(","))
        if not set(names) <= set(LATENCIES):
            raise UsageError(
                f"--percentile-metrics '{self.percentile_metrics}': choose from {', '.join(LATENCIES)}, with commas."
            )
        return names

    def _percentiles(self) -> tuple[float, ...]:
        from trtcb.errors import UsageError

        try:
            values = tuple(float(value) for value in self.metric_percentiles.split(","))
        except ValueError:
            values = (-1.0,)
        if not all(0 <= value <= 100 for value in values):
            raise UsageError(f"--metric-percentiles '{self.metric_percentiles}': write numbers up to 100, as 95,99.")
        return values


@with_flag_groups
def bench_serve(
    context: typer.Context,
    server: ServerFlags,
    request_rate: Annotated[
        float, typer.Option("--request-rate", "--rate", help="Requests a second; inf sends all at once.")
    ] = float("inf"),
    *,
    workload: LoadFlags,
    results: ResultFlags,
) -> None:
    """Load a running OpenAI-compatible server; flags are named as in `vllm bench serve`."""
    from dataclasses import replace

    from trtcb.errors import TrtcbError, UsageError

    if server.ignore_eos and workload.max_tokens is not None:
        raise UsageError("With --ignore-eos answers run to what they may: set --random-output-len, not --max-tokens.")
    if workload.max_tokens is not None:
        why = "With --max-tokens the model decides where answers end"
        refuse_given(context, why, "random_output_len", "output_len_cv")
    server.check(context)
    workload.check(context, has_rate=is_given(context, "request_rate") and request_rate < float("inf"))
    results.check(context)
    drawn = replace(workload.source(request_rate).generate(workload.seed), max_concurrency=workload.max_concurrency)
    allow_connections(len(drawn) if workload.max_concurrency is None else workload.max_concurrency)
    outcome = asyncio.run(_load(server, drawn))
    report = results.report(outcome.run)
    print(f"{outcome.description}; {len(drawn)} requests, seed {workload.seed}\n")
    print(report.text())
    settings = {"date": time.strftime("%Y%m%d-%H%M%S"), "model_id": outcome.model, "request_rate": str(request_rate)}
    shared = {"max_concurrency": workload.max_concurrency, "burstiness": workload.burstiness, "seed": workload.seed}
    data = {**settings, **shared, **report.to_json(is_detailed=results.save_detailed)}
    for file in results.files(f"trtcb-{request_rate:g}qps-{outcome.model.split('/')[-1]}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_results(file, json.dumps(data, indent=1) + "\n")
    if outcome.is_interrupted:
        print("interrupted: these are the requests that ended before", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if not report.whole:
        raise TrtcbError("No request came back whole; the table says why.")


@dataclass(frozen=True)
class _Outcome:
    run: "LoadRun"
    model: str
    description: str
    is_interrupted: bool


async def _load(server: ServerFlags, workload: "Workload") -> _Outcome:
    import aiohttp

    from trtcb.bench.http_client import ApiClient
    from trtcb.bench.http_load import Asking, LoadGenerator, warm_up
    from trtcb.bench.prompt_style import style_of
    from trtcb.cli.bench_progress import progress_bar

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)  # answers take as long as they take
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = ApiClient(session, server.address, server.endpoint, server.api_key)
        model = server.model or (await client.models())[0]
        asking = Asking(model, style_of(server.endpoint), server.vocab_size, server.temperature, server.ignore_eos)
        why = ""
        for number in range(server.num_warmups):
            asking, said = await warm_up(client, asking, workload, number)
            why = why or said
        stop, interrupted = asyncio.Event(), [False]

        def interrupt() -> None:
            interrupted[0] = True
            stop.set()
            loop.remove_signal_handler(signal.SIGINT)  # the next one ends the program at once

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, interrupt)
        with progress_bar("requests", len(workload)) as advance:
            failed = [0]

            def on_answer(answer: Any) -> None:
                failed[0] += answer.reply.failure is not None
                advance(note=f"{failed[0]} failed" if failed[0] else "")

            run = await LoadGenerator(client, asking, workload, on_answer).run(stop)
    style = f"prompts as {asking.style.value}" + (f" (token ids were refused: {why.rstrip('.')})" if why else "")
    return _Outcome(run, model, f"{client.url}, model {model}, {style}", interrupted[0])


def allow_connections(count: int) -> None:
    """Raise the limit of open files as far as the system lets us: each running request is a connection."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 64
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
