"""Where the time of a run's steps went: prefill and decode apart, by what their calls do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trtcb.bench.machine_limits import MachineLimits
from trtcb.bench.step_work import CallWork, WorkLoad
from trtcb.bench.table import counted, shown_number, text_table
from trtcb.executor.stats import StepStats

if TYPE_CHECKING:
    from trtcb.executor.step_profile import StepProfile  # with numba, before its threads are set up

SAMPLING, PYTHON, WAITING = "sampling", "Python", "waiting"


@dataclass(frozen=True, slots=True)
class Line:
    """What some calls took in all steps together. ``part_of`` names the group of a product; its line has their sum.

    ``seconds`` are those in which threads worked, over the number of threads; ``waiting_s`` those of waiting inside the
    calls, likewise.
    """

    name: str
    seconds: float
    waiting_s: float = 0.0
    num_bytes: int = 0
    flops: int = 0
    part_of: str | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """The steps of one kind, ``prefill`` or ``decode``. The lines that are part of no other add up to ``seconds``."""

    name: str
    num_steps: int
    num_tokens: int
    num_threads: int
    seconds: float
    lines: tuple[Line, ...]

    def text(self, limits: MachineLimits) -> str:
        """A line a group, the longest first, in milliseconds a step; rates count the waiting inside the calls too."""
        table = [["ms a step", "time", "share", "waiting", "GB/s", "of read", "GFLOP/s", "of fp32 peak"]]
        table += [[_title(line), *self._cells(line, limits)] for line in self.lines]
        table.append(["step", shown_number(1000 * self.seconds / self.num_steps), "100 %", *[""] * 5])
        steps, tokens = counted(self.num_steps, "step"), self.num_tokens / self.num_steps
        return (
            f"{self.name}: {steps} of {shown_number(tokens)} tokens, on {counted(self.num_threads, 'thread')}\n"
            f"{text_table(table)}"
        )

    def to_json(self, limits: MachineLimits) -> dict[str, Any]:
        """Return JSON values; times and work are those of one step, on average."""
        return {
            "num_steps": self.num_steps,
            "tokens_per_step": self.num_tokens / self.num_steps,
            "num_threads": self.num_threads,
            "step_ms": 1000 * self.seconds / self.num_steps,
            "lines": [self._line_to_json(line, limits) for line in self.lines],
        }

    def _cells(self, line: Line, limits: MachineLimits) -> list[str]:
        values = self._line_to_json(line, limits)
        rates = (("gb_per_s", "share_of_read"), ("gflop_per_s", "share_of_peak"))
        cells = [shown_number(values["ms"]), _percent(values["share"])]
        cells.append(shown_number(values["waiting_ms"]) if line.waiting_s else "")
        for rate, share in rates:
            cells += ["", ""] if values[rate] is None else [shown_number(values[rate]), _percent(values[share])]
        return cells

    def _line_to_json(self, line: Line, limits: MachineLimits) -> dict[str, Any]:
        wall_s = line.seconds + line.waiting_s
        bytes_per_s = line.num_bytes / wall_s if line.num_bytes else None
        flops = line.flops / wall_s if line.flops else None
        return {
            "name": line.name,
            "part_of": line.part_of,
            "ms": 1000 * line.seconds / self.num_steps,
            "share": line.seconds / self.seconds,
            "waiting_ms": 1000 * line.waiting_s / self.num_steps,
            "num_bytes": line.num_bytes / self.num_steps,
            "flops": line.flops / self.num_steps,
            "gb_per_s": None if bytes_per_s is None else bytes_per_s / 1e9,
            "share_of_read": None if bytes_per_s is None else bytes_per_s / limits.read_bytes_per_s,
            "gflop_per_s": None if flops is None else flops / 1e9,
            "share_of_peak": None if flops is None else flops / limits.flops,
        }


class StepBreakdown:
    """Adds up the steps of a profiled engine, call by call. A step with prompt tokens counts as prefill.

    ``works`` are those of the program's calls. For each step, :meth:`profile` is called before :meth:`step`, so no
    step may be in flight while another one is collected.
    """

    def __init__(self, works: Sequence[CallWork]) -> None:
        self._works = works
        self._latest: StepProfile
        self._sums = {name: _Sums(len(works)) for name in ("prefill", "decode")}

    def profile(self, profile: "StepProfile") -> None:
        """Take in what the step that runs was made of."""
        self._latest = profile

    def step(self, stats: StepStats) -> None:
        """Take in what it was to the engine, whose time is that of the whole pass. A failed step does not count."""
        if stats.num_rows and not stats.step_errors:
            name = "prefill" if stats.prompt_tokens or stats.recomputed_tokens else "decode"
            self._sums[name].add(self._latest, stats.step_s)

    def phases(self) -> list[Phase]:
        """Return the kinds of steps that there were."""
        return [sums.phase(name, self._works) for name, sums in self._sums.items() if sums.num_steps]


class _Sums:
    """Sums over steps of one kind, in seconds; of calls ``[C]``."""

    def __init__(self, num_calls: int) -> None:
        self.num_steps = 0
        self.num_threads = 1
        self.load = WorkLoad()
        self.step_s = 0.0
        self.region_s = 0.0  # all calls, from before the threads were woken until they had met
        self.draw_s = 0.0
        self.wall_s: npt.NDArray[np.float64] = np.zeros(num_calls)
        self.busy_s: npt.NDArray[np.float64] = np.zeros(num_calls)

    def add(self, profile: "StepProfile", step_s: float) -> None:
        calls = profile.calls
        self.num_steps += 1
        self.num_threads = max(self.num_threads, calls.num_threads)
        self.load.add(profile)
        self.step_s += step_s
        self.region_s += (calls.ended_ns - calls.began_ns) / 1e9
        self.draw_s += profile.draw_ns / 1e9
        self.wall_s += calls.wall_ns / 1e9
        self.busy_s += calls.busy_ns / 1e9 / calls.num_threads

    def phase(self, name: str, works: Sequence[CallWork]) -> Phase:
        groups = [self._group(group, works) for group in dict.fromkeys(work.group for work in works)]
        lines = [line for group in sorted(groups, key=lambda group: -group[0].seconds) for line in group]
        lines.append(Line(SAMPLING, self.draw_s))
        lines.append(Line(PYTHON, self.step_s - self.region_s - self.draw_s))
        lines.append(Line(WAITING, self.region_s - float(self.busy_s.sum())))
        return Phase(name, self.num_steps, self.load.rows["tokens"], self.num_threads, self.step_s, tuple(lines))

    def _group(self, group: str, works: Sequence[CallWork]) -> list[Line]:
        """Return the group's line, and one for each product in it."""
        calls = [index for index, work in enumerate(works) if work.group == group]
        lines = [self._line(group, None, calls, works)]
        for label in dict.fromkeys(works[index].label for index in calls):
            if label:
                lines.append(self._line(label, group, [i for i in calls if works[i].label == label], works))
        return lines

    def _line(self, name: str, part_of: str | None, calls: list[int], works: Sequence[CallWork]) -> Line:
        busy_s, wall_s = float(self.busy_s[calls].sum()), float(self.wall_s[calls].sum())
        num_bytes = sum(works[index].num_bytes(self.load) for index in calls)
        flops = sum(works[index].flops(self.load) for index in calls)
        return Line(name, busy_s, wall_s - busy_s, num_bytes, flops, part_of)


def _title(line: Line) -> str:
    return line.name if line.part_of is None else f"  {line.name}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
