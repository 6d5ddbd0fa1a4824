"""All that ``trtcb bench policy`` found out, as text, JSON and HTML."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trtcb.bench.ab import Comparison, LoadPoint
from trtcb.bench.knee import Criterion, Knee
from trtcb.bench.report import html_report
from trtcb.bench.table import (
    frontier_rows,
    frontier_to_json,
    headline,
    knee_rows,
    knees_to_json,
    per_request,
    rows,
    text_table,
    to_json,
)


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """The comparison, what was run at other rates, and the knees if they were searched."""

    comparison: Comparison
    frontier: Sequence[LoadPoint] = ()
    knees: Sequence[Knee] = ()
    criterion: Criterion = field(default_factory=Criterion)

    def text(self, *, with_requests: bool) -> str:
        """Tables for a terminal."""
        comparison = self.comparison
        parts = [f"{headline(comparison)}\n{comparison.workload}", text_table(rows(comparison))]
        for title, table in self._more_tables().items():
            parts += [f"{title}:", text_table(table)]
        if with_requests:
            parts += ["Queue wait / first token / end, in seconds from arrival:", text_table(per_request(comparison))]
        return "\n\n".join([*parts, *([str(comparison.check)] if comparison.check else [])])

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        data = {**to_json(self.comparison), "frontier": frontier_to_json(self.frontier)}
        return {**data, "search": knees_to_json(self.knees, self.criterion)} if self.knees else data

    def html(self, command: str) -> str:
        """One page; ``command`` makes it again."""
        return html_report(self.comparison, command, self.frontier, self._more_tables())

    def _more_tables(self) -> dict[str, list[list[str]]]:
        tables = {}
        if self.knees:
            least = f"{100 * self.criterion.share:g} % {self.criterion.title}"
            tables[f"Knees: the highest rates with {least}"] = knee_rows(self.knees, self.criterion)
        if self.frontier:
            labels = [result.setup.label for result in self.comparison.results]
            title = f"Output tokens/s / TTFT p95 (ms) / {self.criterion.title} (%)"
            tables[title] = frontier_rows(self.frontier, labels, self.criterion)
        return tables
