"""The engine thread: messages in through an inbox, deltas out once per step, nothing shared in between."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from trtcb.errors import DrainingError, EngineDeadError, QueueFullError, RequestError, UsageError
from trtcb.executor.config import EngineConfig
from trtcb.executor.core import EngineCore, Outcome
from trtcb.executor.detokenizer import Decoder
from trtcb.executor.request import Delta, FinishReason, Request
from trtcb.executor.runtime import Runtime
from trtcb.executor.sequence import Sequence
from trtcb.executor.stats import EngineSnapshot, EngineState, StepStats

_IDLE_PASS_PAUSE_S = 0.001  # between passes that have work but could not run any of it

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class Engine:
    """Runs one :class:`EngineCore` in a thread of its own. All methods may be called from any thread.

    ``on_deltas`` is called on the engine thread, once per pass that has some, with all of them; ``on_step`` with the
    pass's record, after it. Both must be quick. Every accepted request gets exactly one terminal delta, whatever
    happens; requests left when the engine dies or is closed get it with an error. The runtime belongs to the engine,
    and is closed by it.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: EngineConfig,
        *,
        tokenizer: Decoder | None,
        eos_token_ids: Collection[int],
        vocab_size: int,
        on_deltas: Callable[[list[Delta]], None],
        on_step: Callable[[StepStats], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if runtime.block_size != config.block_size:
            raise UsageError(
                f"block_size {config.block_size} is not the runtime's {runtime.block_size}: use that, or rebuild."
            )
        self.config = config
        self._runtime = runtime
        self._core = EngineCore(
            runtime, config, tokenizer=tokenizer, eos_token_ids=eos_token_ids, vocab_size=vocab_size, clock=clock
        )
        self._on_deltas = on_deltas
        self._on_step = on_step
        self._clock = clock
        self._thread = threading.Thread(target=self._main, name="trtcb-engine", daemon=True)
        # Everything below is shared, and only touched with the lock held.
        self._changed = threading.Condition()
        self._inbox: deque[Sequence | _Abort] = deque()
        self._live_ids: set[str] = set()  # accepted, and not yet told the end
        self._num_in_inbox = 0  # of these, not yet seen by the engine thread
        self._num_unstarted = 0  # of these, never run
        self._waiting_since_s: float | None = None  # of what the engine thread has seen
        self._paused_since_s: float | None = None
        self._is_started = self._is_draining = self._is_closing = self._is_ended = False
        self._error: str | None = None
        self._last_progress_s = clock()
        self._snapshot = self._picture(last_step_s=0.0)

    def start(self) -> None:
        """Start the thread, once. Requests may be submitted before; they wait."""
        with self._changed:
            if self._is_started or self._is_closing:
                raise RuntimeError("an engine is started once, before it is closed")
            self._is_started = True
        self._thread.start()

    def check(self, request: Request) -> None:
        """Raise the :class:`RequestError` that :meth:`submit` would, without submitting."""
        self._core.admission.sequence(request, self._clock())

    def submit(self, request: Request) -> None:
        """Accept a request, or raise at once.

        :class:`RequestError` means that it can never be served; :class:`QueueFullError`, :class:`DrainingError` and
        :class:`EngineDeadError` that it cannot be now.
        """
        seq = self._core.admission.sequence(request, self._clock())
        with self._changed:
            self._check_open()
            if request.request_id in self._live_ids:
                raise RequestError(
                    f"Request id '{request.request_id}' is in use: give each request its own.", param="request_id"
                )
            if self._num_unstarted >= self.config.max_queue_size:
                raise QueueFullError(
                    f"{self._num_unstarted} requests are waiting, as many as may: retry later, or raise max_queue_size."
                )
            if not self._live_ids:
                self._last_progress_s = self._clock()
            self._live_ids.add(request.request_id)
            self._num_in_inbox += 1
            self._num_unstarted += 1
            self._inbox.append(seq)
            self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; its terminal delta says ``abort``. Ids that are not in use are ignored."""
        with self._changed:
            if request_id in self._live_ids:
                self._inbox.append(_Abort(request_id))
                self._changed.notify_all()

    def drain(self) -> None:
        """Refuse new requests from now on. Those accepted run to their end: see :meth:`wait_idle`."""
        with self._changed:
            self._is_draining = True

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Block until every accepted request got its terminal delta; False if that takes longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._live_ids, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop after the present step, end what is left with errors, close the runtime and join the thread. Idempotent.

        Returns whether that is done; False after ``timeout_s``, when a step has not come back yet. The thread is a
        daemon, so one that never does holds nobody up.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._is_started:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        self._end("The engine was closed.")
        return True

    def snapshot(self) -> EngineSnapshot:
        """Return the state after the latest pass, with the queue as it is now."""
        with self._changed:
            return replace(
                self._snapshot,
                state=self._state(),
                error=self._error,
                num_waiting=self._num_unstarted,
                has_work=bool(self._live_ids),
                last_progress_s=self._last_progress_s,
                oldest_waiting_s=self._age(self._oldest_arrival_s()),
                oldest_paused_s=self._age(self._paused_since_s),
            )

    def _main(self) -> None:
        reason = "The engine was closed."
        try:
            while self._take_messages():
                self._core.launch()
                self._look(self._snapshot.last_step_s)
                self._publish(self._core.collect())
        except BaseException as error:  # nothing may end this thread without telling those who wait for it
            _log.critical("the engine stopped", exc_info=error)
            reason = f"The engine stopped: {error or type(error).__name__}"
            with self._changed:
                self._error = str(error) or type(error).__name__
        self._end(reason)

    def _take_messages(self) -> bool:
        """Sleep while there is nothing to do, then pass messages on to the core. False once the engine shall close."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._is_closing or self._core.has_work)
            if self._is_closing:
                return False
            messages = list(self._inbox)
            self._inbox.clear()
            self._num_in_inbox = 0
        for message in messages:
            if isinstance(message, Sequence):
                self._core.add(message)
            else:
                self._core.abort(message.request_id)
        return True

    def _look(self, last_step_s: float) -> None:
        """Renew what others see. Also right after a launch, as the queue has room then, however long the step takes."""
        with self._changed:
            self._num_unstarted = self._core.num_unstarted + self._num_in_inbox
            self._waiting_since_s = self._core.liveness.waiting_since_s
            self._paused_since_s = self._core.liveness.paused_since_s
            self._snapshot = self._picture(last_step_s)

    def _publish(self, outcome: Outcome) -> None:
        try:
            if outcome.deltas:
                self._on_deltas(outcome.deltas)
        finally:  # whatever came of it, nobody is told the end twice
            with self._changed:
                self._live_ids.difference_update(_ended(outcome.deltas))
        if outcome.stats is not None and self._on_step is not None:
            self._on_step(outcome.stats)
        self._look(self._snapshot.last_step_s if outcome.stats is None else outcome.stats.step_s)
        with self._changed:
            if outcome.stats is not None:
                self._last_progress_s = self._clock()
            elif self._core.has_work:
                self._changed.wait(_IDLE_PASS_PAUSE_S)
            if not self._live_ids:
                self._changed.notify_all()

    def _end(self, reason: str) -> None:
        """Tell everybody who is left, once, and free the runtime."""
        with self._changed:
            if self._is_ended:
                return
            self._is_ended = True
            self._inbox.clear()
        outcome = self._fail_core(reason)
        told = _ended(outcome.deltas)
        rest = [
            Delta(request_id, finish_reason=FinishReason.ERROR, error=reason) for request_id in self._live_ids - told
        ]
        try:
            if outcome.deltas or rest:
                self._on_deltas(outcome.deltas + rest)
            if outcome.stats is not None and self._on_step is not None:
                self._on_step(outcome.stats)
        except Exception:
            _log.exception("the owner of the requests could not be told that the engine ended")
        with self._changed:
            self._live_ids.clear()
            self._num_unstarted = self._num_in_inbox = 0
            self._waiting_since_s = self._paused_since_s = None
            self._snapshot = self._picture(last_step_s=0.0)
            self._changed.notify_all()
        try:
            self._runtime.close()
        except Exception:
            _log.exception("the runtime could not be closed")

    def _fail_core(self, reason: str) -> Outcome:
        """Free what the core still holds. After a fault of its own that may not be possible, and must not matter."""
        try:
            self._core.fail_all(reason)
        except Exception:
            _log.exception("the engine's books are broken")
        return self._core.take_outcome(0.0)

    def _check_open(self) -> None:
        if self._error is not None:
            raise EngineDeadError(f"The engine stopped ({self._error}): restart it.")
        if self._is_closing:
            raise EngineDeadError("The engine is closed: start another.")
        if self._is_draining:
            raise DrainingError("The engine is shutting down and takes no new requests: ask another one.")

    def _oldest_arrival_s(self) -> float | None:
        """Arrival of the oldest request that never ran, be it seen by the engine thread or not."""
        if self._waiting_since_s is not None:
            return self._waiting_since_s
        return next((message.arrival_s for message in self._inbox if isinstance(message, Sequence)), None)

    def _age(self, since_s: float | None) -> float:
        return 0.0 if since_s is None else max(0.0, self._clock() - since_s)

    def _state(self) -> EngineState:
        if self._error is not None:
            return "dead"
        if self._is_closing:
            return "closed"
        if self._is_draining:
            return "draining"
        return "running" if self._is_started else "new"

    def _picture(self, last_step_s: float) -> EngineSnapshot:
        scheduler, pool = self._core.scheduler, self._core.scheduler.pool
        return EngineSnapshot(
            state=self._state(),
            error=self._error,
            policy=self.config.policy_name,
            num_running=scheduler.num_running,
            num_waiting=self._num_unstarted,
            num_paused=scheduler.num_paused,
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_free - pool.num_cached,
            cached_blocks=pool.num_cached,
            used_blocks=pool.num_used,
            reserved_blocks=scheduler.reserved_blocks,
            steps=self._core.recorder.num_steps,
            last_step_s=last_step_s,
            last_progress_s=self._last_progress_s,
            has_work=bool(self._live_ids),
            audit_failures=self._core.recorder.num_audit_failures,
        )


def _ended(deltas: list[Delta]) -> set[str]:
    return {delta.request_id for delta in deltas if delta.finish_reason is not None}
