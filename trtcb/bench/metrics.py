"""What is measured of a run: latencies, goodput, and what the pool and the scheduler went through."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from trtcb.bench.workload import Workload
from trtcb.errors import UsageError, ValidationFailedError
from trtcb.executor.request import FinishReason
from trtcb.executor.stats import FinishedRequest, StepStats

Floats = npt.NDArray[np.float64]
Latency = Literal["ttft", "tpot", "e2el"]
PERCENTILES = (50, 95, 99)
MAX_SAMPLES = 512


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request keeps, in seconds; an empty one is kept by all that finish."""

    limits: tuple[tuple[Latency, float], ...] = ()

    @staticmethod
    def parse(texts: list[str]) -> "Slo":
        """Read ``NAME:MILLISECONDS``, as ``vllm bench serve --goodput`` has it, for ``ttft``, ``tpot``, ``e2el``."""
        limits: list[tuple[Latency, float]] = []
        for text in " ".join(texts).split():
            name, _, value = text.partition(":")
            try:
                limit_s = float(value) / 1000
            except ValueError:
                limit_s = 0.0
            if name not in ("ttft", "tpot", "e2el") or not limit_s > 0:
                raise UsageError(f"--goodput '{text}' is no limit: write ttft:MS, tpot:MS or e2el:MS.")
            limits.append((name, limit_s))  # type: ignore[arg-type]
        return Slo(tuple(limits))


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine after one step, at ``now_s``. Blocks and requests."""

    now_s: float
    num_running: int
    num_paused: int
    num_waiting: int
    used_blocks: int
    promised_blocks: int


@dataclass(frozen=True, slots=True)
class Requests:
    """Timings per request ``[N]`` in seconds; NaN where there is none (refused, or one token only for ``tpot_s``)."""

    queue_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    num_pauses: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of one configuration. ``values`` has every metric by its name, see :data:`METRICS`."""

    values: dict[str, float]
    requests: Requests
    samples: tuple[Sample, ...]


class Collector:
    """Takes in a run step by step, and holds it to account.

    Every request must finish exactly once, by its scripted end, with exactly its tokens; anything else raises
    ``ValidationFailedError``.
    """

    def __init__(self, workload: Workload, num_blocks: int, max_batch_size: int) -> None:
        self._workload = workload
        self._answer_len = workload.answer_len
        self._num_blocks = num_blocks
        self._max_batch_size = max_batch_size
        self._times = {name: np.full(len(workload), np.nan) for name in ("queue_s", "ttft_s", "tpot_s", "e2e_s")}
        self._num_pauses = np.zeros(len(workload), np.int64)
        self._is_ended = np.zeros(len(workload), np.bool_)
        self._num_refused = 0
        self._itl_us: Counter[int] = Counter()  # exact to a microsecond, however many tokens there are
        self._totals: Counter[str] = Counter()
        self._busy_s = 0.0
        self._block_seconds = np.zeros(2)  # used, promised
        self._peak_used = 0
        self._samples: list[Sample] = []
        self._stride = 1

    def refuse(self, request_id: str) -> None:
        """Take note of a request that was not accepted."""
        self._end(request_id)
        self._num_refused += 1

    def step(self, stats: StepStats, now_s: float) -> None:
        """Take in one step, which ended at ``now_s``."""
        totals = self._totals
        totals["steps"] += stats.num_rows > 0
        totals["rows"] += stats.num_rows
        totals["tokens"] += stats.generated_tokens
        totals["pauses"] += stats.num_pauses
        totals["prompt_tokens"] += stats.prompt_tokens
        totals["recomputed"] += stats.recomputed_tokens
        totals["prefix_hits"] += stats.prefix_hit_tokens
        if stats.step_errors or stats.audit_failures:
            raise ValidationFailedError("The engine failed a step, or its books were wrong: please report this.")
        for gap_s, count in Counter(stats.itl_s).items():  # most of a step's gaps are equal
            self._itl_us[round(1e6 * gap_s)] += count
        for request in stats.finished:
            self._finish(request)
        promised = stats.used_blocks + stats.reserved_blocks
        self._busy_s += stats.step_s
        self._block_seconds += (stats.used_blocks * stats.step_s, promised * stats.step_s)
        self._peak_used = max(self._peak_used, stats.used_blocks)
        if totals["steps"] % self._stride == 0:
            self._samples.append(
                Sample(
                    now_s,
                    stats.num_running,
                    stats.num_paused,
                    stats.num_waiting,
                    stats.used_blocks,
                    promised,
                )
            )
            if len(self._samples) == 2 * MAX_SAMPLES:
                self._samples = self._samples[1::2]
                self._stride *= 2

    def result(self, duration_s: float, slo: Slo) -> RunResult:
        """Sum the run up. ``duration_s``: from the first arrival to the end of the last step."""
        if not self._is_ended.all():
            missing = int(np.flatnonzero(~self._is_ended)[0])
            raise ValidationFailedError(f"Request {missing} never ended: please report this.")
        requests = Requests(**self._times, num_pauses=self._num_pauses)
        num_done = len(self._workload) - self._num_refused
        num_good = int(_is_good(requests, slo).sum())
        totals = self._totals
        pool_seconds = max(self._num_blocks * self._busy_s, 1e-12)
        used, promised = (self._block_seconds / pool_seconds).tolist()
        values = {
            "duration_s": duration_s,
            "completed": float(num_done),
            "refused": float(self._num_refused),
            "request_rate": num_done / duration_s,
            "output_tok_s": totals["tokens"] / duration_s,
            **_percentiles("ttft", requests.ttft_s),
            **{f"itl_p{q}_s": count_percentile(self._itl_us, q) / 1e6 for q in PERCENTILES},
            **_percentiles("tpot", requests.tpot_s),
            **_percentiles("e2e", requests.e2e_s),
            **_percentiles("queue", requests.queue_s),
            "goodput_rate": num_good / duration_s,
            "good_share": num_good / len(self._workload),
            "kept_up": _kept_up(self._workload, requests.e2e_s),
            "pauses": float(totals["pauses"]),
            "recomputed_tokens": float(totals["recomputed"]),
            "prefix_hit_tokens": float(totals["prefix_hits"]),
            "pool_used": used,
            "pool_used_peak": self._peak_used / self._num_blocks,
            "pool_promised": promised,
            "declared_ratio": self._workload.declared_ratio,
            "cut_answers": float(self._workload.num_cut),
            "steps": float(totals["steps"]),
            "slot_use": totals["rows"] / max(1, totals["steps"] * self._max_batch_size),
        }
        return RunResult(values, requests, tuple(self._samples))

    def _finish(self, request: FinishedRequest) -> None:
        number = self._end(request.request_id)
        expected = int(self._answer_len[number])
        if request.reason not in (FinishReason.STOP, FinishReason.LENGTH) or request.num_generated_tokens != expected:
            raise ValidationFailedError(
                f"Request {number} ended with '{request.reason.value}' after {request.num_generated_tokens} tokens, "
                f"not after {expected}: please report this."
            )
        self._num_pauses[number] = request.num_pauses
        for name, column in self._times.items():
            value = getattr(request, name)
            if value is not None:
                column[number] = value

    def _end(self, request_id: str) -> int:
        number = int(request_id)
        if self._is_ended[number]:
            raise ValidationFailedError(f"Request {number} ended twice: please report this.")
        self._is_ended[number] = True
        return number


def count_percentile(counts: Counter[int], q: float) -> float:
    """Percentile of a multiset, interpolated linearly as numpy does; NaN of an empty one."""
    if not counts:
        return float("nan")
    values = np.array(sorted(counts))
    ends = np.cumsum([counts[value] for value in values.tolist()])
    rank = q / 100 * (ends[-1] - 1)
    low, high = values[np.searchsorted(ends, [np.floor(rank), np.ceil(rank)], side="right")].tolist()
    return float(low + (high - low) * (rank - np.floor(rank)))


def statistics(seconds: Floats, percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and ``p<percentile>`` of some times, by these names; NaN of none."""
    if not len(seconds):
        return dict.fromkeys(["mean", "median", "std", *(f"p{q:g}" for q in percentiles)], float("nan"))
    return {
        "mean": float(seconds.mean()),
        "median": float(np.median(seconds)),
        "std": float(seconds.std()),
        **{f"p{q:g}": float(np.percentile(seconds, q)) for q in percentiles},
    }


def _percentiles(name: str, seconds: Floats) -> dict[str, float]:
    known = seconds[~np.isnan(seconds)]
    return {f"{name}_p{q}_s": float(np.percentile(known, q)) if len(known) else float("nan") for q in PERCENTILES}


def _kept_up(workload: Workload, e2e_s: Floats) -> float:
    """How fast requests ended over how fast they came, at most 1; NaN if they did not come at times of their own.

    Of both, the middle 80 % count: the last answers take their time at any rate. Refused ones never end.
    """
    came_s = float(np.subtract(*np.percentile(workload.arrival_s, [90, 10])))
    ends_s = (workload.arrival_s + e2e_s)[~np.isnan(e2e_s)]
    if workload.max_concurrency is not None or came_s <= 0 or not len(ends_s):
        return float("nan")
    ended_s = float(np.subtract(*np.percentile(ends_s, [90, 10])))
    return len(ends_s) / len(e2e_s) * min(1.0, came_s / max(ended_s, 1e-12))


def _is_good(requests: Requests, slo: Slo) -> npt.NDArray[np.bool_]:
    """Whether each request finished within the limits; one without a time per token keeps any limit on it."""
    columns = {"ttft": requests.ttft_s, "tpot": np.nan_to_num(requests.tpot_s), "e2el": requests.e2e_s}
    good = ~np.isnan(requests.e2e_s)
    for name, limit_s in slo.limits:
        good &= columns[name] <= limit_s
    return good
