"""The engine without its thread: queue, step, answer. Whoever calls it owns it; nothing here is locked."""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from trtcb.executor.admission import Admission
from trtcb.executor.batch_builder import BatchBuilder
from trtcb.executor.config import EngineConfig
from trtcb.executor.detokenizer import Decoder
from trtcb.executor.liveness import Liveness
from trtcb.executor.request import Delta, FinishReason, TokenLogprobs
from trtcb.executor.runtime import Runtime, StepOutput
from trtcb.executor.sampling_state import token_logprobs
from trtcb.executor.scheduler import Scheduler, Step
from trtcb.executor.sequence import Sequence
from trtcb.executor.stats import StepStats
from trtcb.executor.step_recorder import StepRecorder

MAX_IDLE_PASSES = 100  # passes with work but without a row before the request at the head is given up

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass came to: deltas for the requests' owners, and its record (None if nothing happened)."""

    deltas: list[Delta]
    stats: StepStats | None


class EngineCore:
    """Takes sequences in, runs steps on the runtime, and hands out deltas: exactly one terminal delta per sequence.

    A step that fails because of one request (the exception has ``request_index``, its row in the batch, or the row
    drew a negative token) fails that request alone, and the others repeat the step. Any other failure fails all
    requests of the batch; if the runtime then does not say that it is ``healthy``, it is raised, and the core is dead.
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
    ) -> None:
        self.admission = Admission(config, runtime.num_blocks, vocab_size, tokenizer, frozenset(eos_token_ids))
        self.scheduler = Scheduler(config, runtime.num_blocks)
        self.recorder = StepRecorder(config.policy_name, self.scheduler)
        self.liveness = Liveness()
        self._runtime = runtime
        self._builder = BatchBuilder(config, runtime.num_blocks)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._live: dict[str, Sequence] = {}
        self._deltas: list[Delta] = []
        self._in_flight: Step | None = None
        self._started_s = 0.0
        self._num_idle_passes = 0
        self._is_audited = True
        self._has_warned = False

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._live)

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
        """End every sequence with an error."""
        for seq in list(self._live.values()):
            self._finish(seq, FinishReason.ERROR, error=error)

    def step(self) -> Outcome:
        """Run one pass: :meth:`launch`, then :meth:`collect`."""
        self.launch()
        return self.collect()

    def launch(self) -> None:
        """Schedule a step and start it on the runtime. Raises what killed the runtime."""
        self._started_s = self._clock()
        if not self.has_work:
            return
        step = self.scheduler.schedule()
        self.liveness.scheduled(step, self._started_s)
        self.recorder.scheduled(step, self._clock() - self._started_s)
        if not step.num_rows:
            self._watch_idle_pass()
            return
        self._num_idle_passes = 0
        for seq in step.started:
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = self._started_s
        batch = self._builder.build(step)
        try:
            self._runtime.launch(batch)
        except Exception as error:  # whatever a device or a kernel raises
            self._contain(step, error)
        else:
            self._in_flight = step

    def collect(self) -> Outcome:
        """Wait for the step in flight, if any, and hand out what the pass came to.

        Raises what killed the runtime; the deltas so far are kept for :meth:`take_outcome`.
        """
        step, self._in_flight = self._in_flight, None
        if step is not None:
            try:
                output = self._runtime.wait()
            except Exception as error:  # whatever a device or a kernel raises
                self._contain(step, error)
            else:
                self._take_in(step, output)
        self._check_books()
        return self.take_outcome(self._clock() - self._started_s)

    def take_outcome(self, seconds: float) -> Outcome:
        """Hand out what was gathered since the last call, as the outcome of a pass that took ``seconds``."""
        deltas, self._deltas = self._deltas, []
        return Outcome(deltas, self.recorder.take(seconds))

    def _take_in(self, step: Step, output: StepOutput) -> None:
        """Take a finished step's tokens in and finish whoever is done."""
        drawing = step.drawing()
        self._builder.advance(step, output.tokens)
        token_ids = output.tokens.tolist()
        self.scheduler.apply(step, token_ids)
        now_s = self._clock()
        for row, (seq, token_id) in enumerate(zip(drawing, token_ids, strict=True)):
            if token_id < 0:
                self._finish(
                    seq, FinishReason.ERROR, error="The model produced no valid probabilities for this request."
                )
            else:
                self.recorder.drew(seq, now_s)
                self._answer(seq, token_id, token_logprobs(seq, token_id, output.logprobs, row))

    def _answer(self, seq: Sequence, token_id: int, logprobs: tuple[TokenLogprobs, ...] | None) -> None:
        """Send one token on, and end its request if that is due."""
        try:
            text, reason = self._read(seq, token_id)
        except Exception as error:  # a tokenizer that chokes on one output must not stop the others
            _log.warning("request %s could not be detokenised", seq.request_id, exc_info=error)
            self._finish(seq, FinishReason.ERROR, error=f"The output could not be turned into text: {error}")
            return
        if reason is not None:
            self._finish(seq, reason, (token_id,), text, logprobs=logprobs)
        else:
            self._deltas.append(self._delta(seq, (token_id,), text, logprobs=logprobs))

    def _read(self, seq: Sequence, token_id: int) -> tuple[str, FinishReason | None]:
        """Text to send, and why the request ends, if it does. Neither an end token's text nor a stop string is sent."""
        params = seq.request.params
        is_end = token_id in params.stop_token_ids or (token_id in self._eos_token_ids and not params.ignore_eos)
        reason = FinishReason.STOP if is_end else FinishReason.LENGTH if seq.is_at_limit else None
        if seq.text is None:
            return "", reason
        text = ""
        if not is_end:
            text, is_stopped = seq.text.push(token_id)
            if is_stopped:
                return text, FinishReason.STOP
        if reason is not None:
            rest, is_stopped = seq.text.finish()
            text += rest
            reason = FinishReason.STOP if is_stopped else reason
        return text, reason

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        text: str = "",
        error: str | None = None,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> None:
        """End a sequence: the only place that frees it and sends its terminal delta."""
        del self._live[seq.request_id]
        self.liveness.ended(seq)
        if reason is FinishReason.ERROR:
            self.scheduler.fail(seq)
        else:
            self.scheduler.remove(seq)
        self._deltas.append(self._delta(seq, token_ids, text, reason, error, logprobs))
        self.recorder.finished(seq, reason, self._clock())

    def _delta(
        self,
        seq: Sequence,
        token_ids: tuple[int, ...],
        text: str,
        reason: FinishReason | None = None,
        error: str | None = None,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> Delta:
        return Delta(
            request_id=seq.request_id,
            token_ids=token_ids,
            text=text,
            finish_reason=reason,
            error=error,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            logprobs=logprobs,
        )

    def _contain(self, step: Step, error: Exception) -> None:
        """Limit a failed step's damage to the requests it can be blamed on."""
        rows = list(step.rows())
        self.recorder.step_failed()
        index = getattr(error, "request_index", None)
        if isinstance(index, int) and 0 <= index < len(rows):
            _log.warning("request %s failed: %s", rows[index].request_id, error)
            self._finish(rows[index], FinishReason.ERROR, error=f"The engine failed on this request: {error}")
            return
        _log.error("a step of %d requests failed", len(rows), exc_info=error)
        for seq in rows:
            self._finish(seq, FinishReason.ERROR, error=f"The engine failed on this step: {error}")
        if not getattr(self._runtime, "healthy", False):
            raise error

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
        self._num_idle_passes += 1
        if self._num_idle_passes >= MAX_IDLE_PASSES:
            self._num_idle_passes = 0
            head = min(self._live.values())
            _log.error("no progress in %d passes: giving up request %s", MAX_IDLE_PASSES, head.request_id)
            self._finish(
                head,
                FinishReason.ERROR,
                error=f"The scheduler made no progress in {MAX_IDLE_PASSES} passes with {self.scheduler.pool.num_free} "
                "free blocks, so the first request in line was given up: please report this.",
            )

    def _check_books(self) -> None:
        """Count blocks after every step, and audit everything once whenever the engine becomes idle."""
        faults = [] if self.scheduler.pool.is_consistent() else ["the blocks do not add up"]
        if not self.has_work and not self._is_audited:
            self._is_audited = True
            faults += self.scheduler.audit()
        if faults:
            self.recorder.audit_failed(len(faults))
            _log.error("the books of the KV pool are wrong: %s", "; ".join(faults))
