"""A request as the engine sees it, and what comes back. Everything here crosses threads, so everything is immutable."""

from dataclasses import dataclass, replace
from enum import Enum

MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Defaults follow the OpenAI API, with ``temperature=0`` meaning greedy.

    ``max_tokens=None`` means "up to ``max_seq_len``". ``top_k=0`` and ``top_p=1`` and ``min_p=0`` are off. A ``seed``
    makes the tokens a function of (request, seed) alone: random numbers are keyed by (seed, position), never by the
    batch.

    Names, order and meaning of what changes the logits are vLLM's. First ``logit_bias``, pairs of (token id, number to
    add), at most ``MAX_LOGIT_BIASES``. Until ``min_tokens`` are drawn no end token can be, and no stop string is looked
    for in their text. Then ``repetition_penalty`` divides positive logits of tokens seen in prompt or output and
    multiplies negative ones, ``frequency_penalty`` is subtracted once for each time a token is in the output, and
    ``presence_penalty`` once if it is there at all.

    ``n`` answers to the prompt are for :meth:`LLM.generate` and :func:`fan_out`; the engine itself gives one a request.

    ``logprobs`` asks for the log-probability of each token drawn and of that many likeliest ones, at most
    ``MAX_LOGPROBS``; they are the model's own, of logits before any of this and of the temperature.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    n: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. ``arrival_s`` is on the engine's clock; higher ``priority`` (0..1) goes first.

    ``tenant`` is on whose account it is served, where the queue policy is fair to tenants. Requests with the same
    ``fork_group``, not empty, and equal prompts and salts are answers to one prompt: it is computed once for them.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: float = 0.5
    cache_salt: str = ""
    arrival_s: float = 0.0
    tenant: str = ""
    fork_group: str = ""


def fan_out(request: Request, count: int) -> list[Request]:
    """Return ``count`` requests for as many answers to one prompt (the API's ``n``).

    They differ in their ids and, where there is a seed, in that: answer ``i`` has ``seed + i``, as in vLLM. The prompt
    is computed once: its full blocks are shared, and the last, partial one is copied (``siblings.py``).
    """
    params = replace(request.params, n=1)
    if count == 1:
        return [replace(request, params=params)]
    return [
        replace(
            request,
            request_id=f"{request.request_id}-{index}",
            fork_group=request.request_id,
            params=params if params.seed is None else replace(params, seed=params.seed + index),
        )
        for index in range(count)
    ]


class FinishReason(str, Enum):
    """Why a sequence ended. ``stop``: an end token or stop string; ``length``: a limit; ``abort``: the client left."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a drawn token, and which it found likeliest: ``top`` is (token id, logprob), falling.

    Natural logarithms. The drawn token need not be among ``top``.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to one request. Exactly one delta per request has a ``finish_reason``, and it is the last.

    ``logprobs`` has an entry for each of ``token_ids`` if the request asked for them, else None.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
