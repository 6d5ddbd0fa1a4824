"""What the engine reports of itself: one record per step, one per finished request, and a snapshot at any time."""

from dataclasses import dataclass
from typing import Literal

from trtcb.executor.request import FinishReason

EngineState = Literal["new", "running", "draining", "dead", "closed"]


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Timings of a request that ended, in seconds; None for a phase it never reached.

    ``queue_s``: arrival to first step. ``ttft_s``: arrival to first token. ``tpot_s``: mean time per token after the
    first. ``e2e_s``: arrival to end.
    """

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_pauses: int
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float


@dataclass(frozen=True, slots=True)
class StepStats:
    """One pass: at most one step is collected in it, be it launched there or, with overlap, in an earlier one.

    ``num_*`` and ``*_blocks`` are the state after it; ``num_rows`` and the token counts are what the step added, while
    pauses and ``prefix_*_tokens`` belong to the step that the pass scheduled.

    ``reserved_blocks`` are those that the running requests may still take until their limits. ``prompt_tokens`` were
    computed for the first time, ``recomputed_tokens`` again after a pause. ``prefix_*_tokens`` count prompts at their
    first start. ``itl_s`` has one entry per token that was not its request's first. A pass that collected no step has
    ``num_rows == 0``.
    """

    policy: str
    num_rows: int
    num_running: int
    num_waiting: int
    num_paused: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    reserved_blocks: int
    prompt_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    num_pauses: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    step_s: float
    schedule_s: float
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    finished: tuple[FinishedRequest, ...]
    step_errors: int
    audit_failures: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine at one moment. ``error`` says what it died of.

    ``num_waiting`` are requests never started, those still in the inbox included; ``num_paused`` wait for a restart.
    ``free_blocks + cached_blocks + used_blocks == num_blocks``. ``last_progress_s`` is on the engine's clock: when
    work last moved (or last arrived at an idle engine), so that ``has_work`` with an old ``last_progress_s`` is a
    stuck engine. ``oldest_waiting_s`` is the age of the request that has waited longest without ever running,
    ``oldest_paused_s`` the time since the oldest pause that lasts; 0 if there is none.
    """

    state: EngineState
    error: str | None
    policy: str
    num_running: int
    num_waiting: int
    num_paused: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    reserved_blocks: int
    steps: int
    last_step_s: float
    last_progress_s: float
    has_work: bool
    audit_failures: int
    oldest_waiting_s: float = 0.0
    oldest_paused_s: float = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread serves requests."""
        return self.state in ("running", "draining")
