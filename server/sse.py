"""Server-sent events: one JSON object a frame, kept alive while queued, given up when the reader stalls."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from trtcb.server.limits import ServerConfig

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would otherwise hold frames back
}
_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


class EventStream:
    """One streaming response. ``send`` returns when the frame is buffered, or waits while the client does not read.

    A client that reads nothing for ``write_stall_s`` is disconnected, which cancels the handler as any disconnect does;
    ``on_stall`` is told first.
    """

    def __init__(self, request: web.Request, config: ServerConfig, on_stall: Callable[[], None]) -> None:
        self._request = request
        self._config = config
        self._on_stall = on_stall
        self._response = web.StreamResponse(headers=_HEADERS)
        self._clock = asyncio.get_running_loop().time
        self._has_events = False
        self._write_began: float | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "EventStream":
        await self._response.prepare(self._request)
        self._request.writer.send_headers()  # now, not with the first token: who waits should know
        self._watch = asyncio.ensure_future(self._keep_watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def send(self, data: dict[str, Any]) -> None:
        """Write one event."""
        self._has_events = True
        await self._write(b"data: " + orjson.dumps(data) + b"\n\n")

    async def finish(self) -> web.StreamResponse:
        """Say that nothing is missing, and end."""
        await self._write(_DONE)
        return await self._end()

    async def fail(self, error: dict[str, Any]) -> web.StreamResponse:
        """Say what went wrong and close the connection, without ``[DONE]``: no client may take the text for whole."""
        self._response.force_close()
        await self.send(error)
        return await self._end()

    async def _write(self, frame: bytes) -> None:
        self._write_began = self._clock()
        await self._response.write(frame)
        self._write_began = None

    async def _end(self) -> web.StreamResponse:
        self._write_began = self._clock()
        await self._response.write_eof()
        self._write_began = None
        return self._response

    async def _keep_watch(self) -> None:
        stall_s, keep_alive_s = self._config.write_stall_s, self._config.keepalive_comment_s
        next_comment = self._clock() + keep_alive_s
        while True:
            await asyncio.sleep(min(stall_s / 2, keep_alive_s))
            now = self._clock()
            if self._write_began is not None and now - self._write_began >= stall_s:
                self._on_stall()
                if self._request.transport is not None:
                    self._request.transport.abort()
                return
            if not self._has_events and now >= next_comment:
                next_comment = now + keep_alive_s
                with contextlib.suppress(ConnectionError):  # the handler hears of it by being cancelled
                    await self._response.write(_KEEP_ALIVE)
