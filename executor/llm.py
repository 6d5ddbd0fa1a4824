"""The two front doors to an engine: ``AsyncLLM`` streams on an event loop, ``LLM`` answers lists of prompts."""

import asyncio
import itertools
import queue
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from types import TracebackType
from typing import Any, Literal

from trtcb.errors import DrainTimeoutError, QueueFullError, RequestError, UsageError, shown
from trtcb.executor.config import EngineConfig, engine_config
from trtcb.executor.request import Delta, FinishReason, Request, SamplingParams, TokenLogprobs, fan_out
from trtcb.executor.runtime import Runtime
from trtcb.executor.served_model import ServedModel, TextTokenizer
from trtcb.executor.stats import StepStats
from trtcb.executor.values import is_int
from trtcb.spec import ModelSpec

MAX_STREAM_BACKLOG = 1024  # deltas that a reader may be behind before its request is aborted
_CLOSE_TIMEOUT_S = 10.0
_POLL_S = 0.005


class _Stream:
    """Deltas between the engine and one reader. Belongs to the event loop."""

    def __init__(self) -> None:
        self.deltas: deque[Delta] = deque()
        self.is_ended = False  # the engine has told the end
        self.is_cut = False  # the reader was too slow, and what the engine still sends is dropped
        self._changed = asyncio.Event()

    def put(self, delta: Delta) -> None:
        self.is_ended = delta.finish_reason is not None
        if self.is_cut:
            return
        if len(self.deltas) >= MAX_STREAM_BACKLOG and not self.is_ended:
            self.is_cut = True
            error = f"The reader fell {MAX_STREAM_BACKLOG} tokens behind, so the request was aborted: read faster."
            delta = replace(delta, token_ids=(), text="", logprobs=None, finish_reason=FinishReason.ERROR, error=error)
        self.deltas.append(delta)
        self._changed.set()

    async def get(self) -> Delta:
        while not self.deltas:
            self._changed.clear()
            await self._changed.wait()
        return self.deltas.popleft()


class AsyncLLM:
    """An engine for one event loop. ``stream`` is safe for any number of concurrent readers on that loop.

    ``tokenizer`` is as it was given, or the plan's; ``None`` makes an engine of token ids alone.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: EngineConfig,
        *,
        tokenizer: TextTokenizer | None,
        model: ModelSpec,
        on_step: Callable[[StepStats], None] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer: Any = tokenizer  # a real one can do more than the engine asks of it
        self.engine = ServedModel(runtime, config, tokenizer, model).engine(self._on_deltas, self._on_step)
        self._observers = [on_step] if on_step is not None else []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, _Stream | None] = {}  # None: the reader left, the engine has not told the end yet

    @classmethod
    def from_plan(
        cls,
        path: "str | PathLike[str]",
        config: EngineConfig,
        *,
        verify: Literal["full", "header"] = "full",
        on_step: Callable[[StepStats], None] | None = None,
    ) -> "AsyncLLM":
        """Open a plan. Limits of ``config`` left at their defaults give way to the plan's (``EngineConfig.within``)."""
        served = ServedModel.from_plan(path, config, verify=verify)
        return cls(served.runtime, served.config, tokenizer=served.tokenizer, model=served.model, on_step=on_step)

    def observe_steps(self, observer: Callable[[StepStats], None]) -> None:
        """Have ``observer`` called with every step's record, on the engine thread; it must be quick and not raise."""
        self._observers = [*self._observers, observer]

    async def start(self) -> None:
        """Start the engine; deltas arrive on the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()

    async def stream(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Submit ``request`` and yield its deltas up to the terminal one. Closing the generator aborts the request.

        What :meth:`Engine.submit` raises comes from the first ``anext``, before it waits for anything. A reader that
        lags ``MAX_STREAM_BACKLOG`` deltas behind gets an error delta as its last.
        """
        if self._loop is not asyncio.get_running_loop():
            raise UsageError("The engine was not started on this event loop: await start() on it before streaming.")
        request_id = request.request_id
        if request_id in self._streams:
            raise RequestError(f"Request id '{request_id}' is in use: give each request its own.", param="request_id")
        self.engine.submit(request)
        stream = self._streams[request_id] = _Stream()
        try:
            while True:
                delta = await stream.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if stream.is_ended:
                del self._streams[request_id]
            else:
                self._streams[request_id] = None
                self.engine.abort(request_id)

    async def drain(self, timeout_s: float | None = None) -> None:
        """Refuse new requests and wait for the others; ``DrainTimeoutError`` if they take longer than ``timeout_s``."""
        self.engine.drain()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.engine.snapshot().has_work:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise DrainTimeoutError(
                    f"Requests were still running after {timeout_s:g} s: allow more time, or close."
                )
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Stop the engine; streams still open end with an error delta. Idempotent."""
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        while not self.engine.close(timeout_s=0.0) and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)

    def _on_deltas(self, deltas: list[Delta]) -> None:
        """Hand a step's deltas to the event loop, in one call. Runs on the engine thread."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._dispatch, deltas)
        except RuntimeError:  # the loop is closed, and every reader gone with it
            return

    def _dispatch(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put(delta)
                if stream.is_cut and not stream.is_ended:
                    self.engine.abort(delta.request_id)
            elif delta.finish_reason is not None:
                self._streams.pop(delta.request_id, None)

    def _on_step(self, stats: StepStats) -> None:
        for observer in self._observers:
            observer(stats)


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to one prompt. ``error`` says why it is not whole if ``finish_reason`` is ``error``.

    ``logprobs`` has an entry for each of ``token_ids`` if they were asked for, else None. Where ``params.n`` asked for
    several answers, this is the first, and ``others`` are the rest.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    others: tuple["Completion", ...] = ()

    @property
    def outputs(self) -> tuple["Completion", ...]:
        """All answers to the prompt, this one first."""
        return (self, *self.others)


class _Answers:
    """What the engine tells the caller of one :meth:`LLM.generate`, who is woken only when a request has ended."""

    def __init__(self, requests: list[Request]) -> None:
        self.deltas: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def put(self, delta: Delta) -> None:
        self.deltas[delta.request_id].append(delta)
        if delta.finish_reason is not None:
            self.ended.put(delta.request_id)


class LLM:
    """A plan as a function: ``LLM("engines/x.plan").generate(["Hello"], SamplingParams(max_tokens=16))``.

    ``settings`` are fields of :class:`EngineConfig`, also under vLLM's names (``max_num_seqs``, ``max_model_len``,
    ``max_num_batched_tokens``). Instead of a plan, a ``runtime`` with its ``model`` and, for
    text, its ``tokenizer`` may be given. ``on_step`` gets the record of every step, on the engine's thread. Close it,
    or use it in a ``with`` statement. :meth:`generate` may be called by several threads.
    """

    def __init__(
        self,
        plan: "str | PathLike[str] | None" = None,
        *,
        runtime: Runtime | None = None,
        tokenizer: TextTokenizer | None = None,
        model: ModelSpec | None = None,
        on_step: Callable[[StepStats], None] | None = None,
        **settings: Any,
    ) -> None:
        config = engine_config(settings)
        if plan is not None and runtime is None:
            served = ServedModel.from_plan(plan, config)
        elif plan is None and runtime is not None and model is not None:
            served = ServedModel(runtime, config, tokenizer, model)
        else:
            raise UsageError("LLM takes either the path of a plan, or a runtime together with its model.")
        self.model = served.model
        self.tokenizer = served.tokenizer
        self._answers: dict[str, _Answers] = {}
        self._numbers = itertools.count()
        self._engine = served.engine(self._on_deltas, on_step)
        self._engine.start()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and free its memory. Idempotent."""
        self._engine.close()

    def generate(
        self,
        prompts: "Sequence[str | Sequence[int]]",
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer every prompt, in the order given. One ``params`` serves all, or there is one for each.

        With ``params.n`` above 1, the answers to a prompt are the ``outputs`` of its completion; with a ``seed``,
        answer ``i`` is what ``seed + i`` gives alone. They compute the prompt once.

        Raises :class:`RequestError` before anything runs if a prompt can never be served, and ``EngineDeadError`` if
        the engine stops. A request that fails alone is a completion with an ``error``.
        """
        calls = self._calls(prompts, SamplingParams() if params is None else params)
        requests = [request for call in calls for request in call]
        answers = _Answers(requests)
        waiting = deque(requests)
        running: set[str] = set()
        self._answers.update(dict.fromkeys(answers.deltas, answers))
        try:
            while waiting or running:
                self._submit(waiting, running)
                if not running:
                    time.sleep(_POLL_S)  # other threads' requests fill the queue
                    continue
                # what waits is submitted as soon as others have started, not only when one of them ended
                with suppress(queue.Empty):
                    running.remove(answers.ended.get(timeout=_POLL_S if waiting else None))
        finally:
            for request_id in answers.deltas:
                self._engine.abort(request_id)  # an interrupted call may not know yet that it has submitted one
                del self._answers[request_id]
        completions = map(_completion, answers.deltas.values())
        return [
            replace(next(completions), others=tuple(itertools.islice(completions, len(call) - 1))) for call in calls
        ]

    def _submit(self, waiting: deque[Request], running: set[str]) -> None:
        """Submit as many requests as the queue takes."""
        while waiting:
            try:
                self._engine.submit(waiting[0])
            except QueueFullError:
                return
            running.add(waiting.popleft().request_id)

    def _calls(
        self, prompts: "Sequence[str | Sequence[int]]", params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Request]]:
        """Requests of each prompt: as many as it shall have answers."""
        if isinstance(prompts, str):
            raise UsageError("prompts is a list: put the text into one.")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise UsageError(
                f"There are {len(prompts)} prompts and {len(each)} params: give one for all, or one for each."
            )
        calls = []
        for index, (prompt, its_params) in enumerate(zip(prompts, each, strict=True)):
            request = Request(f"llm-{next(self._numbers)}", self._token_ids(prompt), its_params)
            try:
                calls.append(self._fanned_out(request))
            except RequestError as error:
                raise RequestError(f"Prompt {index}: {error}", param=error.param, code=error.code) from error
        return calls

    def _fanned_out(self, request: Request) -> list[Request]:
        """Requests that ``request`` stands for, or what is wrong with it."""
        params = request.params
        if not isinstance(params, SamplingParams):
            raise RequestError("params must be SamplingParams.", param="params")
        if not is_int(params.n) or params.n < 1:
            raise RequestError(f"n must be a whole number of at least 1, not {shown(params.n)}.", param="n")
        self._engine.check(replace(request, params=replace(params, n=1)))
        return fan_out(request, params.n)

    def _token_ids(self, prompt: "str | Sequence[int]") -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise UsageError("This engine has no tokenizer: give prompts as lists of token ids.")
        return tuple(self.tokenizer.encode(prompt))

    def _on_deltas(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            answers = self._answers.get(delta.request_id)
            if answers is not None:
                answers.put(delta)


def _completion(deltas: list[Delta]) -> Completion:
    last = deltas[-1]
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return Completion(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason or FinishReason.ERROR,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        error=last.error,
        logprobs=logprobs if any(delta.logprobs is not None for delta in deltas) else None,
    )
