"""Reading a request's body: its type, size and pace are checked before it is decoded."""

import asyncio

from aiohttp import web

from trtcb.server.errors import ApiError
from trtcb.server.limits import ServerConfig


async def read_body(request: web.Request, config: ServerConfig) -> bytes:
    """Return the raw JSON text. Raises 413, 415, or 408 when it takes longer than ``body_timeout_s`` in all."""
    if request.content_type != "application/json":
        raise ApiError(415, "Send the body as Content-Type: application/json.", code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed bodies are not accepted.", code="unsupported_media_type")
    if request.charset is not None and request.charset.lower().replace("-", "") not in ("utf8", "usascii"):
        raise ApiError(415, "Send JSON as UTF-8.", code="unsupported_media_type")
    if (request.content_length or 0) > config.max_body_bytes:
        raise _too_large(config)
    try:
        return await asyncio.wait_for(request.read(), config.body_timeout_s)
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(config) from None
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"The body did not arrive within {config.body_timeout_s:g} s.", code="request_timeout"
        ) from None


def _too_large(config: ServerConfig) -> ApiError:
    return ApiError(413, f"The body is larger than {config.max_body_bytes} bytes.", code="request_too_large")
