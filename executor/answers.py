"""What drawn tokens mean to their requests: text to send, and whether a request ends by them."""

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from trtcb.executor.detokenizer import TextOutput
from trtcb.executor.request import Delta, FinishReason, TokenLogprobs
from trtcb.executor.runtime import StepLogprobs
from trtcb.executor.sampling_state import token_logprobs
from trtcb.executor.sequence import Sequence

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's valid tokens: ``token_ids[i]``, the newest of ``sequences[i]``, was drawn by row ``rows[i]``."""

    sequences: list[Sequence]
    token_ids: list[int]
    rows: Items[int]
    logprobs: StepLogprobs | None


class Reader(Protocol):
    """Turns tokens into answers."""

    def read(self, drawn: Drawn) -> Iterator[tuple[Sequence, Delta]]:
        """What there is to tell; a sequence whose delta has a ``finish_reason`` ends by it."""


class AnswerReader:
    """Tells every token, with its text and logprobs."""

    def read(self, drawn: Drawn) -> Iterator[tuple[Sequence, Delta]]:
        """One delta a token."""
        for seq, token_id, row in zip(drawn.sequences, drawn.token_ids, drawn.rows, strict=True):
            reason = None
            if token_id in seq.end_token_ids:
                reason = FinishReason.STOP
            elif len(seq.token_ids) >= seq.max_len:
                reason = FinishReason.LENGTH
            text = ""
            if seq.text is not None:
                try:
                    text, reason = _text(seq.text, token_id, reason)
                except Exception as error:  # a tokenizer that chokes on one output must not stop the others
                    _log.warning("request %s could not be detokenised", seq.request_id, exc_info=error)
                    message = f"The output could not be turned into text: {error}"
                    yield seq, terminal_delta(seq, FinishReason.ERROR, message)
                    continue
            logprobs = token_logprobs(seq, token_id, drawn.logprobs, row)
            yield seq, _delta(seq, (token_id,), text, reason, logprobs)


class EndReader:
    """Tells only that a request ended, for when nobody wants the tokens. Knows no text, and so no stop strings."""

    def read(self, drawn: Drawn) -> Iterator[tuple[Sequence, Delta]]:
        """One delta for each request that ends."""
        for seq, token_id in zip(drawn.sequences, drawn.token_ids, strict=True):
            if token_id in seq.end_token_ids:
                yield seq, terminal_delta(seq, FinishReason.STOP)
            elif len(seq.token_ids) >= seq.max_len:
                yield seq, terminal_delta(seq, FinishReason.LENGTH)


def terminal_delta(seq: Sequence, reason: FinishReason, error: str | None = None) -> Delta:
    """Make the last delta of a sequence that ends without a token."""
    return _delta(seq, (), "", reason, None, error)


def _text(output: TextOutput, token_id: int, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
    """Text to send, and why the request ends, if it does. Neither an end token's text nor a stop string is sent."""
    text = ""
    if reason is not FinishReason.STOP:
        text, is_stopped = output.push(token_id)
        if is_stopped:
            return text, FinishReason.STOP
    if reason is not None:
        rest, is_stopped = output.finish()
        text += rest
        reason = FinishReason.STOP if is_stopped else reason
    return text, reason


def _delta(
    seq: Sequence,
    token_ids: tuple[int, ...],
    text: str,
    reason: FinishReason | None,
    logprobs: tuple[TokenLogprobs, ...] | None,
    error: str | None = None,
) -> Delta:
    return Delta(seq.request_id, token_ids, text, reason, error, seq.num_prompt_tokens, seq.num_cached_tokens, logprobs)
