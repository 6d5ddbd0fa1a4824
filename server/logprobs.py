"""Log-probabilities in the two shapes of the API. They wait until there is a chunk to send them in."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from trtcb.executor.request import TokenLogprobs

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]
_LEAST = -9999.0  # JSON has no infinity


class LogprobBuffer(Protocol):
    """Gathers one choice's log-probabilities."""

    def add(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Take in what a step brought."""

    def take(self) -> Json | None:
        """Return what came since the last call, as the ``logprobs`` of a choice; None if nothing did."""


class CompletionLogprobs:
    """The older shape: lists side by side. ``text_offset`` counts characters of all tokens of the choice."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._offset = 0
        self._entries: list[TokenLogprobs] = []

    def add(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Take in what a step brought."""
        self._entries.extend(logprobs)

    def take(self) -> Json | None:
        """Return what came since the last call; the drawn token is always among ``top_logprobs``."""
        entries, self._entries = self._entries, []
        if not entries:
            return None
        tokens = [self._name(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(entry.logprob, _LEAST) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._name(token_id), max(logprob, _LEAST))
        return top

    def _name(self, token_id: int) -> str:
        # Bytes that are no text would all look alike; the API spells them out.
        data = self._token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatLogprobs:
    """The newer shape: an object a token, with its bytes."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._entries: list[TokenLogprobs] = []

    def add(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Take in what a step brought."""
        self._entries.extend(logprobs)

    def take(self) -> Json | None:
        """Return what came since the last call."""
        entries, self._entries = self._entries, []
        if not entries:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        data = self._token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, _LEAST), "bytes": list(data)}
