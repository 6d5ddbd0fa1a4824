"""How a workload's requests are put to a server: as token ids where it takes them, else as words."""

from enum import Enum
from typing import Any

import orjson

from trtcb.executor.request import Request

# Short and common, so that nearly every tokenizer has each as one token with the space before it.
_TEXT = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an had they "
    "you were all we can her has there been if more when will would who so no up into time them only some could these"
)
_WORDS = tuple(_TEXT.split())

_NEUTRAL_PRIORITY = 0.5


class PromptStyle(str, Enum):
    """What a request's prompt is sent as."""

    IDS = "token ids"
    WORDS = "words"
    CHAT = "one message of words"


def style_of(endpoint: str) -> PromptStyle:
    """Return what to try first at a route."""
    return PromptStyle.CHAT if endpoint.rstrip("/").endswith("chat/completions") else PromptStyle.IDS


def request_body(request: Request, style: PromptStyle, model: str) -> bytes:
    """Encode a request as JSON. A word stands for a token, so that lengths are about right; the server counts them.

    Fields that only some servers know are sent only where they say something.
    """
    params = request.params
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if params.temperature > 0:
        fields["seed"] = params.seed
    if params.ignore_eos:
        fields["ignore_eos"] = True
    if request.priority != _NEUTRAL_PRIORITY:
        fields["priority"] = request.priority
    if request.tenant:
        fields["user"] = request.tenant
    if style is PromptStyle.IDS:
        fields["prompt"] = request.prompt_token_ids
    else:
        text = " ".join(_WORDS[token % len(_WORDS)] for token in request.prompt_token_ids)
        fields |= {"prompt": text} if style is PromptStyle.WORDS else {"messages": [{"role": "user", "content": text}]}
    return orjson.dumps(fields)
