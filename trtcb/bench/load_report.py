"""What a run against a server came to: counts, rates and latencies, as text and as JSON under vLLM's names."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtcb.bench.http_load import Answer, LoadRun
from trtcb.bench.metrics import Latency, Slo, statistics
from trtcb.bench.table import shown_number, text_table

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token after it",
    "itl": "gap between chunks",
    "e2el": "whole answer",
}
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A run and what of it is shown. ``percentiles`` are from 0 to 100; latencies count answers that came whole."""

    run: LoadRun
    slo: Slo
    latencies: tuple[str, ...] = tuple(LATENCIES)
    percentiles: tuple[float, ...] = (95.0, 99.0)

    @property
    def whole(self) -> list[Answer]:
        """Answers that came whole, in order of their requests."""
        return sorted((a for a in self.run.answers if a.reply.failure is None), key=lambda answer: answer.number)

    @property
    def failures(self) -> Counter[str]:
        """How often each kind of failure came."""
        return Counter(answer.reply.failure for answer in self.run.answers if answer.reply.failure is not None)

    def counts(self) -> dict[str, float]:
        """Counts and rates, under the names of ``vllm bench serve``."""
        whole, duration_s = self.whole, max(self.run.duration_s, 1e-9)
        num_input = sum(answer.reply.num_prompt_tokens for answer in whole)
        num_output = sum(answer.reply.num_output_tokens for answer in whole)
        num_good = sum(_is_good(answer, self.slo) for answer in whole)
        return {
            "num_prompts": self.run.num_requests,
            "completed": len(whole),
            "failed": sum(self.failures.values()),
            "cut_off": self.run.num_cut_off,
            "not_sent": self.run.num_requests - len(self.run.answers) - self.run.num_cut_off,
            "duration": self.run.duration_s,
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": len(whole) / duration_s,
            "output_throughput": num_output / duration_s,
            "total_token_throughput": (num_input + num_output) / duration_s,
            "request_goodput": num_good / duration_s,
            "good_share": num_good / max(1, len(self.run.answers)),
        }

    def text(self) -> str:
        """Counts, then a latency a line, then what went wrong."""
        counts = self.counts()
        shown = [name for name in _COUNTS if counts[name] or name in _KEPT]
        rows = [["", "value"], *([_COUNTS[name], shown_number(counts[name])] for name in shown)]
        if self.slo.limits:
            rows.append(["goodput (requests/s)", shown_number(counts["request_goodput"])])
            rows.append(["requests within SLO (%)", shown_number(100 * counts["good_share"])])
        columns = {f"{name.upper()}, {LATENCIES[name]}": _seconds(self.whole, name) for name in self.latencies}
        latencies = [["ms", "mean", "median", *(f"p{percentile:g}" for percentile in self.percentiles)]]
        for title, seconds in {**columns, "client lag, sent late by": _lag(self.run.answers)}.items():
            values = statistics(seconds, self.percentiles)
            latencies.append([title, *(shown_number(1000 * values[name]) for name in values if name != "std")])
        return "\n\n".join([text_table(rows), text_table(latencies), *self._failure_lines()])

    def to_json(self, *, is_detailed: bool = False) -> dict[str, Any]:
        """Return everything as JSON values, times in ms; a number that does not exist is null."""
        values: dict[str, Any] = {**self.counts(), "failures": dict(self.failures), "slo_s": dict(self.slo.limits)}
        columns = {name: _seconds(self.whole, name) for name in self.latencies}
        for name, seconds in {**columns, "client_lag": _lag(self.run.answers)}.items():
            for statistic, value in statistics(seconds, self.percentiles).items():
                values[f"{statistic}_{name}_ms"] = 1000 * value if math.isfinite(value) else None
        if is_detailed:
            answers = sorted(self.run.answers, key=lambda answer: answer.number)
            values |= {
                "request_numbers": [answer.number for answer in answers],
                "start_times": [answer.sent_s for answer in answers],
                "client_lags": [answer.lag_s for answer in answers],
                "input_lens": [answer.reply.num_prompt_tokens for answer in answers],
                "output_lens": [answer.reply.num_output_tokens for answer in answers],
                "ttfts": [answer.reply.ttft_s for answer in answers],
                "itls": [list(answer.reply.gaps_s) for answer in answers],
                "e2els": [answer.reply.e2e_s for answer in answers],
                "errors": [_error(answer) for answer in answers],
            }
        return values

    def _failure_lines(self) -> list[str]:
        """One paragraph: each kind with its count and what the server said to the first of them."""
        lines = []
        for kind, count in self.failures.most_common():
            first = next(answer for answer in self.run.answers if answer.reply.failure == kind)
            detail = f": {first.reply.detail}" if first.reply.detail else ""
            lines.append(f"failed, {count} x {kind}{detail}")
        return ["\n".join(lines)] if lines else []


_COUNTS = {
    "completed": "completed requests",
    "failed": "failed requests",
    "cut_off": "cut off by Ctrl-C",
    "not_sent": "never sent",
    "duration": "duration (s)",
    "total_input_tokens": "input tokens",
    "total_output_tokens": "output tokens",
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "input and output tokens/s",
}
_KEPT = {"completed", "failed", "duration"}  # shown even if 0


def _seconds(answers: Sequence[Answer], name: str) -> Floats:
    """Return all values of one latency in seconds."""
    replies = [answer.reply for answer in answers]
    if name == "itl":
        return np.array([gap for reply in replies for gap in reply.gaps_s])
    values = [_latency(answer, name) for answer in answers]
    return np.array([value for value in values if value is not None])


def _latency(answer: Answer, name: str) -> float | None:
    reply = answer.reply
    if name == "e2el" or reply.ttft_s is None:
        return reply.e2e_s
    if name == "ttft":
        return reply.ttft_s
    return (reply.e2e_s - reply.ttft_s) / (reply.num_output_tokens - 1) if reply.num_output_tokens > 1 else None


def _lag(answers: Sequence[Answer]) -> Floats:
    return np.array([answer.lag_s for answer in answers])


def _is_good(answer: Answer, slo: Slo) -> bool:
    """Whether an answer kept the limits; one without a time per token keeps any limit on it."""
    limits: tuple[tuple[Latency, float], ...] = slo.limits
    return all((_latency(answer, name) or 0.0) <= limit_s for name, limit_s in limits)


def _error(answer: Answer) -> str:
    reply = answer.reply
    return f"{reply.failure}: {reply.detail}" if reply.failure else ""
