"""The engine without its thread: queue, step, answer. Whoever calls it owns it; nothing here is locked."""

import contextlib
import logging
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from trtcb.executor.admission import Admission
from trtcb.executor.answers import AnswerReader, Drawn, Reader, terminal_delta
from trtcb.executor.batch_builder import BatchBuilder
from trtcb.executor.config import EngineConfig
from trtcb.executor.detokenizer import Decoder
from trtcb.executor.liveness import Liveness
from trtcb.executor.request import Delta, FinishReason
from trtcb.executor.runtime import Runtime, StepOutput
from trtcb.executor.scheduler import Scheduler, Step
from trtcb.executor.sequence import Sequence
from trtcb.executor.stats import StepStats
from trtcb.executor.step_recorder import StepCounts, StepRecorder

AUDIT_PAUSE_S = 1.0  # between audits: one takes milliseconds for a large pool, and a light load is often idle
MAX_IDLE_PASSES = 100  # passes with work but without a row before the request at the head is given up

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass came to: deltas for the requests' owners, and its record (None if nothing happened)."""

    deltas: list[Delta]
    stats: StepStats | None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was launched and not collected; ``error``: it could not be launched.

    ``is_awaited``: its tokens must be known before the next one can be.
    """

    step: Step
    counts: StepCounts
    error: Exception | None
    is_awaited: bool


class EngineCore:
    """Takes sequences in, runs steps on the runtime, and hands out deltas: exactly one terminal delta per sequence.

    With ``overlap_depth`` 1 a step stays in flight while the next one is scheduled, packed and launched. Whether a
    request ends by it shows when it is collected: then one row too many of it is in flight, which is dropped.

    A step that fails because of one request (the exception has ``request_index``, its row in the batch, or the row
    drew a negative token) fails that request alone, and the others repeat the step. Any other failure fails all
    requests of the batch; if the runtime then does not say that it is ``healthy``, it is raised, and the core is dead.
    What was launched behind a step that failed is dropped and repeated.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: EngineConfig,
        *,
        tokenizer: Decoder | None,
        eos_token_ids: Collection[int],
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        reader: Reader | None = None,
    ) -> None:
        self.admission = Admission(config, runtime.num_blocks, vocab_size, tokenizer, frozenset(eos_token_ids))
        self.scheduler = Scheduler(config, runtime.num_blocks)
        self.recorder = StepRecorder(config.policy_name, self.scheduler)
        self.liveness = Liveness()
        self._runtime = runtime
        self._builder = BatchBuilder(config, runtime.num_blocks)
        self._reader = reader or AnswerReader()
        self._clock = clock
        self._overlap_depth = config.overlap_depth
        self._live: dict[str, Sequence] = {}
        self._deltas: list[Delta] = []
        self._in_flight: deque[_Flight] = deque()
        self._has_launched = False  # in this pass
        self._started_s = 0.0
        self._num_idle_passes = 0
        self._is_audited = True
        self._next_audit_s = -math.inf
        self._has_warned = False

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished, or any step."""
        return bool(self._live or self._in_flight)

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    @property
    def num_unstarted(self) -> int:
        """Sequences that never ran."""
        return len(self.scheduler.waiting) - self.scheduler.num_paused

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that :class:`Admission` made. Its id must not be in use."""
        self._is_audited = False
        if seq.request.params.max_tokens is None:
            self._warn_of_omitted_limit(seq)
        self._live[seq.request_id] = seq
        self.scheduler.add(seq)
        self.liveness.queued(seq)

    def abort(self, request_id: str) -> None:
        """End a sequence in whatever state it is; unknown ids, such as of sequences that just ended, are ignored."""
        seq = self._live.get(request_id)
        if seq is not None:
            self._finish(seq, FinishReason.ABORT)

    def fail_all(self, error: str) -> None:
        """End every sequence with an error. Steps in flight are left to the runtime."""
        for seq in list(self._live.values()):
            self._finish(seq, FinishReason.ERROR, error=error)

    def step(self) -> Outcome:
        """Run one pass: :meth:`launch`, then :meth:`collect`."""
        self.launch()
        return self.collect()

    def launch(self) -> None:
        """Schedule a step and start it on the runtime. Raises what killed the runtime."""
        start_s = self._started_s = self._clock()
        self._has_launched = False
        if self._in_flight and self._in_flight[-1].is_awaited:
            self._collect_oldest()
            start_s = self._clock()
        if not self._live:
            return
        step = self.scheduler.schedule()
        self.liveness.scheduled(step, start_s)
        counts = self.recorder.scheduled(step, self._clock() - start_s)
        if not step.num_rows:
            self._watch_idle_pass()
            return
        self._num_idle_passes = 0
        for seq in step.started:
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = start_s
        batch = self._builder.build(step)
        failure: Exception | None = None
        try:
            self._runtime.launch(batch)
        except Exception as error:  # whatever a device or a kernel raises
            failure = error
        self.scheduler.advance(step)
        is_awaited = failure is not None or batch.sampling.edits is not None  # edits depend on all tokens so far
        self._in_flight.append(_Flight(step, counts, failure, is_awaited))
        self._has_launched = True

    def collect(self) -> Outcome:
        """Wait for a step, unless those in flight may stay there, and hand out what the pass came to.

        Raises what killed the runtime; the deltas so far are kept for :meth:`take_outcome`.
        """
        if len(self._in_flight) > (self._overlap_depth if self._has_launched else 0):
            self._collect_oldest()
        self._check_books()
        return self.take_outcome(self._clock() - self._started_s)

    def take_outcome(self, seconds: float) -> Outcome:
        """Hand out what was gathered since the last call, as the outcome of a pass that took ``seconds``."""
        deltas, self._deltas = self._deltas, []
        return Outcome(deltas, self.recorder.take(seconds))

    def _collect_oldest(self) -> None:
        flight = self._in_flight.popleft()
        try:
            if flight.error is not None:
                raise flight.error
            output = self._runtime.wait()
        except Exception as error:  # whatever a device or a kernel raises
            self._contain(flight, error)
        else:
            self._take_in(flight, output)

    def _take_in(self, flight: _Flight, output: StepOutput) -> None:
        """Take a finished step's tokens in and finish whoever is done."""
        drawing, token_ids = flight.step.drawing, output.tokens.tolist()
        self._builder.learn(output.tokens)
        lost = self.scheduler.collect(token_ids)
        self.recorder.collected(flight.counts)
        drawn = Drawn(drawing, token_ids, range(len(drawing)), output.logprobs)
        if lost:
            drawn = self._without(lost, drawn)
        self.recorder.drew(drawn.sequences, self._clock())
        for seq, delta in self._reader.read(drawn):
            if delta.finish_reason is None:
                self._deltas.append(delta)
            else:
                self._end(seq, delta.finish_reason, delta)

    def _without(self, lost: list[int], drawn: Drawn) -> Drawn:
        """Leave rows out: nobody waits for them any more, or they have no token, and their requests fail."""
        sequences, token_ids = drawn.sequences, drawn.token_ids
        for row in lost:
            if not sequences[row].ended:
                error = "The model produced no valid probabilities for this request."
                self._finish(sequences[row], FinishReason.ERROR, error)
        rows = sorted(set(drawn.rows).difference(lost))
        return Drawn([sequences[row] for row in rows], [token_ids[row] for row in rows], rows, drawn.logprobs)

    def _finish(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence otherwise than by a token."""
        self._end(seq, reason, terminal_delta(seq, reason, error))

    def _end(self, seq: Sequence, reason: FinishReason, delta: Delta) -> None:
        """Free a sequence and send its terminal delta: the only place that does."""
        del self._live[seq.request_id]
        self.liveness.ended(seq)
        if reason is FinishReason.ERROR:
            self.scheduler.fail(seq)
        else:
            self.scheduler.remove(seq)
        self._deltas.append(delta)
        self.recorder.finished(seq, reason, self._clock())

    def _contain(self, flight: _Flight, error: Exception) -> None:
        """Limit a failed step's damage to the requests it can be blamed on."""
        rows = list(flight.step.rows())
        self.recorder.step_failed(flight.counts)
        index = _request_index(error)
        blamed = rows[index] if index is not None and 0 <= index < len(rows) else None
        is_fatal = blamed is None and not getattr(self._runtime, "healthy", False)
        self._drop_in_flight(is_running=not is_fatal)
        if blamed is not None:
            _log.warning("request %s failed: %s", blamed.request_id, error)
            self._finish_rows([blamed], f"The engine failed on this request: {error}")
            return
        _log.error("a step of %d requests failed", len(rows), exc_info=error)
        self._finish_rows(rows, f"The engine failed on this step: {error}")
        if is_fatal:
            raise error

    def _finish_rows(self, rows: list[Sequence], error: str) -> None:
        for seq in rows:
            if not seq.ended:
                self._finish(seq, FinishReason.ERROR, error)

    def _drop_in_flight(self, *, is_running: bool) -> None:
        """Undo a failed step and those behind it, once they are through: they still use slots and blocks."""
        while self._in_flight:
            if self._in_flight.popleft().error is None and is_running:
                with contextlib.suppress(Exception):  # they read what the failed step did not write
                    self._runtime.wait()
        self.scheduler.rollback()
        self._builder.rollback(self.scheduler.running)

    def _warn_of_omitted_limit(self, seq: Sequence) -> None:
        """Say once what omitting ``max_tokens`` costs where a request starts only if all its output is sure to fit."""
        config = self.admission.config
        reserves = config.scheduler_policy in ("guaranteed_no_evict", "static_batch")
        if self._has_warned or not reserves or config.default_max_tokens is not None:
            return
        self._has_warned = True
        _log.warning(
            "a request without max_tokens reserves memory for %d tokens under %s, so few run at a time: "
            "set default_max_tokens, or use max_utilization",
            seq.max_len,
            config.scheduler_policy,
        )

    def _watch_idle_pass(self) -> None:
        """Give up on the head of the line if nothing has run for too long: a stuck queue must not wait for ever."""
        if self._in_flight:
            return
        self._num_idle_passes += 1
        if self._num_idle_passes >= MAX_IDLE_PASSES:
            self._num_idle_passes = 0
            head = min(self._live.values())
            _log.error("no progress in %d passes: giving up request %s", MAX_IDLE_PASSES, head.request_id)
            self._finish(
                head,
                FinishReason.ERROR,
                f"The scheduler made no progress in {MAX_IDLE_PASSES} passes with {self.scheduler.pool.num_free} "
                "free blocks, so the first request in line was given up: please report this.",
            )

    def _check_books(self) -> None:
        """Count blocks after every step, and audit everything when the engine becomes idle, if it was not just now."""
        faults = [] if self.scheduler.pool.is_consistent() else ["the blocks do not add up"]
        if not self.has_work and not self._is_audited and self._clock() >= self._next_audit_s:
            self._is_audited = True
            self._next_audit_s = self._clock() + AUDIT_PAUSE_S
            faults += self.scheduler.audit()
        if faults:
            self.recorder.audit_failed(len(faults))
            _log.error("the books of the KV pool are wrong: %s", "; ".join(faults))


def _request_index(error: Exception) -> int | None:
    """Return the row that a runtime blames: any integer, numpy's as well."""
    try:
        return operator.index(getattr(error, "request_index", None))  # type: ignore[arg-type]
    except TypeError:
        return None
