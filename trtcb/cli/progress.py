"""Stages on a terminal as bars with an ETA, and as plain lines anywhere else."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from trtcb.memory import format_size

if TYPE_CHECKING:
    from rich.progress import TaskID

_PLAIN_STEP = 0.1  # a plain line each tenth of a stage, and not more often than
_PLAIN_INTERVAL_S = 10.0


class StageDisplay(Protocol):
    """Shows a build while its context is open; the callbacks are those of :mod:`trtcb.builder.report`."""

    def on_stage(self, name: str, total: int) -> None:
        """Begin a stage of ``total`` bytes, or of what the display's ``size`` writes; 0 if that is not known."""

    def on_progress(self, amount: int) -> None:
        """Count ``amount`` more of them."""

    def __enter__(self) -> "StageDisplay":
        """Start showing."""

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""


def stage_display(
    out: TextIO = sys.stderr, size: Callable[[int], str] = format_size, name_width: int = 12
) -> StageDisplay:
    """Choose the display that ``out`` can show; the others are :class:`BarDisplay`'s."""
    return BarDisplay(size, name_width) if out.isatty() else LineDisplay(out, size)


class BarDisplay:
    """One line a stage; the running one has a bar, its rate and what is left of its time.

    ``size`` writes a stage's total, which is bytes unless the stages measure something else. ``name_width`` are the
    columns of the longest stage's name.
    """

    def __init__(self, size: Callable[[int], str] = format_size, name_width: int = 12) -> None:
        self._size = size
        # Here and not above: plain output does not pay for these imports.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn(f"{{task.description:<{name_width}}}"),
            BarColumn(bar_width=32),
            TextColumn("{task.fields[size]:>10}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: TaskID | None = None

    def on_stage(self, name: str, total: int) -> None:
        """Complete the running stage's bar and add one."""
        self._complete()
        size = self._size(total) if total else ""
        self._task = self._progress.add_task(name, total=total or None, size=size)

    def on_progress(self, amount: int) -> None:
        """Move the running stage's bar."""
        if self._task is not None:
            self._progress.advance(self._task, amount)

    def __enter__(self) -> "BarDisplay":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._complete()
        self._progress.stop()

    def _complete(self) -> None:
        if self._task is not None:
            # A stage without a measure has no total until it is over.
            total = self._progress.tasks[self._task].total or 1
            self._progress.update(self._task, total=total, completed=total)


class LineDisplay:
    """A line when a stage begins, and a few while a long one runs: what a log file or a CI job can show.

    ``size`` is as in :class:`BarDisplay`.
    """

    def __init__(self, out: TextIO, size: Callable[[int], str] = format_size) -> None:
        self._out = out
        self._size = size
        self._name = ""
        self._total = self._done = 0
        self._started = self._told_at = 0.0
        self._told_share = 0.0

    def on_stage(self, name: str, total: int) -> None:
        """Print the stage's name and size."""
        self._name, self._total, self._done = name, total, 0
        self._started = self._told_at = time.monotonic()
        self._told_share = 0.0
        self._say(f"{name} ({self._size(total)})" if total else name)

    def on_progress(self, amount: int) -> None:
        """Print the share that is done and the time left, seldom."""
        self._done += amount
        now = time.monotonic()
        if now - self._told_at < _PLAIN_INTERVAL_S:
            return
        if not self._total:
            self._told_at = now
            self._say(f"{self._name}, {self._done} so far")
            return
        share = min(1.0, self._done / self._total)
        if share - self._told_share < _PLAIN_STEP:
            return
        self._told_share, self._told_at = share, now
        left = (now - self._started) * (1 - share) / share
        self._say(f"{self._name} {share:.0%}, {left:.0f} s left")

    def __enter__(self) -> "LineDisplay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.flush()

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)
