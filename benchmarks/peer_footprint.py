"""What a server of trtcb takes beside its model: memory beyond weights and KV pool, and time until it is ready."""

import argparse
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from peer_http import http_lengths, load, mixed_workload, trtcb_serve
from peer_lines import CONFIGURATIONS
from peer_server import free_port, server

from trtcb.bench.table import shown_number, text_table
from trtcb.plan import Plan

MEMORY_TARGET_MB = 400
START_TARGET_S = 4.0
_NUM_BLOCKS = 256  # a small pool, which the requests of the measurement fill
_NUM_REQUESTS = 64
_STARTS = 3


def weight_and_pool_bytes(path: Path, num_blocks: int) -> int:
    """Bytes of a plan's tensors and of a pool of so many of its blocks."""
    with Plan.open(path, verify="header") as plan:
        header = plan.header
        per_token = header.model.kv_bytes_per_token(header.kv_dtype)
        return sum(t.num_bytes for t in plan.tensors.values()) + num_blocks * header.limits.block_size * per_token


def measure_plan(path: Path, arguments: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Start a server again and again, the first time for the kernel cache alone; then load the last one.

    The load is more than the pool holds, so that memory is all touched when it is counted.
    """
    starts = []
    for number in range(_STARTS + 1):
        port = free_port()
        more = ("--max-batch-size", "16", "--num-blocks", str(_NUM_BLOCKS))
        command = trtcb_serve(path, port, str(arguments.threads), *more)
        with server(command, port, "/ready", logs / "serve.log") as running:
            starts.append(running.start_s)
            if number == _STARTS:
                lengths = http_lengths(arguments, _NUM_REQUESTS)
                load(running.url, mixed_workload(lengths, arguments.seed, math.inf, prompt_seed=0, max_concurrency=16))
                import psutil  # of the development dependencies; a comparison does without

                resident = psutil.Process(running.pid).memory_info().rss
    beyond_mb = (resident - weight_and_pool_bytes(path, _NUM_BLOCKS)) / 1e6
    return {
        "resident_mb": round(resident / 1e6, 1),
        "beyond_mb": round(beyond_mb, 1),
        "starts_s": [round(start_s, 2) for start_s in starts[1:]],
        "start_s": round(statistics.median(starts[1:]), 2),
        "is_memory_met": beyond_mb <= MEMORY_TARGET_MB,
        "is_start_met": statistics.median(starts[1:]) <= START_TARGET_S,
    }


def measure_footprint(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the plans that are there, and print them."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for configuration in CONFIGURATIONS:
            path = arguments.places.model(configuration)
            is_wanted = not arguments.systems or configuration.name in arguments.systems
            if configuration.is_ours and path.is_file() and is_wanted:
                found[configuration.name] = measure_plan(path, arguments, Path(folder))
    titles = (f"MB beyond weights and pool (<= {MEMORY_TARGET_MB})", f"s to ready, warm (<= {START_TARGET_S:g})")
    rows = [["trtcb serve", "MB resident", *titles]]
    for name, values in found.items():
        rows.append([name, *(shown_number(values[key]) for key in ("resident_mb", "beyond_mb", "start_s"))])
    print(text_table(rows))
    return found
