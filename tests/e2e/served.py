"""A real server on a free port, in the test's own event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from trtcb.server.limits import ServerConfig
from trtcb.server.run import HttpServer, bind


@contextlib.asynccontextmanager
async def served(llm: Any, **settings: Any) -> AsyncIterator[HttpServer]:
    """Serve ``llm`` until the block ends; what is still running then is cut."""
    config = ServerConfig(**{"port": 0, "shutdown_timeout_s": 0.0, **settings})
    server = HttpServer(llm, config, bind(config))
    ready = asyncio.Event()
    running = asyncio.ensure_future(server.run(ready.set))
    waiting = asyncio.ensure_future(ready.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        running.result()
    try:
        yield server
    finally:
        server.stop()
        await asyncio.gather(running, return_exceptions=True)


async def post(url: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    """POST ``body``, bytes as they are and anything else as JSON; return status, headers and the decoded answer."""
    kind = {"data": body} if isinstance(body, bytes) else {"json": body}
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with aiohttp.ClientSession() as session, session.post(url, headers=headers, **kind) as response:
        return response.status, dict(response.headers), await response.json()


async def get(url: str, **headers: str) -> tuple[int, dict[str, str], str]:
    """GET; return status, headers and text."""
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status, dict(response.headers), await response.text()


async def raw(server: HttpServer, data: bytes, *, timeout_s: float = 5.0) -> bytes:
    """Send bytes and return everything until the server closes."""
    host, port = server.address
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), timeout_s)
    finally:
        writer.close()
