"""One streamed request to an OpenAI-compatible server, timed as its pieces arrive."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from trtcb.errors import TrtcbError, UsageError

_MAX_DETAIL_CHARS = 300


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back of one request. Times in seconds from when it was sent.

    ``ttft_s`` is the arrival of the first text, None if nothing came. ``gaps_s`` lie between arrivals of text: one a
    token where the server sends each token at once. ``failure`` names the kind of what went wrong, and ``detail`` is
    the server's own sentence; a reply without it is whole, and its counts are the server's ``usage``.
    """

    ttft_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    e2e_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    failure: str | None = None
    detail: str = ""


class ApiClient:
    """A server, the route that is asked, and a session of the running event loop, which belongs to the caller."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, endpoint: str, api_key: str | None) -> None:
        # Clients of the API name its base with /v1, vLLM's benchmark without; either is taken.
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.url = f"{self.base_url}/{endpoint.lstrip('/')}"
        self._session = session
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def models(self) -> list[str]:
        """Names of the models that are served; raises an error that names the fix if the server does not tell."""
        url = f"{self.base_url}/v1/models"
        try:
            async with self._session.get(url, headers=self._headers) as response:
                body = await response.read()
                check_access(response.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable(self.base_url, str(error)) from None
        except ValueError:
            raise UsageError(f"'{self.base_url}' is no address: write --base-url http://HOST:PORT.") from None
        try:
            names = [entry["id"] for entry in orjson.loads(body)["data"]]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            names = []
        if response.status != 200 or not names or not all(isinstance(name, str) for name in names):
            raise UsageError(f"{url} names no model (HTTP {response.status}): say which with --model.")
        return names

    async def ask(self, body: bytes) -> Reply:
        """Send one request and read its stream to the end. Whatever goes wrong is in the reply."""
        reading = _Reading()
        try:
            async with self._session.post(self.url, data=body, headers=self._headers) as response:
                if response.status != 200:
                    return reading.refused(response.status, await response.read())
                if response.content_type != "text/event-stream":
                    return reading.failed("no stream", f"the answer is {response.content_type}")
                async for now_s, data in _events(response.content):
                    failure = reading.take(now_s, data)
                    if failure is not None:
                        return failure
        except aiohttp.ClientConnectorError as error:
            return reading.failed("no connection", str(error.os_error or error))
        except TimeoutError:
            return reading.failed("timed out", "")
        except (aiohttp.ClientError, OSError) as error:
            return reading.failed("connection lost", str(error))
        return reading.reply()


class _Reading:
    """Takes in the events of one stream. Its clock starts when it is made."""

    def __init__(self) -> None:
        self._sent_s = self._last_s = time.perf_counter()
        self._first_s: float | None = None
        self._has_text = False
        self._gaps_s: list[float] = []
        self._usage: dict[str, Any] | None = None
        self._is_finished = False

    def take(self, now_s: float, data: bytes) -> Reply | None:
        """Take one event; returns the reply if it ends here, in failure."""
        if data == b"[DONE]":
            return None
        try:
            event = orjson.loads(data)
            if "error" in event:
                code, detail = _error_words(event)
                return self.failed(f"error in the stream ({code})" if code else "error in the stream", detail)
            self._usage = event.get("usage") or self._usage
            for choice in event.get("choices", ()):
                self._take_choice(now_s, choice)
        except (orjson.JSONDecodeError, AttributeError, TypeError) as error:
            return self.failed("not the API's stream", f"{error}: {data[:80]!r}")
        return None

    def _take_choice(self, now_s: float, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content") or delta.get("reasoning_content")
        if text and self._has_text:
            self._gaps_s.append(now_s - self._last_s)
        is_opening = delta is not None and "role" in delta and not text  # says who speaks, and nothing of a token
        if self._first_s is None and not is_opening:
            self._first_s = now_s
        self._has_text = self._has_text or bool(text)
        self._is_finished = self._is_finished or choice.get("finish_reason") is not None
        if not is_opening:
            self._last_s = now_s

    def refused(self, status: int, body: bytes) -> Reply:
        """Make the reply of a request that got another status than 200."""
        try:
            code, detail = _error_words(orjson.loads(body))
        except (orjson.JSONDecodeError, AttributeError):
            code, detail = "", body.decode("utf-8", "replace")
        return self.failed(f"HTTP {status} ({code})" if code else f"HTTP {status}", detail)

    def failed(self, kind: str, detail: str) -> Reply:
        """Make the reply of a request that went wrong."""
        return Reply(e2e_s=time.perf_counter() - self._sent_s, failure=kind, detail=detail[:_MAX_DETAIL_CHARS])

    def reply(self) -> Reply:
        """Make the reply of a stream that ended by itself."""
        if not self._is_finished or self._first_s is None:
            return self.failed("stream cut off", "it ended without a finish_reason")
        try:
            counts = (int(self._usage["prompt_tokens"]), int(self._usage["completion_tokens"])) if self._usage else None
        except (KeyError, TypeError, ValueError):
            counts = None
        if counts is None:
            return self.failed("no usage", "the stream carries no token counts (stream_options.include_usage)")
        return Reply(self._first_s - self._sent_s, tuple(self._gaps_s), self._last_s - self._sent_s, *counts)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[float, bytes]]:
    """Yield each event's data with the moment at which its last byte was read."""
    rest = b""
    async for piece in content.iter_any():
        now_s = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now_s, line[5:].strip()
    if rest.startswith(b"data:"):
        yield time.perf_counter(), rest[5:].strip()


def _error_words(event: Any) -> tuple[str, str]:
    """Code and message of an error object, in the shapes that servers use."""
    error = event.get("error", event)
    if not isinstance(error, dict):
        return "", str(error)
    code = error.get("code") or error.get("type") or ""
    return str(code), str(error.get("message") or error.get("detail") or error)


def check_access(status: int) -> None:
    """Raise if a server wants a key, or another one."""
    if status in (401, 403):
        raise UsageError(f"The server wants a valid key (HTTP {status}): give it with --api-key or OPENAI_API_KEY.")


def unreachable(url: str, why: str) -> TrtcbError:
    """Make the error of a server that cannot be reached."""
    return TrtcbError(f"No server answers at {url} ({why}): start one with `trtcb serve PLAN`, or check --base-url.")
