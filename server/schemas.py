"""The requests of the API, checked field by field: nothing a client sends is ever dropped in silence."""

import difflib
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from trtcb.executor.request import MAX_LOGIT_BIASES, MAX_LOGPROBS, SamplingParams
from trtcb.server.errors import ApiError, invalid
from trtcb.server.limits import (
    MAX_CHOICES,
    MAX_LABEL_CHARS,
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

_INT64 = 1 << 63
_MAX_ID_DIGITS = 9
_SHOWN_CHARS = 64  # how much of a client's own text an error repeats

# Lists stop at their first bad item: four megabytes of them must not become a million error objects.
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[
    list[StopString],
    Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
StopTokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
TokenCount = Annotated[int, Field(ge=1, lt=1 << 31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
LogitBias = tuple[tuple[int, float], ...]
Label = Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]

# Fields of the OpenAI API, and of vLLM's extensions, that mean something this server does not do. The values listed ask
# for nothing, and clients send them unasked; any other value is refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "skip_special_tokens": (True,),
    "reasoning_effort": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "lora_request": (),
}


def _logit_bias(value: Any) -> LogitBias | None:
    """Turn the API's ``{"id": number}`` into pairs. One error at most, however long the object."""
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        raise PydanticCustomError("logit_bias", f"Input should be an object of at most {MAX_LOGIT_BIASES} entries")
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= _MAX_ID_DIGITS):
            raise PydanticCustomError("logit_bias", "Keys should be token ids")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", "Values should be numbers from -100 to 100")
    return tuple((int(token), float(bias)) for token, bias in value.items())


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        # Clients send back what they were sent: a message with `"refusal": null`, `"annotations": []`, ...
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name in cls.model_fields or value not in (None, [])}


class StreamOptions(_Strict):
    """``include_usage`` adds a last chunk with the token counts."""

    include_usage: bool | None = None


class GenerationRequest(_Strict):
    """What both routes share. ``top_k`` 0 or -1 is off; a higher ``priority`` goes first; ``n`` answers to a prompt."""

    model: Annotated[str, Field(min_length=1)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[LogitBias | None, BeforeValidator(_logit_bias)] = None
    priority: Annotated[float, Field(ge=0, le=1)] | None = None
    user: Label | None = None
    cache_salt: Label | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are wanted beside each one drawn; None if no log-probabilities are."""
        return None

    def sampling_params(self, vocab_size: int) -> SamplingParams:
        """Return the engine's view; raises a 400 for what only fields together, or the vocabulary, can tell."""
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens differ; send one of them.", "max_completion_tokens")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream: true.", "stream_options")
        stop_token_ids = tuple(self.stop_token_ids or ())
        if any(token >= vocab_size for token in stop_token_ids):
            raise invalid(f"A stop token id lies outside the vocabulary of {vocab_size}.", "stop_token_ids")
        if any(token >= vocab_size for token, _ in self.logit_bias or ()):
            raise invalid(f"A token id of logit_bias lies outside the vocabulary of {vocab_size}.", "logit_bias")
        return SamplingParams(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            min_p=float(self.min_p or 0.0),
            seed=None if self.seed is None else self.seed % (1 << 64),
            stop=tuple(self.stop or ()),
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            repetition_penalty=1.0 if self.repetition_penalty is None else float(self.repetition_penalty),
            presence_penalty=float(self.presence_penalty or 0.0),
            frequency_penalty=float(self.frequency_penalty or 0.0),
            logit_bias=self.logit_bias or (),
            min_tokens=self.min_tokens or 0,
            logprobs=self.num_logprobs,
        )


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``. ``prompt`` has four shapes and up to a million numbers, so ``prompts.py`` checks it."""

    prompt: Any
    logprobs: Annotated[NumLogprobs | None, BeforeValidator(lambda value: None if value is False else value)] = None

    @property
    def num_logprobs(self) -> int | None:
        """As the field says."""
        return self.logprobs


class TextPart(_Strict):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


Content = Annotated[
    list[TextPart],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(lambda content: [{"type": "text", "text": content}] if isinstance(content, str) else content),
]


class ChatMessage(_Strict):
    """One turn of a conversation. Content sent as a text becomes one part."""

    role: Literal["system", "user", "assistant"]
    content: Content

    def as_template_input(self) -> dict[str, str]:
        """Return what a chat template is given: plain text, parts joined by line ends."""
        return {"role": self.role, "content": "\n".join(part.text for part in self.content)}


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        """``logprobs`` turns them on, ``top_logprobs`` says how many."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling_params(self, vocab_size: int) -> SamplingParams:
        """Return the engine's view, as for every call."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true.", "top_logprobs")
        return super().sampling_params(vocab_size)


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse(body: bytes, schema: type[RequestT]) -> RequestT:
    """Decode and check a request; every fault is a 400 that names the field."""
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    known = schema.model_fields
    for name in [name for name in raw if name not in known]:
        _refuse(name, raw[name], list(known))
        del raw[name]
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        raise _from_validation(error) from None


def _refuse(name: str, value: Any, known: list[str]) -> None:
    # A neutral value must match in type too: `True == 1` in Python, not in the API. Numbers may be int or float.
    neutral = UNSUPPORTED.get(name)
    if neutral is not None:
        if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral):
            return
        raise invalid(
            f"This value of {name} is not supported by this server; leave the field out.", name, "unsupported_parameter"
        )
    shown = name[:_SHOWN_CHARS]
    close = difflib.get_close_matches(shown, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise invalid(f"Unknown field {shown}{hint}", shown, "unknown_parameter")


def _from_validation(error: ValidationError) -> ApiError:
    # Only the first fault, and only its text: pydantic's own rendering repeats the input, which may be a prompt.
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])[: 2 * _SHOWN_CHARS]
    if first["type"] == "missing":
        return invalid(f"{param} is required.", param, "missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return invalid(f"{param} is not supported by this server; leave it out.", param, "unsupported_parameter")
    return invalid(f"{param}: {first['msg']}.", param)
