"""One client connection: aiohttp's protocol plus the deadlines and JSON errors that it does not have."""

import asyncio
import logging
import socket
from typing import cast

from aiohttp import web

from trtcb.server.errors import ApiError
from trtcb.server.limits import ServerConfig

_LINGER_S = 2.0  # how long the unread rest of a refused body is drained, so that the client sees the answer


class Connection(web.RequestHandler):
    """Closes a client that does not finish its request line and headers in time, and bounds what is buffered for it.

    ``busy()`` and ``idle()`` are called by the outermost middleware around each request: headers are complete once a
    request is handed over. Between requests aiohttp's own idle timeout holds until the next first byte.
    """

    __slots__ = ("_config", "_deadline", "_is_busy")

    def __init__(self, server: web.Server, config: ServerConfig, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=config.idle_timeout_s,
            lingering_time=_LINGER_S,
            auto_decompress=False,  # a compressed body is refused, never inflated
            access_log=logging.getLogger("trtcb.access"),
        )
        self._config = config
        self._deadline: asyncio.TimerHandle | None = None
        self._is_busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the header deadline at once: a client that connects and says nothing is as bad as a slow one."""
        super().connection_made(transport)
        # What a client that stops reading can make this process and the kernel hold.
        cast(asyncio.WriteTransport, transport).set_write_buffer_limits(high=self._config.send_buffer_bytes)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._config.send_buffer_bytes)
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; the first byte of a later request starts its own deadline."""
        if data and not self._is_busy and self._deadline is None:
            self._start_deadline()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the deadline."""
        self._stop_deadline()
        super().connection_lost(exc)

    def busy(self) -> None:
        """Note that a request is complete up to its headers and is being answered."""
        self._is_busy = True
        self._stop_deadline()

    def idle(self) -> None:
        """Note that the request is answered."""
        self._is_busy = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is not HTTP. The parser's own text quotes the client's bytes, so it is not repeated."""
        self.busy()
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is already under way")
        if status >= 500:
            self.logger.error("unhandled error in the HTTP layer", exc_info=exc)
            error = ApiError(500, "The server failed on this request.", kind="server_error", code="internal_error")
        else:
            error = ApiError(400, "This is not a valid HTTP/1.1 request.", code="bad_http")
        response = error.response({"Server": "trtcb"})
        response.force_close()
        return response

    def _start_deadline(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(self._config.header_timeout_s, self._expire)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if not self._is_busy:
            self.force_close()


async def listen(runner: web.AppRunner, config: ServerConfig, sock: socket.socket) -> asyncio.Server:
    """Accept connections on a bound socket. ``runner`` must be set up with ``handler_cancellation``."""
    loop = asyncio.get_running_loop()
    server = runner.server
    if server is None:
        raise RuntimeError("the application runner must be set up before it can listen")
    return await loop.create_server(lambda: Connection(server, config, loop), sock=sock, backlog=1024)
