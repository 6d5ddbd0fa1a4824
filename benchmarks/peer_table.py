"""Rates of a comparison, what they come to, and how that is written."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peer_lines import Configuration, Line

from trtcb.bench.table import shown_number, text_table

MIN_ROUNDS = 3
"""A median of fewer is no verdict: a shared machine is twice as slow for a minute."""


@dataclass(slots=True)
class Measured:
    """Tokens per second of one configuration on one line, a round each; ``error`` is why there are no more."""

    configuration: Configuration
    rates: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def median(self) -> float | None:
        """Median of the rates. One that failed has none: rounds that went well before would flatter it."""
        return statistics.median(self.rates) if self.rates and self.error is None else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one line."""

    line: Line
    measured: tuple[Measured, ...]

    def best(self, *, is_ours: bool) -> float | None:
        """Best median of trtcb's, or of the peers'."""
        medians = (m.median for m in self.measured if m.configuration.is_ours == is_ours)
        return max((median for median in medians if median is not None), default=None)

    @property
    def ratio(self) -> float | None:
        """Return trtcb's best median over the peers' best; None without one of them."""
        ours, peers = self.best(is_ours=True), self.best(is_ours=False)
        return None if ours is None or peers is None else ours / peers

    @property
    def verdict(self) -> str:
        """Say whether the target is met, after enough rounds and beside a peer."""
        num_rounds = min((len(m.rates) for m in self.measured if m.median is not None), default=0)
        if self.ratio is None or num_rounds < MIN_ROUNDS:
            return "not judged"
        return "met" if self.ratio >= self.line.target else "missed"

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "line": self.line.name,
            "target": self.line.target,
            "ratio": self.ratio,
            "verdict": self.verdict,
            "systems": [
                {
                    "name": m.configuration.name,
                    "median": m.median,
                    "rates": [round(rate, 2) for rate in m.rates],
                    "error": m.error,
                }
                for m in self.measured
            ],
        }


def table(outcomes: Sequence[Outcome], accuracy: Mapping[str, str]) -> str:
    """Write a block of rows a line: systems with their rates, the ratio to the best peer, and the verdict.

    What failed is under the table, in its own words.
    """
    rows = [["line", "system", "tokens/s", "min..max", "of best peer", "target", "verdict", "accuracy"]]
    failures = []
    for outcome in outcomes:
        ours, peers = outcome.best(is_ours=True), outcome.best(is_ours=False)
        name = outcome.line.name
        for number, m in enumerate(outcome.measured):
            title = m.configuration.name
            shown_accuracy = accuracy.get(title, "not measured") if m.configuration.is_ours else ""
            is_judged = number == 0 if ours is None else m.configuration.is_ours and m.median == ours
            judged = [f">= {outcome.line.target:g}", outcome.verdict] if is_judged else ["", ""]
            if m.median is None:
                rows.append([name, title, "failed" if m.error else "not measured", "", "", *judged, shown_accuracy])
                failures += [f"failed: {outcome.line.name}, {title}: {m.error}"] if m.error else []
            else:
                span = f"{shown_number(min(m.rates))}..{shown_number(max(m.rates))}"
                ratio = "" if peers is None else f"{m.median / peers:.2f}"
                rows.append([name, title, shown_number(m.median), span, ratio, *judged, shown_accuracy])
            name = ""
    return "\n".join([text_table(rows), *failures])


def accuracy_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Read the reports of ``trtcb eval --json``: by configuration, KL and top-1 against the report's reference."""
    found = {}
    for report in reports:
        drift, plan = report["drift"], report["plan"]
        if drift is not None:
            words = f"KL {drift['mean_kl']:.4f}, top-1 {drift['top1']:.1%} (KV {plan['kv_dtype']})"
            found[f"trtcb {plan['weight_dtype']}"] = words
    return found
