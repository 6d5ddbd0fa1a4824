"""Runs the prompts of one call on the engine and gathers what comes back."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from trtcb.executor.request import Delta, FinishReason, Request
from trtcb.server.context import ServerContext
from trtcb.server.errors import ApiError, engine_failed

Event = tuple[int, Delta]
_MERGE_DEPTH = 64  # deltas of several prompts that may wait for a slow client before their streams do


@dataclass(slots=True)
class Choice:
    """What one prompt has cost and brought so far, but for its text."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_tokens: int = 0
    finish_reason: FinishReason | None = None


class Generation:
    """The deltas of a call's prompts as they come: ``async for index, delta in generation``.

    Entering it submits every prompt, or raises what the engine refused one with and leaves none behind. Leaving it, by
    whatever way, aborts what still runs. A prompt that fails ends the iteration with an :class:`ApiError`.
    ``abort_cause`` is what the metrics call a client that went away. Of the requests, ``answers_per_prompt`` in a row
    have the same prompt, which is counted once.
    """

    def __init__(self, context: ServerContext, requests: Sequence[Request], *, answers_per_prompt: int = 1) -> None:
        self.choices = [Choice(len(request.prompt_token_ids)) for request in requests]
        self.abort_cause = "disconnect"
        self._context = context
        self._requests = requests
        self._answers_per_prompt = answers_per_prompt
        self._streams: list[AsyncGenerator[Delta, None]] = []
        self._heads: list[asyncio.Future[Delta]] = []
        self._pumps: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> "Generation":
        self._context.lifecycle.request_ids.update(request.request_id for request in self._requests)
        try:
            self._streams = [self._context.llm.stream(request) for request in self._requests]
            self._heads = [asyncio.ensure_future(anext(stream)) for stream in self._streams]
            # A refusal is raised before the stream first waits: one turn of the loop shows it, while there is still a
            # status line to send it in.
            await asyncio.sleep(0)
            for head in self._heads:
                if head.done():
                    head.result()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, (asyncio.CancelledError, ConnectionError)):
            for choice in self.choices:
                if choice.finish_reason is None:
                    self._context.metrics.aborted(self.abort_cause)
        await self._close()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._only() if len(self._streams) == 1 else self._merged()

    def usage(self) -> dict[str, Any]:
        """Token counts of the call so far, in the API's words."""
        first_answers = self.choices[:: self._answers_per_prompt]
        prompt = sum(choice.num_prompt_tokens for choice in first_answers)
        completion = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in first_answers)},
        }

    async def _only(self) -> AsyncIterator[Event]:
        # One prompt, the common case, is spared the queue and task switch per token.
        yield 0, self._accept(0, await self._heads[0])
        async for delta in self._streams[0]:
            yield 0, self._accept(0, delta)

    async def _merged(self) -> AsyncIterator[Event]:
        queue: asyncio.Queue[Event | Exception] = asyncio.Queue(_MERGE_DEPTH)
        self._pumps = [asyncio.ensure_future(self._pump(index, queue)) for index in range(len(self._streams))]
        num_open = len(self._streams)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            index, delta = item
            self._accept(index, delta)
            num_open -= delta.finish_reason is not None
            yield index, delta

    async def _pump(self, index: int, queue: "asyncio.Queue[Event | Exception]") -> None:
        try:
            await queue.put((index, await self._heads[index]))
            async for delta in self._streams[index]:
                await queue.put((index, delta))
        except Exception as error:  # handed to the reader of the queue, which is in the request's own task
            await queue.put(error)

    def _accept(self, index: int, delta: Delta) -> Delta:
        choice = self.choices[index]
        choice.num_tokens += len(delta.token_ids)
        choice.num_cached_tokens = max(choice.num_cached_tokens, delta.num_cached_tokens)
        choice.finish_reason = delta.finish_reason
        if delta.finish_reason is FinishReason.ERROR:
            raise engine_failed(delta.error)
        if delta.finish_reason is FinishReason.ABORT:
            raise ApiError(
                503,
                "The server ended this request before it was finished.",
                kind="server_error",
                code="aborted",
                retry_after_s=self._context.config.retry_after_s,
            )
        return delta

    async def _close(self) -> None:
        pending: list[asyncio.Future[Any]] = [*self._heads, *self._pumps]
        for task in pending:
            task.cancel()
        try:
            await asyncio.gather(*pending, return_exceptions=True)
            for stream in self._streams:
                await stream.aclose()
        finally:
            self._context.lifecycle.request_ids.difference_update(request.request_id for request in self._requests)
