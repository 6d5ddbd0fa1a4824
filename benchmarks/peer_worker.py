"""A worker of ``peers.py``: loads one system, then answers a JSON line with a JSON line until its input ends.

    python peer_worker.py SYSTEM MODEL THREADS OPTIONS

It runs in the system's own Python and needs nothing but the system. First it writes ``{"facts": {...}}``. A request is
``{"measure": "decode", "asks": [[[5, 7, 9], 16], ...], "in_flight": 8, "is_kept": true}`` with pairs of a prompt and a
number of tokens; its answer is ``{"rate": 123.4}``, in tokens per second, or ``{"error": "..."}``.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

from peer_systems import SYSTEMS, Ask, Load, System, Times

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def decode_rate(started_s: float, load: Load, times: Times) -> float:
    """Tokens per second while all requests decode: from the last one's first token to the first one's last token."""
    begin_s, end_s = max(seen[0] for seen in times), min(seen[-1] for seen in times)
    count = sum(begin_s < moment_s <= end_s for seen in times for moment_s in seen)
    if count < 4 * len(times):
        raise RuntimeError(
            f"the requests decoded together for only {count / len(times):.1f} tokens each: ask for more tokens"
        )
    return count / (end_s - begin_s)


def prefill_rate(started_s: float, load: Load, times: Times) -> float:
    """Tokens of the prompt per second until its first new token."""
    return len(load.asks[0].prompt) / (times[0][0] - started_s)


def output_rate(started_s: float, load: Load, times: Times) -> float:
    """New tokens per second until the last one, prefill included."""
    return sum(map(len, times)) / (max(seen[-1] for seen in times) - started_s)


MEASURES: dict[str, Callable[[float, Load, Times], float]] = {
    "decode": decode_rate,
    "prefill": prefill_rate,
    "output": output_rate,
}


def measure(system: System, message: dict[str, Any]) -> float:
    """Have a load served and return its rate; an answer that is too short is an error.

    Prompts that are kept are served once before, with one new token each, so that they are there.
    """
    asks = tuple(Ask(prompt, max_tokens) for prompt, max_tokens in message["asks"])
    load = Load(asks, message["in_flight"], message["is_kept"])
    if load.is_kept:
        system.generate(replace(load, asks=tuple(replace(ask, max_tokens=1) for ask in asks)))
    started_s = perf_counter()
    times = system.generate(load)
    for ask, seen in zip(load.asks, times, strict=True):
        if len(seen) != ask.max_tokens:
            raise RuntimeError(f"a request got {len(seen)} tokens, not {ask.max_tokens}")
    return MEASURES[message["measure"]](started_s, load, times)


def answer(system: System, line: str) -> dict[str, Any]:
    """Answer one line. Whatever goes wrong is in the answer, so that the next line finds the worker alive."""
    try:
        return {"rate": measure(system, json.loads(line))}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve standard input."""
    # One that stands still would outlive a parent that was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Libraries print what they like: only answers may go to standard output.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name, model, threads, options = sys.argv[1:]
    system = SYSTEMS[name](model, int(threads), json.loads(options))
    replies.write(json.dumps({"facts": {"python": sys.version.split()[0], **system.facts}}) + "\n")
    for line in sys.stdin:
        replies.write(json.dumps(answer(system, line)) + "\n")
    replies.flush()
    os._exit(0)  # some libraries hang or crash when they are taken down, and nothing is left to save


if __name__ == "__main__":
    main()
