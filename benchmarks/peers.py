"""trtcb beside the systems one would run instead of it on a CPU, interleaved, with one model and the same requests.

    python benchmarks/peers.py --peers ~/peers/envs --models ~/peers/models --plans engines

Every configuration has a worker process (``peer_worker.py``), which loads its model once. A round goes through all
lines, and on each line through all configurations, one at a time; workers that are not asked stand still. So all
systems are measured in the same minutes, and only their ratios are quoted. What is not installed is named and left
out, and a worker that fails is shown as failed. ``--http`` and ``--process`` measure the server instead.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from peer_footprint import measure_footprint
from peer_http import measure_http
from peer_lines import CONFIGURATIONS, GROUPS, Line, Places, Sizes, lines
from peer_link import Worker, WorkerError
from peer_table import Measured, Outcome, accuracy_of, table

from trtcb.bench.table import shown_number
from trtcb.cli.bench_options import check_writable
from trtcb.errors import UsageError
from trtcb.memory import total_memory

_PEERS = [configuration.name for configuration in CONFIGURATIONS if not configuration.is_ours]
_TIMEOUT_S = 900.0  # of loading, and of one measurement, the first of which computes 64 contexts


class Asked(Protocol):
    """What measures: a :class:`Worker`."""

    def ask(self, message: dict[str, Any]) -> float:
        """Return tokens per second, or raise :class:`WorkerError`."""


def compare(
    workers: Mapping[str, Asked],
    chosen: Sequence[Line],
    num_rounds: int,
    has_time: Callable[[], bool] = lambda: True,
) -> list[Outcome]:
    """Measure every line with the workers of its configurations, by name; no round but the first begins out of time.

    A configuration that fails on a line is not asked for that line again, and never again if its worker died. Ctrl-C
    ends it with what was measured so far.
    """
    known = {configuration.name: configuration for configuration in CONFIGURATIONS}
    outcomes = [
        Outcome(line, tuple(Measured(known[name]) for name in line.configurations if name in workers))
        for line in chosen
    ]
    dead: dict[str, str] = {}
    with suppress(KeyboardInterrupt):
        for number in range(num_rounds):
            if number and not has_time():
                break
            for outcome in outcomes:
                _one_round(workers, outcome, number, dead)
    return outcomes


def _one_round(workers: Mapping[str, Asked], outcome: Outcome, number: int, dead: dict[str, str]) -> None:
    message = outcome.line.message(number)
    turn = number % max(1, len(outcome.measured))  # nobody always comes first
    for measured in (*outcome.measured[turn:], *outcome.measured[:turn]):
        name = measured.configuration.name
        if name in dead:
            measured.error = measured.error or dead[name]
        if measured.error is None:
            _ask(workers[name], message, measured, dead)
            result = measured.error or f"{shown_number(measured.rates[-1])} tokens/s"
            _say(f"round {number + 1}, {outcome.line.name}, {name}: {result}")


def _ask(worker: Asked, message: dict[str, Any], measured: Measured, dead: dict[str, str]) -> None:
    try:
        measured.rates.append(worker.ask(message))
    except WorkerError as error:
        measured.error = str(error)
        if error.is_dead:
            dead[measured.configuration.name] = str(error)


def run_comparison(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the workers, measure, print the table, and return everything as JSON values."""
    accuracy = accuracy_of([json.loads(path.read_text()) for path in arguments.accuracy])
    sizes = Sizes.small() if arguments.small else Sizes()
    chosen = [line for line in lines(sizes, arguments.seed) if line.group in arguments.groups]
    wanted = {name for line in chosen for name in line.configurations}
    skipped, facts = {}, {}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for configuration in CONFIGURATIONS:
            name = configuration.name
            if name not in wanted or (arguments.systems and name not in arguments.systems):
                continue
            reason = arguments.places.missing(configuration)
            if reason is None:
                try:
                    command = arguments.places.worker(configuration, arguments.threads)
                    worker = Worker(command, logs / f"{name}.log", timeout_s=_TIMEOUT_S)
                    workers[name] = stack.enter_context(worker)
                    facts[name] = worker.facts
                except WorkerError as error:
                    reason = str(error)
            if reason is not None:
                skipped[name] = reason
            _say(f"{name}: {reason or 'ready'}")
        if not arguments.systems and not any(name in workers for name in _PEERS):
            raise SystemExit(f"There is no peer to compare with under {arguments.peers}: see benchmarks/README.md.")
        end_s = time.monotonic() + 60 * arguments.minutes
        outcomes = compare(workers, chosen, arguments.rounds, lambda: time.monotonic() < end_s)
    print(table(outcomes, accuracy))
    for name, reason in skipped.items():
        print(f"left out: {name}: {reason}")
    return {
        "seed": arguments.seed,
        "versions": facts,
        "left_out": skipped,
        "accuracy": accuracy,
        "lines": [outcome.to_json() for outcome in outcomes],
    }


def machine_facts() -> dict[str, Any]:
    """Say what this runs on."""
    cpu = dict(
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines() if ":" in line
    )
    cpu = {name.strip(): value.strip() for name, value in cpu.items()}
    flags = cpu.get("flags", "").split()
    return {
        "cpu": f"{cpu.get('model name', platform.machine())}, family {cpu.get('cpu family')}, model {cpu.get('model')}",
        "flags": [flag for flag in flags if flag.startswith(("avx", "amx", "fma", "f16c"))],
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(total_memory() / 2**30, 1),
        "os": f"{platform.freedesktop_os_release()['PRETTY_NAME']}, Linux {platform.release()}",
        "load_before": os.getloadavg()[0],
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure what was asked for, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder with one virtual environment a peer")
    parser.add_argument("--models", type=Path, help="what peer_models.py made [PEERS/models]")
    parser.add_argument(
        "--plans", type=Path, default=Path("engines"), help="folder with int8.plan, bf16.plan, int4.plan"
    )
    parser.add_argument(
        "--accuracy", type=Path, nargs="*", default=[], help="reports of trtcb eval --json of these plans"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60, help="after these, no further round begins [%(default)g]")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS, help="which lines [%(default)s]")
    parser.add_argument("--systems", nargs="+", choices=[c.name for c in CONFIGURATIONS], help="which of them [all]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a few tokens of everything, to see that it runs")
    parser.add_argument("--http", action="store_true", help="measure serving over HTTP instead")
    parser.add_argument("--serve-flags", default="", help="more flags of trtcb serve, for --http, in one argument")
    parser.add_argument("--process", action="store_true", help="measure memory and start of trtcb serve instead")
    today = datetime.datetime.now(datetime.timezone.utc).date()
    default = Path(__file__).with_name("results") / f"{today}-peers.json"
    parser.add_argument("--output", type=Path, default=default, help="the JSON file [%(default)s]")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        check_writable(arguments.output)
    except UsageError as error:
        parser.error(f"--output: {error}")
    peers = arguments.peers.absolute()  # not resolved: a virtual environment is known by the path to its Python
    arguments.places = Places(peers, (arguments.models or peers / "models").absolute(), arguments.plans)

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers are ended, too
    began_s = time.monotonic()
    report: dict[str, Any] = {"machine": machine_facts(), "threads": arguments.threads}
    if report["machine"]["load_before"] > 1:
        _say("warning: other processes are running, and some systems suffer from that more than others")
    if arguments.http:
        report["http"] = measure_http(arguments)
    if arguments.process:
        report["process"] = measure_footprint(arguments)
    if not (arguments.http or arguments.process):
        report |= run_comparison(arguments)
    report["minutes"] = round((time.monotonic() - began_s) / 60, 1)
    print(json.dumps(report["machine"]))
    for name, facts in report.get("versions", {}).items():
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in facts.items())}")
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['minutes']} minutes; written to {arguments.output}")


if __name__ == "__main__":
    main()
