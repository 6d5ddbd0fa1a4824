"""Decides at submission whether a request can ever be served, and says with numbers why not."""

import math
import secrets
from dataclasses import dataclass

from trtcb.errors import RequestError, shown
from trtcb.executor.config import EngineConfig
from trtcb.executor.detokenizer import Decoder, TextOutput
from trtcb.executor.request import MAX_LOGIT_BIASES, MAX_LOGPROBS, Request, SamplingParams
from trtcb.executor.sampling_state import SamplingState
from trtcb.executor.sequence import Sequence
from trtcb.executor.values import LARGEST, is_int, is_number

_SEED_MASK = (1 << 64) - 1
_MAX_TOP_K = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Admission:
    """The fixed facts that requests are checked against. Immutable, so any thread may use it."""

    config: EngineConfig
    num_blocks: int
    vocab_size: int
    tokenizer: Decoder | None  # None: an engine of token ids alone
    eos_token_ids: frozenset[int] = frozenset()

    def sequence(self, request: Request, now_s: float) -> Sequence:
        """Make a sequence of ``request``, or raise :class:`RequestError`. Without a seed, it gets a random one."""
        params = request.params
        _check_labels(request)
        _check_params(params, has_tokenizer=self.tokenizer is not None)
        _check_logit_params(params, self.vocab_size)
        _check_number("priority", request.priority, 0.0, 1.0)
        self._check_prompt(request.prompt_token_ids)
        seed = params.seed
        max_tokens = self._max_tokens(len(request.prompt_token_ids), params.max_tokens)
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {shown(params.min_tokens)}, but this request may have {max_tokens} new tokens: "
                "lower it.",
                param="min_tokens",
            )
        seq = Sequence(
            request,
            max_tokens=max_tokens,
            seed=secrets.randbits(64) if seed is None else seed & _SEED_MASK,
            arrival_s=request.arrival_s or now_s,
        )
        if self.tokenizer is not None:
            seq.text = TextOutput(
                self.tokenizer, request.prompt_token_ids, params.stop, num_exempt_tokens=params.min_tokens
            )
        ends = frozenset() if params.ignore_eos else self.eos_token_ids
        seq.end_token_ids = ends.union(params.stop_token_ids) if params.stop_token_ids else ends
        masked = [token for token in seq.end_token_ids if 0 <= token < self.vocab_size] if params.min_tokens else []
        seq.sampling = SamplingState.of(params, end_token_ids=sorted(masked))
        return seq

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            raise RequestError("The prompt is empty: send at least one token.", param="prompt")
        length, limit = len(token_ids), self.config.max_seq_len
        if length >= limit:
            raise RequestError(
                f"The prompt has {length} tokens, but with at least one new token a request may have {limit}: "
                f"shorten it to {limit - 1}.",
                param="prompt",
                code="context_length_exceeded",
            )
        is_plain = set(map(type, token_ids)) == {int}  # as good as always, and then no loop over them is needed
        if not (is_plain and min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            self._check_each(token_ids)
        if not self.config.chunked_prefill and length > self.config.max_num_tokens:
            raise RequestError(
                f"The prompt has {length} tokens, but without chunked prefill one step must hold it whole, and "
                f"max_num_tokens is {self.config.max_num_tokens}: shorten the prompt, or turn chunked_prefill on.",
                param="prompt",
                code="context_length_exceeded",
            )

    def _check_each(self, token_ids: tuple[int, ...]) -> None:
        for token in token_ids:
            if not is_int(token) or not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"Token id {shown(token)} is outside the vocabulary: use ids from 0 to {self.vocab_size - 1}.",
                    param="prompt",
                )

    def _max_tokens(self, num_prompt_tokens: int, asked: int | None) -> int:
        """Output limit in tokens. Beyond what the pool holds, an asked one is refused and a default one is cut."""
        size = self.config.block_size
        fit_sequence = self.config.max_seq_len - num_prompt_tokens
        fit_pool = self.num_blocks * size - num_prompt_tokens
        wanted = asked if asked is not None else min(self.config.default_max_tokens or fit_sequence, max(fit_pool, 1))
        max_tokens = min(wanted, fit_sequence)
        if max_tokens <= fit_pool:
            return max_tokens
        remedy = f"max_tokens ≤ {fit_pool} would fit" if fit_pool > 0 else "the prompt alone fills it: shorten it"
        raise RequestError(
            f"The request needs {-(-(num_prompt_tokens + max_tokens) // size)} KV blocks of {size} tokens "
            f"(prompt {num_prompt_tokens} + max_tokens {max_tokens}), but the pool has {self.num_blocks}; {remedy}.",
            param="max_tokens" if fit_pool > 0 else "prompt",
            code="context_length_exceeded",
        )


def _check_labels(request: Request) -> None:
    """The engine thread hashes and compares these: a value of another type would stop it for everybody."""
    for name in ("request_id", "cache_salt", "tenant", "fork_group"):
        if not isinstance(getattr(request, name), str):
            raise RequestError(f"{name} must be a text.", param=name)
    if not isinstance(request.params, SamplingParams):
        raise RequestError("params must be SamplingParams.", param="params")
    if not isinstance(request.arrival_s, (int, float)) or not abs(request.arrival_s) <= LARGEST:
        raise RequestError("arrival_s must be a number of seconds on the engine's clock.", param="arrival_s")
    for name in ("stop", "stop_token_ids", "logit_bias"):
        if not isinstance(getattr(request.params, name), (tuple, list)):
            raise RequestError(f"{name} must be a list or tuple, even for one entry.", param=name)
    if not isinstance(request.params.ignore_eos, bool):
        raise RequestError("ignore_eos must be true or false.", param="ignore_eos")
    if not isinstance(request.prompt_token_ids, tuple):  # siblings are found by it, and nobody may change it
        raise RequestError("The prompt must be a tuple of token ids: write tuple(...) around it.", param="prompt")


def _check_params(params: SamplingParams, *, has_tokenizer: bool) -> None:
    if params.max_tokens is not None and not (is_int(params.max_tokens) and params.max_tokens >= 1):
        raise RequestError(
            f"max_tokens must be a whole number of at least 1, not {shown(params.max_tokens)}.", param="max_tokens"
        )
    _check_number("temperature", params.temperature, 0.0, math.inf)
    _check_number("min_p", params.min_p, 0.0, 1.0)
    _check_number("top_p", params.top_p, 0.0, 1.0)
    if params.top_p == 0.0:
        raise RequestError("top_p must be above 0: use temperature 0 for greedy decoding.", param="top_p")
    if not is_int(params.top_k) or not 0 <= params.top_k <= _MAX_TOP_K:
        raise RequestError(f"top_k must be a whole number, 0 for off, not {shown(params.top_k)}.", param="top_k")
    if not is_int(params.n) or params.n != 1:
        raise RequestError(f"A request has one answer, not n={shown(params.n)}: make a request for each.", param="n")
    if params.seed is not None and not is_int(params.seed):
        raise RequestError(f"seed must be a whole number, not {shown(params.seed)}.", param="seed")
    if not all(isinstance(stop, str) and stop for stop in params.stop):
        raise RequestError("A stop string is empty: leave it out.", param="stop")
    if params.stop and not has_tokenizer:
        raise RequestError("This engine has no tokenizer to match stop strings: use stop_token_ids.", param="stop")
    if not all(is_int(token) for token in params.stop_token_ids):
        raise RequestError("stop_token_ids must be whole numbers.", param="stop_token_ids")


def _check_logit_params(params: SamplingParams, vocab_size: int) -> None:
    _check_number("repetition_penalty", params.repetition_penalty, 0.01, 100.0)
    _check_number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    if not is_int(params.min_tokens) or params.min_tokens < 0:
        raise RequestError(
            f"min_tokens must be a whole number of at least 0, not {shown(params.min_tokens)}.", param="min_tokens"
        )
    if params.logprobs is not None and not (is_int(params.logprobs) and 0 <= params.logprobs <= MAX_LOGPROBS):
        raise RequestError(
            f"logprobs must be a whole number from 0 to {MAX_LOGPROBS}, not {shown(params.logprobs)}.", param="logprobs"
        )
    if len(params.logit_bias) > MAX_LOGIT_BIASES:
        raise RequestError(
            f"logit_bias has {len(params.logit_bias)} entries: send at most {MAX_LOGIT_BIASES}.", param="logit_bias"
        )
    for entry in params.logit_bias:
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            raise RequestError("logit_bias is made of pairs, each a token id and a number.", param="logit_bias")
        token, bias = entry
        if not is_int(token) or not 0 <= token < vocab_size:
            raise RequestError(
                f"Token id {shown(token)} of logit_bias is outside the vocabulary: use ids from 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
        _check_number("logit_bias", bias, -100.0, 100.0)


def _check_number(param: str, value: float, least: float, most: float) -> None:
    if not is_number(value) or not abs(value) <= LARGEST or not least <= value <= most:
        bound = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
        raise RequestError(f"{param} must be a number {bound}, not {shown(value)}.", param=param)
