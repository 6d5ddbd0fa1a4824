"""Drives an engine core without its thread, with requests that arrive in virtual time."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from trtcb.errors import RequestError
from trtcb.executor.answers import EndReader, Reader
from trtcb.executor.config import EngineConfig
from trtcb.executor.core import EngineCore, Outcome
from trtcb.executor.request import Request
from trtcb.executor.runtime import Runtime


class JumpingClock(Protocol):
    """A clock that the driver may set forward while there is nothing to do."""

    def __call__(self) -> float:
        """Present time in seconds."""

    def jump_to(self, now_s: float) -> None:
        """Skip to a later moment."""


class Simulation:
    """The engine of serving (the same core, scheduler, policies and batch builder), driven by a loop.

    ``clock`` is moved by the runtime's steps, and by the driver over gaps in which no request is there. What a request
    finds when it arrives during a step is what it would find in serving: it waits for the next one.
    ``on_refused`` gets each request that can never be served, or found the queue full, with the reason.
    With ``max_concurrency``, no request is sent while so many are unfinished; its times count from when it is.
    ``reader`` says what outcomes tell of tokens; nothing, unless asked: only ends.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: EngineConfig,
        clock: JumpingClock,
        *,
        eos_token_id: int,
        on_refused: Callable[[Request, str], None],
        max_concurrency: int | None = None,
        reader: Reader | None = None,
    ) -> None:
        self._core = EngineCore(
            runtime,
            config,
            tokenizer=None,
            eos_token_ids=[eos_token_id],
            vocab_size=eos_token_id + 1,
            clock=clock,
            reader=reader or EndReader(),
        )
        self._config = config
        self._clock = clock
        self._on_refused = on_refused
        self._max_concurrency = max_concurrency

    @property
    def core(self) -> EngineCore:
        """The engine core."""
        return self._core

    def run(self, requests: Iterable[Request]) -> Iterator[Outcome]:
        """Serve ``requests``, sorted by ``arrival_s``, and yield every pass's outcome as the clock shows its end."""
        arrivals = iter(requests)
        upcoming = next(arrivals, None)
        while upcoming is not None or self._core.has_work:
            if upcoming is not None and not self._core.has_work:
                self._clock.jump_to(upcoming.arrival_s)
            now_s = self._clock()
            while upcoming is not None and upcoming.arrival_s <= now_s and self._may_send():
                self._submit(upcoming, now_s)
                upcoming = next(arrivals, None)
            if self._core.has_work:
                yield self._core.step()

    def _may_send(self) -> bool:
        return self._max_concurrency is None or self._core.num_unfinished < self._max_concurrency

    def _submit(self, request: Request, now_s: float) -> None:
        if self._max_concurrency is not None and request.arrival_s:  # without one of its own it has arrived now
            request = replace(request, arrival_s=now_s)
        if self._core.num_unstarted >= self._config.max_queue_size:
            self._on_refused(request, "the queue is full")
            return
        try:
            self._core.add(self._core.admission.sequence(request, now_s))
        except RequestError as error:
            self._on_refused(request, str(error))
