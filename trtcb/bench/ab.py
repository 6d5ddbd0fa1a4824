"""Compares configurations under the same arrivals, over repeats, and says how sure it is."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from trtcb.bench.metrics import RunResult, Slo
from trtcb.bench.targets import Setup, Target
from trtcb.bench.token_check import TokenCheck, TokenLog, check_tokens
from trtcb.bench.workload import Workload
from trtcb.errors import UsageError

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


class WorkloadSource(Protocol):
    """Something that draws workloads."""

    def generate(self, seed: int) -> Workload:
        """Draw the workload of this seed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over repeats and half its 95 % confidence interval; NaN of a single run."""

    mean: float
    margin: float

    @staticmethod
    def of(values: Sequence[float]) -> "Estimate":
        """Estimate from independent repeats, by Student's t."""
        count = len(values)
        mean = math.fsum(values) / count
        if count < 2:
            return Estimate(mean, math.nan)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
        quantile = _T95[count - 2] if count - 2 < len(_T95) else 1.96
        return Estimate(mean, quantile * deviation / math.sqrt(count))


@dataclass(frozen=True, slots=True)
class Result:
    """All runs of one configuration, one a repeat; repeat ``r`` had the workload of seed ``seed + r``."""

    setup: Setup
    runs: tuple[RunResult, ...]

    def estimate(self, metric: str) -> Estimate:
        """Mean of a metric over the repeats."""
        return Estimate.of([run.values[metric] for run in self.runs])

    def speedup(self, baseline: "Result") -> Estimate:
        """Output tokens a second relative to another configuration's, repeat by repeat under the same arrivals."""
        pairs = zip(self.runs, baseline.runs, strict=True)
        return Estimate.of([one.values["output_tok_s"] / other.values["output_tok_s"] for one, other in pairs])


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out, with what is needed to run it again."""

    target: str
    workload: str
    slo: Slo
    seed: int
    num_requests: int
    results: tuple[Result, ...]
    check: TokenCheck | None = None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a comparison; ``finished`` is what was complete by then, None if nothing was."""

    def __init__(self, finished: Comparison | None) -> None:
        super().__init__()
        self.finished = finished


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What came out at one request rate, of all configurations or of those that were tried there."""

    rate: float
    comparison: Comparison


def compare(
    setups: Sequence[Setup],
    target: Target,
    source: WorkloadSource,
    *,
    slo: Slo,
    seed: int,
    repeats: int,
    on_run: Callable[[str, int], None],
    on_done: Callable[[str, int, RunResult], None] = lambda label, repeat, run: None,
    max_concurrency: int | None = None,
    num_checked: int = 0,
) -> Comparison:
    """Run every configuration under every repeat's workload.

    ``on_run`` is told of each run before it starts, ``on_done`` after it. Ctrl-C raises :class:`Interrupted`.

    With ``max_concurrency`` clients hold requests back while so many are unfinished. Of every repeat, ``num_checked``
    requests are served alone too, and their tokens compared (:mod:`trtcb.bench.token_check`).
    """
    if repeats < 1:
        raise UsageError(f"--repeats must be at least 1, not {repeats}.")
    labels = [setup.label for setup in setups]
    if len(set(labels)) < len(labels):
        raise UsageError("Two of the configurations are the same: change one, or use --repeats.")
    runs: list[list[RunResult]] = [[] for _ in setups]
    num_requests, check = 0, None
    is_interrupted = False
    try:
        for repeat in range(repeats):
            workload = replace(source.generate(seed + repeat), max_concurrency=max_concurrency)
            num_requests = len(workload)
            logs = {setup.label: TokenLog(num_requests) for setup in setups} if num_checked else {}
            for setup, its_runs in zip(setups, runs, strict=True):
                on_run(setup.label, repeat)
                its_runs.append(target.run(setup.config, workload, slo, logs.get(setup.label)))
                on_done(setup.label, repeat, its_runs[-1])
            if num_checked:
                on_run("each alone", repeat)
                alone = partial(target.alone, setups[0].config, workload)
                found = _checked(logs, [its_runs[-1] for its_runs in runs], num_checked, alone)
                check = found if check is None else check + found
    except KeyboardInterrupt:
        is_interrupted = True
    comparison = Comparison(
        target=target.description,
        workload=str(source) if max_concurrency is None else f"{source}; at most {max_concurrency} unfinished",
        slo=slo,
        seed=seed,
        num_requests=num_requests,
        results=_finished(setups, runs),
        check=check,
    )
    if is_interrupted:
        raise Interrupted(comparison if comparison.results else None)
    return comparison


def _checked(
    logs: Mapping[str, TokenLog],
    runs: Sequence[RunResult],
    num_checked: int,
    alone: Callable[[Collection[int]], TokenLog],
) -> TokenCheck:
    requests = [run.requests for run in runs]
    num_pauses = np.sum([one.num_pauses for one in requests], axis=0)
    is_served = np.isfinite(np.sum([one.e2e_s for one in requests], axis=0))  # NaN: refused by some
    return check_tokens(logs, num_pauses, is_served, num_checked, alone)


def _finished(setups: Sequence[Setup], runs: Sequence[Sequence[RunResult]]) -> tuple[Result, ...]:
    """Return the whole repeats; if there is none, those configurations that the first one got to."""
    num_repeats = max(1, min(map(len, runs)))
    pairs = zip(setups, runs, strict=True)
    return tuple(Result(setup, tuple(its_runs[:num_repeats])) for setup, its_runs in pairs if its_runs)
