"""Gathers what happens during a pass and turns it into one frozen :class:`StepStats`."""

from dataclasses import dataclass

from trtcb.executor.request import FinishReason
from trtcb.executor.scheduler import Scheduler, Step
from trtcb.executor.sequence import Sequence
from trtcb.executor.stats import FinishedRequest, StepStats


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a step in flight computes."""

    num_rows: int
    prompt_tokens: int
    recomputed_tokens: int


class StepRecorder:
    """Counts for one engine core. :meth:`take` ends a pass and starts the next with zeros.

    What a step computes counts in the pass that collects it. ``num_steps`` and ``num_audit_failures`` are totals.
    """

    def __init__(self, policy: str, scheduler: Scheduler) -> None:
        self.num_steps = 0
        self.num_audit_failures = 0
        self._policy = policy
        self._scheduler = scheduler
        self._reset()

    def scheduled(self, step: Step, seconds: float) -> StepCounts:
        """Take note of a scheduling pass, before the step is advanced. Returns what the step will compute."""
        self._num_pauses = len(step.paused)
        has_cache = self._scheduler.prefix_cache.enabled
        new = [seq for seq in step.started if not seq.num_pauses and (has_cache or seq.request.fork_group)]
        self._prefix_query_tokens = sum(seq.num_prompt_tokens for seq in new)
        self._prefix_hit_tokens = sum(seq.num_cached_tokens for seq in new)
        self._schedule_s = seconds
        self._happened |= step.num_rows > 0
        return StepCounts(step.num_rows, step.prompt_tokens, step.recomputed_tokens)

    def collected(self, counts: StepCounts) -> None:
        """Take note that a step has run."""
        self._num_rows = counts.num_rows
        self._prompt_tokens = counts.prompt_tokens
        self._recomputed_tokens = counts.recomputed_tokens
        self._happened = True

    def drew(self, sequences: list[Sequence], now_s: float) -> None:
        """Take note of a token of each of these."""
        self._generated_tokens += len(sequences)
        for seq in sequences:
            if seq.first_token_s is None:
                seq.first_token_s = now_s
                self._ttft_s.append(now_s - seq.arrival_s)
            else:
                self._itl_s.append(now_s - seq.last_token_s)
            seq.last_token_s = now_s

    def finished(self, seq: Sequence, reason: FinishReason, now_s: float) -> None:
        """Take note that a sequence ended."""
        first, more = seq.first_token_s, seq.num_generated - 1
        self._finished.append(
            FinishedRequest(
                request_id=seq.request_id,
                reason=reason,
                num_prompt_tokens=seq.num_prompt_tokens,
                num_cached_tokens=seq.num_cached_tokens,
                num_generated_tokens=seq.num_generated,
                num_pauses=seq.num_pauses,
                queue_s=None if seq.first_scheduled_s is None else seq.first_scheduled_s - seq.arrival_s,
                ttft_s=None if first is None else first - seq.arrival_s,
                tpot_s=None if first is None or more < 1 else (seq.last_token_s - first) / more,
                e2e_s=now_s - seq.arrival_s,
            )
        )
        self._happened = True

    def step_failed(self, counts: StepCounts) -> None:
        """Take note that the runtime raised: its rows ran, but nothing came of it."""
        self._num_rows = counts.num_rows
        self._step_errors += 1
        self._happened = True

    def audit_failed(self, num_faults: int) -> None:
        """Take note that the pool's books were wrong."""
        self._audit_failures += num_faults
        self.num_audit_failures += num_faults
        self._happened = True

    def take(self, seconds: float) -> StepStats | None:
        """End a pass that took ``seconds``. None if nothing happened in it."""
        if not self._happened:
            self._reset()
            return None
        scheduler, pool = self._scheduler, self._scheduler.pool
        self.num_steps += self._num_rows > 0
        stats = StepStats(
            policy=self._policy,
            num_rows=self._num_rows,
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting) - scheduler.num_paused,
            num_paused=scheduler.num_paused,
            free_blocks=pool.num_free - pool.num_cached,
            cached_blocks=pool.num_cached,
            used_blocks=pool.num_used,
            reserved_blocks=scheduler.reserved_blocks,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            recomputed_tokens=self._recomputed_tokens,
            num_pauses=self._num_pauses,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            step_s=seconds,
            schedule_s=self._schedule_s,
            ttft_s=tuple(self._ttft_s),
            itl_s=tuple(self._itl_s),
            finished=tuple(self._finished),
            step_errors=self._step_errors,
            audit_failures=self._audit_failures,
        )
        self._reset()
        return stats

    def _reset(self) -> None:
        self._happened = False
        self._num_rows = self._num_pauses = 0
        self._prompt_tokens = self._generated_tokens = self._recomputed_tokens = 0
        self._prefix_query_tokens = self._prefix_hit_tokens = 0
        self._step_errors = self._audit_failures = 0
        self._schedule_s = 0.0
        self._ttft_s: list[float] = []
        self._itl_s: list[float] = []
        self._finished: list[FinishedRequest] = []
