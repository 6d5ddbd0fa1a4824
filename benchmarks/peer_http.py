"""Serving over HTTP: how far trtcb and llama.cpp can be loaded, and what HTTP costs trtcb.

The highest rate is that of Poisson arrivals at which 95 % of the gaps between pieces of text are within ``LIMIT_MS``,
and with which the server keeps up: one that makes requests wait in its queue has short gaps at any rate.
What HTTP costs is the throughput of a closed loop of 32 over that of the same plan and requests without a server,
measured in turns.
"""

import argparse
import asyncio
import math
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from peer_lines import CONFIGURATIONS, Configuration, mixed_lengths, prompt
from peer_link import Worker
from peer_server import RunningServer, free_port, server

from trtcb.bench.http_client import ApiClient
from trtcb.bench.http_load import Asking, LoadGenerator, warm_up
from trtcb.bench.load_report import LoadReport
from trtcb.bench.metrics import Slo
from trtcb.bench.prompt_style import PromptStyle
from trtcb.bench.table import shown_number, text_table
from trtcb.bench.workload import Workload
from trtcb.errors import TrtcbError

LIMIT_MS = 60.0
HTTP_TARGET = 0.93
_CLOSED_LOOP = 32
_VOCAB_SIZE = 20_000
# Of a run that only shows that it runs: requests, and tokens of their prompts and answers at most.
_SMALL_COUNT, _SMALL_PROMPT, _SMALL_OUTPUT = 4, 64, 16
_SECONDS = 40.0  # of arrivals at a rate, where that is neither few requests nor many
_SERVERS = ("trtcb", "llama.cpp")
_KEPT_UP = 0.75  # share of the whole time in which requests arrive; the rest is the last answers'
_KEYS = ("p95_itl_ms", "p95_ttft_ms", "output_throughput")


@dataclass(frozen=True, slots=True)
class Range:
    """Rates that are tried, in requests a second; those that differ by less than the factor ``width`` are the same."""

    lowest: float = 1 / 8
    highest: float = 256.0
    width: float = 1.15

    @staticmethod
    def small() -> "Range":
        """Return a range of two rates at most."""
        return Range(1 / 2, 2.0, 2.0)


def http_lengths(arguments: argparse.Namespace, count: int) -> list[tuple[int, int]]:
    """Lengths of the mixed requests of the offline lines, shorter ones for a small run."""
    lengths = mixed_lengths(_SMALL_COUNT if arguments.small else count, arguments.seed)
    if not arguments.small:
        return lengths
    return [(min(_SMALL_PROMPT, num_prompt), min(_SMALL_OUTPUT, num_output)) for num_prompt, num_output in lengths]


def mixed_workload(
    lengths: Sequence[tuple[int, int]],
    seed: int,
    rate: float,
    *,
    prompt_seed: int,
    max_concurrency: int | None = None,
) -> Workload:
    """Requests of these lengths with Poisson arrivals; an infinite ``rate`` has all there at once.

    The pattern of arrivals is the ``seed``'s alone. A ``prompt_seed`` that is used twice with one server
    finds its prompts in the prefix cache.
    """
    num_prompt, num_output = np.array(lengths, np.int64).T
    arrival_s = np.cumsum(np.random.default_rng(seed).exponential(1.0, len(lengths))) / rate
    priority = np.full(len(lengths), 0.5)
    return Workload(arrival_s, num_prompt, num_output, num_output, priority, 0, prompt_seed, max_concurrency)


def load(url: str, workload: Workload) -> dict[str, Any]:
    """Send a workload and return the report of ``trtcb bench serve``; raises ``RuntimeError`` if a request failed."""

    async def run() -> LoadReport:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # some servers close idle connections unannounced
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=300)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            client = ApiClient(session, url, "/v1/completions", None)
            asking = Asking((await client.models())[0], PromptStyle.IDS, _VOCAB_SIZE, 0.0, True)
            asking, words = await warm_up(client, asking, workload)
            if words:
                raise RuntimeError(f"{url} takes no token ids: {words}")
            return LoadReport(await LoadGenerator(client, asking, workload).run(asyncio.Event()), Slo())

    report = asyncio.run(run()).to_json()
    if report["failed"]:
        raise RuntimeError(f"{report['failed']} of {report['num_prompts']} requests failed: {report['failures']}")
    return report


def is_within_limits(p95_itl_ms: float, kept_up: float) -> bool:
    """Whether a rate is one that a server can be loaded with."""
    return p95_itl_ms <= LIMIT_MS and kept_up >= _KEPT_UP


def knee(keeps: Callable[[float], bool], rates: Range) -> float:
    """Return the highest rate that ``keeps`` accepts, from 1 by doubling or halving, then bisection; 0 if none."""
    low = 1.0
    if keeps(low):
        while low < rates.highest and keeps(2 * low):
            low *= 2
    else:
        low /= 2
        while low >= rates.lowest and not keeps(low):
            low /= 2
        if low < rates.lowest:
            return 0.0
    high = 2 * low
    while high / low > rates.width:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def server_command(
    configuration: Configuration, arguments: argparse.Namespace, port: int
) -> tuple[list[str | Path], str]:
    """Make a server's command line; the second is the route that says it is ready."""
    python, model = arguments.places.python(configuration), arguments.places.model(configuration)
    slots, threads = "32", str(arguments.threads)
    if configuration.is_ours:
        flags = ("--max-batch-size", slots, *shlex.split(arguments.serve_flags))
        return trtcb_serve(model, port, threads, *flags), "/ready"
    script = Path(__file__).with_name("peer_llama_server.py")
    return [python, script, model, str(port), threads, slots, "896"], "/health"


def trtcb_serve(plan: Path, port: int, threads: str, *more: str) -> list[str | Path]:
    """Make the command line of a server of trtcb."""
    return [sys.executable, "-m", "trtcb", "serve", plan, "--port", str(port), "--threads", threads, *more]


def measure_rates(arguments: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Find the highest rate of each server that is there, one server after the other."""
    found: dict[str, Any] = {}
    rates = Range.small() if arguments.small else Range()
    for configuration in CONFIGURATIONS:
        name, points = configuration.name, []
        is_wanted = not arguments.systems or name in arguments.systems
        if not is_wanted or configuration.system not in _SERVERS or arguments.places.missing(configuration) is not None:
            continue
        port = free_port()
        command, ready = server_command(configuration, arguments, port)
        try:
            with server(command, port, ready, logs / f"{name}.log") as running:
                highest = knee(_within_limit(running, arguments, points, name), rates)
                found[name] = {"highest_rate": highest, "points": points}
        except (RuntimeError, TrtcbError) as error:
            found[name] = {"error": str(error), "points": points}
    return found


def _within_limit(
    running: RunningServer, arguments: argparse.Namespace, points: list[dict[str, float]], name: str
) -> Callable[[float], bool]:
    def keeps(rate: float) -> bool:
        lengths = http_lengths(arguments, round(min(160, max(12, _SECONDS * rate))))
        workload = mixed_workload(lengths, arguments.seed, rate, prompt_seed=len(points))
        report = load(running.url, workload)
        kept_up = float(workload.arrival_s[-1] - workload.arrival_s[0]) / report["duration"]
        points.append({"rate": rate, "kept_up": kept_up, **{key: report[key] for key in _KEYS}})
        found = f"p95 ITL {report['p95_itl_ms']:.1f} ms, arrivals took {kept_up:.0%} of the time"
        print(f"{name}, {rate:.3g} a second: {found}", file=sys.stderr, flush=True)
        return is_within_limits(report["p95_itl_ms"], kept_up)

    return keeps


def measure_cost(arguments: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Throughput of trtcb's int8 plan over HTTP, in turns with that of the same requests without a server."""
    lengths = http_lengths(arguments, 64)
    (configuration,) = [c for c in CONFIGURATIONS if c.name == "trtcb int8"]
    port = free_port()
    http, offline = [], []
    with ExitStack() as stack:
        serve, ready = server_command(configuration, arguments, port)
        running = stack.enter_context(server(serve, port, ready, logs / "closed-loop.log"))
        command = arguments.places.worker(configuration, arguments.threads)
        worker = stack.enter_context(Worker(command, logs / "offline.log", timeout_s=600.0))
        for number in range(min(3, arguments.rounds)):
            asks = [(prompt(f"{number} {i}", length), size) for i, (length, size) in enumerate(lengths)]
            message = {"measure": "output", "asks": asks, "in_flight": _CLOSED_LOOP, "is_kept": False}
            offline.append(worker.ask(message))
            seeds = {"seed": arguments.seed, "prompt_seed": number}
            workload = mixed_workload(lengths, rate=math.inf, max_concurrency=_CLOSED_LOOP, **seeds)
            http.append(float(load(running.url, workload)["output_throughput"]))
            print(f"HTTP {http[-1]:.1f}, offline {offline[-1]:.1f} tokens/s", file=sys.stderr, flush=True)
    ratio = statistics.median(http) / statistics.median(offline)
    return {"http": http, "offline": offline, "ratio": ratio, "target": HTTP_TARGET}


def measure_http(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both, and print them."""
    with tempfile.TemporaryDirectory() as folder:
        cost = measure_cost(arguments, Path(folder))
        rates = measure_rates(arguments, Path(folder))
    print_http(rates, cost)
    return {"limit_ms": LIMIT_MS, "rates": rates, "cost": cost}


def print_http(rates: Mapping[str, Any], cost: Mapping[str, Any]) -> None:
    """Print both results."""
    rows = [["Poisson arrivals", f"highest rate with p95 ITL <= {LIMIT_MS:g} ms (requests/s)"]]
    for name, found in rates.items():
        rows.append([name, "failed" if "error" in found else shown_number(found["highest_rate"])])
    print(text_table(rows))
    for name, found in rates.items():
        if "error" in found:
            print(f"failed: {name}: {found['error']}")
    verdict = "met" if cost["ratio"] >= cost["target"] else "missed"
    print(f"HTTP over offline, closed loop of {_CLOSED_LOOP}: {cost['ratio']:.3f}, target {cost['target']}: {verdict}")
