"""Where the time of the whole-step engine's steps goes: measured around and inside them, one record a step."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from trtcb.executor.runtime import Batch, Float32, StepOutput
from trtcb.executor.step_engine import StepEngine
from trtcb.executor.step_time import StepLoad
from trtcb.plugins.cpu.step import CallTimes


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step: what it computed, how long each call of the program took, and how long drawing its tokens did.

    ``num_logits`` rows wanted logits. ``attended_tokens`` are the keys that all rows attend to, counted once a row,
    while ``load.context_tokens`` counts them once a sequence.
    """

    load: StepLoad
    num_logits: int
    attended_tokens: int
    calls: CallTimes
    draw_ns: int


OnProfile = Callable[[StepProfile], None]


class ProfiledEngine:
    """Runs the steps of a whole-step engine, which it takes over, and tells ``on_profile`` of each.

    The tokens are the same to the bit. ``on_profile`` is called on the engine's thread, before the step's tokens are
    out.
    """

    def __init__(self, engine: StepEngine, on_profile: OnProfile) -> None:
        self._engine = engine
        self._on_profile = on_profile
        self._calls: CallTimes
        self._draw_began_ns = 0
        engine.time_calls(self._take)

    def run(self, batch: Batch) -> StepOutput:
        """Run one step and draw; -1 where a row's logits were not numbers."""
        output = self._engine.run(batch)
        draw_ns = time.monotonic_ns() - self._draw_began_ns
        attended = int(batch.positions.sum(dtype=int)) + len(batch.positions)
        self._on_profile(StepProfile(StepLoad.of(batch), len(batch.logit_index), attended, self._calls, draw_ns))
        return output

    def logits(self) -> Float32:
        """Logits ``[NL, vocab]`` of the last step; overwritten by the next."""
        return self._engine.logits()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def _take(self, calls: CallTimes) -> None:
        self._calls = calls
        self._draw_began_ns = time.monotonic_ns()
