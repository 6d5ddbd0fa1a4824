"""From drawn tokens to text that can be sent: half characters and possible stop strings are held back until decided."""

from collections.abc import Iterable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"  # how tokenizers show bytes that are no complete character
_CONTEXT_TOKENS = 4  # kept before new tokens, as decoding depends on neighbours (SentencePiece drops a leading space)
_PROMPT_TOKENS = 6  # of the prompt, as context for the first tokens
_MAX_WINDOW = 20  # tokens kept for decoding, unless characters straddle them all
_MAX_PENDING = 8  # tokens that usually suffice to complete a character; beyond that, look for a place to cut
_MAX_SPLIT = 3  # bytes, and so tokens at most, of a character that is not complete yet


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, special tokens left out; incomplete UTF-8 becomes U+FFFD."""


class Detokenizer:
    """Text of one growing token sequence. The pieces add up to what decoding prompt and output at once would add.

    Decodes a short window with every token, so a token costs the same however long the output is. Tokens without text
    (special ones) are dropped from the window, so that they cannot push its context out.
    """

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._window = self._prompt_end(prompt_token_ids)
        # The window's first tokens are settled: their text was returned, or belongs to the prompt.
        self._num_settled = len(self._window)
        self._settled_text = decoder.decode(self._window)
        # A prompt may end within a character. If the output completes it, that character is new text as a whole.
        self._num_sent = len(self._settled_text.rstrip(_REPLACEMENT))

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is certain now, often none."""
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        if text.endswith(_REPLACEMENT):
            return self._cut_garbage(text)
        if text == self._settled_text and (text or len(self._window) > _MAX_WINDOW):
            self._window.pop()
            return ""
        return self._settle(len(self._window), text)

    def flush(self) -> str:
        """Return what is still held back, as it stands: a half character becomes U+FFFD."""
        return self._settle(len(self._window), self._decoder.decode(self._window))

    def _prompt_end(self, token_ids: Sequence[int]) -> list[int]:
        """Last tokens of the prompt, from the beginning of a character on."""
        window: list[int] = []
        for num_tokens in range(_PROMPT_TOKENS, _PROMPT_TOKENS + _MAX_SPLIT + 1):
            window = list(token_ids[-num_tokens:])
            if not self._decoder.decode(window).startswith(_REPLACEMENT):
                break
        return window

    def _cut_garbage(self, text: str) -> str:
        """Wait for the end of a character, but not for ever: bytes that never become one are text too."""
        num_pending = len(self._window) - self._num_settled
        if num_pending < _MAX_PENDING:
            return ""
        num_certain = len(self._window) - _MAX_SPLIT  # whatever is incomplete now began after these
        head = self._decoder.decode(self._window[:num_certain])
        if text.startswith(head):  # no character straddles the cut
            return self._settle(num_certain, head)
        return self._settle(len(self._window), text) if num_pending > 3 * _MAX_WINDOW else ""

    def _settle(self, num_tokens: int, text: str) -> str:
        """Return what is new in ``text``, that of the window's first ``num_tokens``. Moves a long window on."""
        is_continued = text.startswith(self._settled_text)
        new_text = text[len(self._settled_text) if is_continued else self._num_sent :]
        if len(self._window) > _MAX_WINDOW:
            first = self._context_start(num_tokens, text)
            del self._window[:first]
            num_tokens -= first
            text = self._decoder.decode(self._window[:num_tokens])
        self._num_settled, self._num_sent, self._settled_text = num_tokens, len(text), text
        return new_text

    def _context_start(self, num_tokens: int, text: str) -> int:
        """Where the window may start anew: with a whole character, as half of one can spoil what follows."""
        start = max(0, num_tokens - _CONTEXT_TOKENS)
        for first in range(start, max(-1, start - _MAX_SPLIT - 1), -1):
            context = self._decoder.decode(self._window[first:num_tokens])
            if context and not context.startswith(_REPLACEMENT) and text.endswith(context):
                return first
        return start


class StopMatcher:
    """Finds stop strings in text that comes in pieces; where the pieces break makes no difference.

    The match that is complete first wins, the longest if several end together. Text is only returned once it can no
    longer become part of a match.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return what is certain now, and whether a stop string was found, which ends the text before it."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        cut = self._first_candidate(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Return what is held back, as no more text will come."""
        held, self._held = self._held, ""
        return held

    def _first_candidate(self, text: str) -> int:
        """Where the longest end of ``text`` starts that is a beginning of some stop string."""
        first = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
            while start >= 0:
                if stop.startswith(text[start:]):
                    first = start
                    break
                start = text.find(stop[0], start + 1, first)
        return first


class TextOutput:
    """The text of one request: a detokenizer and a stop matcher in a row.

    No stop string is looked for in what the first ``num_exempt_tokens`` tokens say.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt_token_ids: Sequence[int],
        stops: Sequence[str],
        *,
        num_exempt_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(decoder, prompt_token_ids)
        self._matcher = StopMatcher(stops) if stops else None
        self._num_exempt_tokens = num_exempt_tokens

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add a token; return the text that may be sent, and whether a stop string ended it."""
        text = self._detokenizer.push(token_id)
        if self._num_exempt_tokens:
            self._num_exempt_tokens -= 1
            return text, False
        return self._matcher.push(text) if self._matcher is not None and text else (text, False)

    def finish(self) -> tuple[str, bool]:
        """Return all text still held back, and whether a stop string ended it after all."""
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text, False
        text, stopped = self._matcher.push(text)
        return (text, True) if stopped else (text + self._matcher.flush(), False)
