"""``POST /v1/chat/completions``."""

import time
from dataclasses import dataclass

from aiohttp import web

from trtcb.server.answer import Json, answer, check_model, engine_requests, new_id, open_call
from trtcb.server.context import CONTEXT, ServerContext
from trtcb.server.logprobs import ChatLogprobs, LogprobBuffer, TokenBytes
from trtcb.server.prompts import TokenIds, chat_prompt, offload
from trtcb.server.schemas import ChatRequest, parse


@dataclass(frozen=True, slots=True)
class ChatReply:
    """``chat.completion`` and ``chat.completion.chunk`` objects."""

    id: str
    created: int
    model: str

    def envelope(self, *, is_chunk: bool) -> Json:
        """Begin an object; chunks and whole answers differ in kind."""
        kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def opening(self, index: int) -> list[Json]:
        """Say who is speaking."""
        return [_delta(index, {"role": "assistant", "content": ""}, None)]

    def chunks(self, index: int, text: str, finish_reason: str | None, logprobs: LogprobBuffer) -> list[Json]:
        """Return the text, and in a chunk of its own the end."""
        chunks = [_delta(index, {"content": text}, None, logprobs.take())] if text else []
        if finish_reason is not None:
            chunks.append(_delta(index, {}, finish_reason, logprobs.take()))
        return chunks

    def logprobs(self, token_bytes: TokenBytes) -> LogprobBuffer:
        """Make the buffer of one choice's log-probabilities."""
        return ChatLogprobs(token_bytes)

    def whole(self, index: int, text: str, finish_reason: str, logprobs: LogprobBuffer) -> Json:
        """Return the assistant's message and why it ended."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs.take(), "finish_reason": finish_reason}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    context = request.app[CONTEXT]
    body = await open_call(request)
    call, prompt = await offload(
        context.pool, lambda: _prepare(body, context), size=len(body), threshold=context.config.offload_bytes
    )
    reply = ChatReply(new_id("chatcmpl"), int(time.time()), context.model_name)
    return await answer(request, call, reply, engine_requests(request, call, reply.id, [prompt]))


def _delta(index: int, delta: Json, finish_reason: str | None, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _prepare(body: bytes, context: ServerContext) -> tuple[ChatRequest, TokenIds]:
    call = parse(body, ChatRequest)
    check_model(context, call.model)
    return call, chat_prompt(call.messages, context.llm.tokenizer, max_seq_len=context.llm.engine.config.max_seq_len)
