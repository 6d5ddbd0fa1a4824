"""A comparison as plain text and as JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trtcb.bench.ab import Comparison, Estimate, LoadPoint, Result
from trtcb.bench.knee import Criterion, Knee


@dataclass(frozen=True, slots=True)
class Column:
    """How a metric is shown: its title, and its unit (``s`` becomes ms, ``%`` is a share)."""

    metric: str
    title: str
    unit: str = ""


def _latency(name: str, title: str) -> list[Column]:
    return [Column(f"{name}_p{q}_s", f"{title} p{q} (ms)", "ms") for q in (50, 95, 99)]


COLUMNS: tuple[Column, ...] = (
    Column("output_tok_s", "output tokens/s"),
    Column("request_rate", "requests/s"),
    *_latency("ttft", "TTFT"),
    *_latency("itl", "ITL"),
    *_latency("tpot", "TPOT"),
    *_latency("e2e", "E2E"),
    *_latency("queue", "queue wait"),
    Column("goodput_rate", "goodput (requests/s)"),
    Column("good_share", "requests within SLO (%)", "%"),
    Column("kept_up", "arrival rate kept up (%)", "%"),
    Column("pauses", "pauses"),
    Column("recomputed_tokens", "recomputed tokens"),
    Column("prefix_hit_tokens", "prefix hits (tokens)"),
    Column("pool_used", "pool used, mean (%)", "%"),
    Column("pool_used_peak", "pool used, peak (%)", "%"),
    Column("pool_promised", "pool used + reserved, mean (%)", "%"),
    Column("declared_ratio", "declared / true output length"),
    Column("cut_answers", "answers cut at their limit"),
    Column("slot_use", "slot-steps used (%)", "%"),
    Column("steps", "steps"),
    Column("completed", "completed"),
    Column("refused", "refused"),
    Column("duration_s", "duration (s)"),
)
LIMITED = ("goodput_rate", "good_share")  # say something only where limits were set


def shown(estimate: Estimate, unit: str) -> str:
    """Write a value in its unit, with its confidence interval if there is one."""
    scale = {"ms": 1000.0, "%": 100.0}.get(unit, 1.0)
    text = shown_number(estimate.mean * scale)
    return text if math.isnan(estimate.margin) else f"{text} ± {_margin(estimate.margin * scale)}"


def headline(comparison: Comparison) -> str:
    """Say on what was run, and how much of it."""
    requests = counted(comparison.num_requests, "request")
    repeats = counted(len(comparison.results[0].runs), "repeat")
    return f"{comparison.target}; {requests}, seed {comparison.seed}, {repeats}"


def rows(comparison: Comparison) -> list[list[str]]:
    """Return the table: a header, then a metric a row and a configuration a column."""
    baseline = comparison.results[0]
    table = [["", *(result.setup.label for result in comparison.results)]]
    table.append(["throughput vs first", *(shown(r.speedup(baseline), "") for r in comparison.results)])
    for column in COLUMNS:
        if column.metric in LIMITED and not comparison.slo.limits:
            continue
        values = (shown(result.estimate(column.metric), column.unit) for result in comparison.results)
        table.append([column.title, *values])
    return table


def text_table(table: list[list[str]]) -> str:
    """Align a table for a terminal; it is valid Markdown as well."""
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    lines = []
    for number, row in enumerate(table):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
        if number == 0:
            rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
            lines.append(f"| {' | '.join(rule)} |")
    return "\n".join(lines)


def frontier_rows(points: Sequence[LoadPoint], labels: Sequence[str], criterion: Criterion) -> list[list[str]]:
    """Return throughput, p95 of the first token and the criterion's share: a rate a row, a configuration a column."""
    table = [["requests/s", *labels]]
    for point in points:
        shown_there = {result.setup.label: _load_point(result, criterion) for result in point.comparison.results}
        table.append([shown_rate(point.rate), *(shown_there.get(label, "") for label in labels)])
    return table


def knee_rows(knees: Sequence[Knee], criterion: Criterion) -> list[list[str]]:
    """Return a configuration a row: its knee, the rate that broke it, and what was measured at the knee."""
    columns = (("output tokens/s", "output_tok_s", ""), ("TTFT p95 (ms)", "ttft_p95_s", "ms"))
    table = [["", "knee (requests/s)", "broken at", f"{criterion.title} (%)", *(title for title, _, _ in columns)]]
    for knee in knees:
        metrics = ((criterion.metric, "%"), *((metric, unit) for _, metric, unit in columns))
        at_knee = ["-" if knee.result is None else shown(knee.result.estimate(m), unit) for m, unit in metrics]
        table.append([knee.label, shown_rate(knee.rate) if knee.rate else "none", shown_rate(knee.broken_at), *at_knee])
    return table


def shown_rate(rate: float) -> str:
    """Write a request rate."""
    return f"{rate:.4g}" if math.isfinite(rate) else "all at once"


def per_request(comparison: Comparison) -> list[list[str]]:
    """Return start, first token and end of every request of the first repeat, in seconds from its arrival."""
    results = comparison.results
    table = [["request", *(result.setup.label for result in results)]]
    for number in range(comparison.num_requests):
        table.append([str(number), *(_times(result, number) for result in results)])
    return table


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON values; a number that does not exist is null."""
    return {
        "target": comparison.target,
        "workload": comparison.workload,
        "slo_s": dict(comparison.slo.limits),
        "seed": comparison.seed,
        "num_requests": comparison.num_requests,
        "token_check": None if comparison.check is None else asdict(comparison.check),
        "results": [
            {
                "label": result.setup.label,
                "config": asdict(result.setup.config),
                "metrics": {
                    column.metric: {
                        "mean": _finite(result.estimate(column.metric).mean),
                        "ci95": _finite(result.estimate(column.metric).margin),
                        "runs": [_finite(run.values[column.metric]) for run in result.runs],
                    }
                    for column in COLUMNS
                },
            }
            for result in comparison.results
        ],
    }


def knees_to_json(knees: Sequence[Knee], criterion: Criterion) -> dict[str, Any]:
    """Return the knees as JSON values: a rate of null is none, ``"inf"`` all at once."""
    return {
        "metric": criterion.metric,
        "share": criterion.share,
        "knees": [
            {"label": knee.label, "rate": _json_rate(knee.rate or None), "broken_at": _json_rate(knee.broken_at)}
            for knee in knees
        ],
    }


def frontier_to_json(points: Sequence[LoadPoint]) -> list[dict[str, Any]]:
    """Return a comparison a rate."""
    return [{"request_rate": _json_rate(point.rate), **to_json(point.comparison)} for point in points]


def _json_rate(rate: float | None) -> float | str | None:
    return rate if rate is None or math.isfinite(rate) else "inf"


def _load_point(result: Result, criterion: Criterion) -> str:
    columns = (("output_tok_s", ""), ("ttft_p95_s", "ms"), (criterion.metric, "%"))
    return " / ".join(shown(Estimate(result.estimate(metric).mean, math.nan), unit) for metric, unit in columns)


def _times(result: Result, number: int) -> str:
    requests = result.runs[0].requests
    if math.isnan(requests.e2e_s[number]):
        return "refused"
    times = (requests.queue_s[number], requests.ttft_s[number], requests.e2e_s[number])
    return " / ".join(f"{float(value):.3f}" for value in times)


def counted(count: int, noun: str) -> str:
    """Write a count and what it counts."""
    return f"{count:,} {noun}{'s'[: count != 1]}"


def shown_number(value: float) -> str:
    """Write a number with the digits that count; - if there is none."""
    if math.isnan(value):
        return "-"
    if value == round(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if abs(value) >= 0.01 else f"{value:.2g}"


def _margin(value: float) -> str:
    """Two digits that count: an interval is no better known."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
