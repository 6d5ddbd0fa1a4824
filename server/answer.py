"""From an HTTP request to an HTTP answer: what the completion and chat routes share."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from aiohttp import web

from trtcb.executor.request import FinishReason, Request, fan_out
from trtcb.server.auth import cache_scope, tenant_of
from trtcb.server.body import read_body
from trtcb.server.context import CONTEXT, ServerContext
from trtcb.server.errors import ApiError, draining, from_engine, invalid, json_response, not_ready
from trtcb.server.generation import Generation
from trtcb.server.logprobs import LogprobBuffer, TokenBytes
from trtcb.server.prompts import TokenIds
from trtcb.server.schemas import GenerationRequest
from trtcb.server.sse import EventStream

Json = dict[str, Any]


class Reply(Protocol):
    """The JSON of one route. ``envelope`` holds what every chunk, or the whole answer, has around its ``choices``."""

    def envelope(self, *, is_chunk: bool) -> Json:
        """Begin an object that lacks its ``choices``."""

    def opening(self, index: int) -> list[Json]:
        """Return what a stream's choice begins with, one chunk each."""

    def chunks(self, index: int, text: str, finish_reason: str | None, logprobs: LogprobBuffer) -> list[Json]:
        """Return what a stream says of one step, one chunk each; nothing if there is nothing to say."""

    def whole(self, index: int, text: str, finish_reason: str, logprobs: LogprobBuffer) -> Json:
        """Return a finished choice."""

    def logprobs(self, token_bytes: TokenBytes) -> LogprobBuffer:
        """Make the buffer of one choice's log-probabilities."""


async def open_call(request: web.Request) -> bytes:
    """Refuse while the server starts or stops, else return the body."""
    context = request.app[CONTEXT]
    if context.lifecycle.is_draining:
        raise draining(context.config)
    if not context.lifecycle.is_ready:
        raise not_ready(context.config)
    return await read_body(request, context.config)


def check_model(context: ServerContext, name: str) -> None:
    """Raise a 404 for any name but the one that is served."""
    if name != context.model_name:
        raise ApiError(
            404, f"This server serves {context.model_name} only; see /v1/models.", param="model", code="model_not_found"
        )


def new_id(prefix: str) -> str:
    """Make an id of our own: clients never choose what the engine files a request under."""
    return f"{prefix}-{uuid.uuid4().hex}"


def engine_requests(
    request: web.Request, call: GenerationRequest, call_id: str, prompts: Sequence[TokenIds]
) -> list[Request]:
    """Return the engine's requests: for each prompt in turn, one for each answer."""
    context = request.app[CONTEXT]
    num_answers, max_batch_size = call.n or 1, context.llm.engine.config.max_batch_size
    if num_answers > max_batch_size:
        raise invalid(f"n is {num_answers}, but this server runs {max_batch_size} sequences at a time: lower it.", "n")
    if num_answers * len(prompts) > context.config.max_prompts_per_call:
        raise invalid(
            f"{len(prompts)} prompts with {num_answers} answers each are {num_answers * len(prompts)}; "
            f"at most {context.config.max_prompts_per_call} fit in one call.",
            "n",
        )
    params = call.sampling_params(context.llm.model.vocab_size)
    requests = [
        Request(
            request_id=f"{call_id}-{index}",
            prompt_token_ids=prompt,
            params=params,
            priority=0.5 if call.priority is None else float(call.priority),
            cache_salt=cache_scope(request, call.cache_salt),
            arrival_s=time.monotonic(),
            tenant=tenant_of(request, call.user),
        )
        for index, prompt in enumerate(prompts)
    ]
    return [answer for one in requests for answer in fan_out(one, num_answers)]


async def answer(
    request: web.Request, call: GenerationRequest, reply: Reply, requests: Sequence[Request]
) -> web.StreamResponse:
    """Generate, and send the text as it comes or when it is whole."""
    context = request.app[CONTEXT]
    with context.lifecycle.answering():
        async with Generation(context, requests, answers_per_prompt=call.n or 1) as generation:
            logprobs = [reply.logprobs(context.llm.tokenizer.token_bytes) for _ in requests]
            if call.stream:
                return await _streamed(request, context, generation, reply, logprobs, include_usage=call.include_usage)
            return await _whole(request, generation, reply, logprobs)


async def _whole(
    request: web.Request, generation: Generation, reply: Reply, logprobs: Sequence[LogprobBuffer]
) -> web.Response:
    texts: list[list[str]] = [[] for _ in generation.choices]
    async for index, delta in generation:
        texts[index].append(delta.text)
        logprobs[index].add(delta.logprobs or ())
    choices = [
        reply.whole(index, "".join(texts[index]), (choice.finish_reason or FinishReason.STOP).value, logprobs[index])
        for index, choice in enumerate(generation.choices)
    ]
    response = json_response({**reply.envelope(is_chunk=False), "choices": choices, "usage": generation.usage()})
    # Sent here rather than by aiohttp after the handler, so that a drain waits for the last byte.
    await response.prepare(request)
    await response.write_eof()
    return response


async def _streamed(
    request: web.Request,
    context: ServerContext,
    generation: Generation,
    reply: Reply,
    logprobs: Sequence[LogprobBuffer],
    *,
    include_usage: bool,
) -> web.StreamResponse:
    envelope = reply.envelope(is_chunk=True)
    if include_usage:
        envelope["usage"] = None  # the API's way of saying "not yet"
    unopened = set(range(len(generation.choices)))

    def on_stall() -> None:
        generation.abort_cause = "stalled_reader"

    async with EventStream(request, context.config, on_stall) as stream:
        try:
            async for index, delta in generation:
                logprobs[index].add(delta.logprobs or ())
                reason = delta.finish_reason and delta.finish_reason.value
                chunks = reply.chunks(index, delta.text, reason, logprobs[index])
                if chunks and index in unopened:
                    unopened.remove(index)
                    chunks = reply.opening(index) + chunks
                for choice in chunks:
                    await stream.send({**envelope, "choices": [choice]})
            if include_usage:
                await stream.send({**envelope, "choices": [], "usage": generation.usage()})
            return await stream.finish()
        except ConnectionError:
            raise  # nobody is left to tell
        except Exception as error:
            return await stream.fail(from_engine(error, context.config).body())
