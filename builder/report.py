"""How a build speaks to whoever watches it, and what it says when it is done."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

OnStage = Callable[[str, int], None]
"""``on_stage(name, total)``: a stage begins and the one before is over. ``total`` counts the units (bytes, tensors) of
work that ``on_progress`` will report, 0 if they are not known. Called on the thread that builds."""

OnProgress = Callable[[int], None]
"""``on_progress(amount)``: that many more units of the current stage are done. May be called very often."""


def ignore_stage(name: str, total: int) -> None:
    """Watch nothing (``OnStage``)."""


def ignore_progress(amount: int) -> None:
    """Watch nothing (``OnProgress``)."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Wall time of one stage."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class BuildReport:
    """A finished build. ``kv_bytes_per_token`` includes the scales; ``warnings`` are whole sentences."""

    path: Path
    plan_bytes: int
    kv_bytes_per_token: int
    num_params: int
    stages: tuple[StageTime, ...]
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class StageClock:
    """Announces stages and times them, for the code that builds."""

    on_stage: OnStage = ignore_stage
    _times: list[StageTime] = field(default_factory=list)
    _name: str = ""
    _start: float = 0.0

    def start(self, name: str, total: int = 0) -> None:
        """End the current stage and begin the next."""
        self._end()
        self._name, self._start = name, time.perf_counter()
        self.on_stage(name, total)

    def finish(self) -> tuple[StageTime, ...]:
        """End the last stage and return all of them in order."""
        self._end()
        return tuple(self._times)

    def _end(self) -> None:
        if self._name:
            self._times.append(StageTime(self._name, time.perf_counter() - self._start))
        self._name = ""
