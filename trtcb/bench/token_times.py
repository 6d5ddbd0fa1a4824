"""When the requests of a run got their tokens, as the engine saw it."""

import math
from typing import Any

import numpy as np

from trtcb.bench.metrics import statistics
from trtcb.bench.table import shown_number, text_table
from trtcb.executor.stats import StepStats

PERCENTILES = (50, 90, 99)
_TITLES = {"ttft": "TTFT, time to first token", "tpot": "TPOT, time per output token after it"}


class TokenTimes:
    """Gathers time to first token and time per output token of every request that ended."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {name: [] for name in _TITLES}

    def step(self, stats: StepStats) -> None:
        """Take in a step. A request of one token has no time per token after it."""
        for request in stats.finished:
            for name, seconds in (("ttft", request.ttft_s), ("tpot", request.tpot_s)):
                if seconds is not None:
                    self._seconds[name].append(seconds)

    def to_json(self) -> dict[str, float | None]:
        """Return milliseconds, under the names of ``vllm bench serve``; a number that does not exist is null."""
        values: dict[str, float | None] = {}
        for name, seconds in self._seconds.items():
            for statistic, value in statistics(np.array(seconds), PERCENTILES).items():
                values[f"{statistic}_{name}_ms"] = 1000 * value if math.isfinite(value) else None
        return values

    def __str__(self) -> str:
        columns = ("mean", *(f"p{q}" for q in PERCENTILES))
        table = [["ms", *columns]]
        for name, title in _TITLES.items():
            values: dict[str, Any] = statistics(np.array(self._seconds[name]), PERCENTILES)
            table.append([title, *(shown_number(1000 * values[column]) for column in columns)])
        return text_table(table)
