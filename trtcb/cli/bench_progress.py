"""How far a benchmark is: a bar on a terminal, nothing anywhere else."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Counts what is done; ``note`` is shown beside the bar."""

    def __call__(self, amount: int = 1, *, note: str = "") -> None:
        """Count ``amount`` more."""


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Advance]:
    """Show a bar on standard error while the context is open, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda amount=1, *, note="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=32), MofNCompleteColumn())
    columns_after = (TextColumn("eta"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, *columns_after, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total, note="")

        def advance(amount: int = 1, *, note: str = "") -> None:
            progress.update(task, advance=amount, note=note)

        yield advance
