"""A request as the engine sees it, and what comes back. Everything here crosses threads, so everything is immutable."""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Defaults follow the OpenAI API, with ``temperature=0`` meaning greedy.

    ``max_tokens=None`` means "up to ``max_seq_len``". ``top_k=0`` and ``top_p=1`` and ``min_p=0`` are off. A ``seed``
    makes the tokens a function of (request, seed) alone: random numbers are keyed by (seed, position), never by the
    batch.
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


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. ``arrival_s`` is on the engine's clock; higher ``priority`` (0..1) goes first.

    ``tenant`` is on whose account it is served, where the queue policy is fair to tenants.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: float = 0.5
    cache_salt: str = ""
    arrival_s: float = 0.0
    tenant: str = ""


class FinishReason(str, Enum):
    """Why a sequence ended. ``stop``: an end token or stop string; ``length``: a limit; ``abort``: the client left."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to one request. Exactly one delta per request has a ``finish_reason``, and it is the last."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
