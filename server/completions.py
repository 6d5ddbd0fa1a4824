"""``POST /v1/completions``."""

import time
from dataclasses import dataclass

from aiohttp import web

from trtcb.server.answer import Json, answer, check_model, engine_requests, new_id, open_call
from trtcb.server.context import CONTEXT, ServerContext
from trtcb.server.logprobs import CompletionLogprobs, LogprobBuffer, TokenBytes
from trtcb.server.prompts import TokenIds, completion_prompts, offload
from trtcb.server.schemas import CompletionRequest, parse


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """``text_completion`` objects."""

    id: str
    created: int
    model: str

    def envelope(self, *, is_chunk: bool) -> Json:
        """Begin an object; chunks and whole answers share one kind."""
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def opening(self, index: int) -> list[Json]:
        """Return nothing: nothing comes before the text."""
        return []

    def chunks(self, index: int, text: str, finish_reason: str | None, logprobs: LogprobBuffer) -> list[Json]:
        """Return at most one; a step whose text is held back says nothing."""
        if not text and finish_reason is None:
            return []
        return [self.whole(index, text, finish_reason, logprobs)]

    def whole(self, index: int, text: str, finish_reason: str | None, logprobs: LogprobBuffer) -> Json:
        """Return the text and why it ended."""
        return {"index": index, "text": text, "logprobs": logprobs.take(), "finish_reason": finish_reason}

    def logprobs(self, token_bytes: TokenBytes) -> LogprobBuffer:
        """Make the buffer of one choice's log-probabilities."""
        return CompletionLogprobs(token_bytes)


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one prompt or many."""
    context = request.app[CONTEXT]
    body = await open_call(request)
    call, prompts = await offload(
        context.pool, lambda: _prepare(body, context), size=len(body), threshold=context.config.offload_bytes
    )
    reply = CompletionReply(new_id("cmpl"), int(time.time()), context.model_name)
    return await answer(request, call, reply, engine_requests(request, call, reply.id, prompts))


def _prepare(body: bytes, context: ServerContext) -> tuple[CompletionRequest, list[TokenIds]]:
    call = parse(body, CompletionRequest)
    check_model(context, call.model)
    prompts = completion_prompts(
        call.prompt,
        context.llm.tokenizer,
        vocab_size=context.llm.model.vocab_size,
        max_prompts=context.config.max_prompts_per_call,
        max_seq_len=context.llm.engine.config.max_seq_len,
    )
    return call, prompts
