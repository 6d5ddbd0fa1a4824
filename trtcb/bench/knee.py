"""Finds how far a configuration can be loaded: the highest rate at which it still does what is asked of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trtcb.bench.ab import Comparison, LoadPoint, Result

_START_RATE = 1.0
_LOWEST_RATE = 2.0**-12
_HIGHEST_RATE = 2.0**20


@dataclass(frozen=True, slots=True)
class Criterion:
    """What must hold at a rate: of ``metric``, a share from 0 to 1, at least ``share``."""

    metric: Literal["good_share", "kept_up"] = "good_share"
    share: float = 0.95

    @staticmethod
    def of(has_slo: bool, share: float) -> "Criterion":
        """Return the usual one: requests within the limits if there are any, else throughput that keeps up."""
        return Criterion("good_share" if has_slo else "kept_up", share)

    @property
    def title(self) -> str:
        """Return what is counted, in words."""
        return "requests within SLO" if self.metric == "good_share" else "arrival rate kept up"

    def value(self, result: Result) -> float:
        """Mean over the repeats."""
        return result.estimate(self.metric).mean

    def holds(self, result: Result) -> bool:
        """Whether a configuration did it; one of which nothing is known did not."""
        return self.value(result) >= self.share


@dataclass(frozen=True, slots=True)
class Knee:
    """The highest rate tried at which the criterion held: 0 if there is none, infinite if it holds for all at once.

    ``broken_at`` is the lowest rate above it at which it did not. ``points`` are all that were tried.
    """

    label: str
    rate: float
    broken_at: float
    points: tuple[LoadPoint, ...]

    @property
    def result(self) -> Result | None:
        """What was measured at the knee."""
        return next((point.comparison.results[0] for point in self.points if point.rate == self.rate), None)


class KneeSearch:
    """Searches one configuration: rates double from 1 (or halve) until the criterion breaks, then are bisected.

    ``measure`` runs the configuration at a rate, with the same seeds at every rate. The search ends when the rates
    around the knee differ by at most the share ``width``. ``on_point`` is told of each rate.
    """

    def __init__(
        self,
        measure: Callable[[float], Comparison],
        criterion: Criterion,
        width: float,
        on_point: Callable[[str, float, float, bool], None] = lambda label, rate, share, holds: None,
    ) -> None:
        self._measure = measure
        self._criterion = criterion
        self._width = width
        self._on_point = on_point
        self._points: list[LoadPoint] = []

    def run(self) -> Knee:
        """Find the knee."""
        low, high = self._bracket()
        while low > 0 and high / low > 1 + self._width and math.isfinite(high):
            middle = math.sqrt(low * high)
            if self._holds(middle):
                low = middle
            else:
                high = middle
        points = sorted(self._points, key=lambda point: point.rate)
        return Knee(points[0].comparison.results[0].setup.label, low, high, tuple(points))

    def _bracket(self) -> tuple[float, float]:
        """Return a rate at which it holds and one, at most twice that, at which it does not."""
        # If it holds for everything at once, it holds at any rate, and doubling would never end. All at once, there is
        # no rate to keep up with.
        if self._criterion.metric == "good_share" and self._holds(math.inf):
            return math.inf, math.inf
        rate = _START_RATE
        if self._holds(rate):
            while rate < _HIGHEST_RATE and self._holds(2 * rate):
                rate *= 2
            return rate, 2 * rate
        while rate > _LOWEST_RATE:
            rate /= 2
            if self._holds(rate):
                return rate, 2 * rate
        return 0.0, rate

    def _holds(self, rate: float) -> bool:
        comparison = self._measure(rate)
        self._points.append(LoadPoint(rate, comparison))
        (result,) = comparison.results
        holds = self._criterion.holds(result)
        self._on_point(result.setup.label, rate, self._criterion.value(result), holds)
        return holds


def merged_points(knees: Sequence[Knee]) -> list[LoadPoint]:
    """Return the points of all searches, one a rate in ascending order, with those that were tried there."""
    merged: dict[float, Comparison] = {}
    for knee in knees:
        for rate, comparison in ((point.rate, point.comparison) for point in knee.points):
            there = merged.get(rate)
            results = (*there.results, *comparison.results) if there else comparison.results
            merged[rate] = replace(comparison, results=results)
    return [LoadPoint(rate, merged[rate]) for rate in sorted(merged)]
