"""A comparison as one HTML file that needs nothing else: no script, no font, no picture from anywhere."""

from collections.abc import Mapping, Sequence
from html import escape
from types import MappingProxyType

import numpy as np

from trtcb.bench.ab import Comparison, LoadPoint, Result
from trtcb.bench.metrics import Floats
from trtcb.bench.svg import DASHES, NUM_COLOURS, Line, legend, line_chart
from trtcb.bench.table import headline, rows

_CDF_POINTS = 200
# Distinguishable in print and with the common colour deficiencies, in both schemes.
_LIGHT = ("#0b62c4", "#c2510c", "#1a7f5a", "#8a3ffc", "#a11950", "#6b5d00")
_DARK = ("#6cb0ff", "#ff9f5e", "#4fd1a1", "#c4a1ff", "#ff8fb8", "#e0cf5a")


def html_report(
    comparison: Comparison,
    command: str,
    frontier: Sequence[LoadPoint] = (),
    more_tables: Mapping[str, list[list[str]]] = MappingProxyType({}),
) -> str:
    """Render the report; ``command`` is shown as the way to make it again, ``frontier`` is the same at other rates.

    ``more_tables`` follow the numbers, each under its title.
    """
    names = [result.setup.label for result in comparison.results]
    body = [
        "<h1>Scheduling comparison</h1>",
        f"<p>{escape(headline(comparison))}.</p>",
        f"<p>{escape(comparison.workload)}</p>",
        f"<pre>{escape(command)}</pre>",
        *([f"<p>{escape(str(comparison.check))}</p>"] if comparison.check else []),
        "<h2>Latency</h2>",
        legend(names),
        '<div class="charts">',
        _figure("Time to first token", _cdf_chart("Time to first token", comparison, "ttft_s")),
        _figure("Time to the whole answer", _cdf_chart("Time to the whole answer", comparison, "e2e_s")),
        *([_figure("Throughput and latency as the rate rises", _frontier_chart(frontier, names))] if frontier else []),
        "</div>",
        "<h2>Requests over time, first repeat</h2>",
        legend(["running", "paused", "waiting"]),
        '<div class="charts">',
        *(_figure(result.setup.label, _timeline(result)) for result in comparison.results),
        "</div>",
        "<h2>Numbers</h2>",
        _table(rows(comparison)),
        *(f"<h2>{escape(title)}</h2>{_table(table)}" for title, table in more_tables.items()),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>Scheduling comparison</title><style>{_style()}</style></head>\n"
        f"<body>{chr(10).join(body)}</body></html>\n"
    )


def _cdf_chart(title: str, comparison: Comparison, column: str) -> str:
    lines = []
    for index, result in enumerate(comparison.results):
        seconds = np.concatenate([getattr(run.requests, column) for run in result.runs])
        lines.append(Line(result.setup.label, index, _cdf(seconds)))
    # Policies differ by orders of magnitude, hence the logarithm.
    return line_chart(
        f"{title}, share of requests",
        lines,
        x_title="seconds (log)",
        y_title="share of requests",
        y_max=1.0,
        log_x=True,
    )


def _cdf(seconds: Floats) -> list[tuple[float, float]]:
    """Points of the distribution function; every request has its part in it, refused ones never get there."""
    known = np.sort(seconds[~np.isnan(seconds)])
    if not len(known):
        return []
    ranks = np.unique(np.linspace(0, len(known) - 1, min(len(known), _CDF_POINTS)).astype(int))
    shares = (ranks + 1) / len(seconds)
    return [(float(known[0]), 0.0), *zip(known[ranks].tolist(), shares.tolist(), strict=True)]


def _frontier_chart(frontier: Sequence[LoadPoint], labels: Sequence[str]) -> str:
    """First token's p95 over throughput, a point a rate in ascending order."""
    lines = []
    for index, label in enumerate(labels):
        results = [result for point in frontier for result in point.comparison.results if result.setup.label == label]
        points = [(r.estimate("output_tok_s").mean, r.estimate("ttft_p95_s").mean) for r in results]
        lines.append(Line(label, index, points, has_marks=True))
    title = "Time to first token, p95, over output tokens a second"
    return line_chart(title, lines, x_title="output tokens/s", y_title="TTFT p95, seconds, log", log_y=True)


def _timeline(result: Result) -> str:
    samples = result.runs[0].samples
    # A waiting request was never started; a paused one was.
    lines = [
        Line("running", 0, [(sample.now_s, sample.num_running) for sample in samples], is_step=True),
        Line("paused", 1, [(sample.now_s, sample.num_paused) for sample in samples], is_step=True),
        Line("waiting", 2, [(sample.now_s, sample.num_waiting) for sample in samples], is_step=True),
    ]
    title = f"{result.setup.label}: requests running, paused and waiting"
    return line_chart(title, lines, x_title="seconds", y_title="requests")


def _figure(caption: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{chart}</figure>"


def _table(table: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table[0])
    lines = [f"<tr>{head}</tr>"]
    for title, *cells in table[1:]:
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(title)}</th>{values}</tr>')
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _style() -> str:
    def colours(values: tuple[str, ...]) -> str:
        return "".join(f"--c{index}:{value};" for index, value in enumerate(values))

    uses = "".join(f".c{index}{{stroke:var(--c{index})}}" for index in range(NUM_COLOURS))
    uses += "".join(f".d{index}{{stroke-dasharray:{dash}}}" for index, dash in enumerate(DASHES))
    return (
        f":root{{color-scheme:light dark;--back:#fff;--text:#1b1f24;--dim:#59636e;--grid:#d9dee3;{colours(_LIGHT)}}}"
        "@media(prefers-color-scheme:dark){:root{--back:#14171a;--text:#e6e9ec;--dim:#9aa4ae;--grid:#30363d;"
        f"{colours(_DARK)}}}}}"
        "body{font:15px/1.5 system-ui,sans-serif;max-width:1120px;margin:2rem auto;padding:0 1rem;"
        "background:var(--back);color:var(--text)}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}"
        "pre{white-space:pre-wrap;overflow-wrap:anywhere;padding:.6rem .8rem;border:1px solid var(--grid);"
        "border-radius:6px}.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));"
        "gap:1rem}figure{margin:0}figcaption{font-weight:600}svg{width:100%;height:auto;overflow:visible}"
        ".grid{stroke:var(--grid)}.tick,.axis{fill:var(--dim);font-size:12px}"
        ".mark{fill:var(--back);stroke-width:1.5}.line{fill:none;stroke-width:2;stroke-linejoin:round}"
        ".legend{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;padding:0}"
        "svg.key{width:2.4rem;height:6px;margin-right:.4rem;vertical-align:middle}"
        ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
        "th,td{padding:.25rem .7rem;border-bottom:1px solid var(--grid);text-align:right;white-space:nowrap}"
        f"th[scope=row]{{text-align:left;font-weight:400;color:var(--dim)}}{uses}"
    )
