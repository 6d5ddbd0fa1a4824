"""Errors as the OpenAI API words them: ``{"error": {"message", "type", "param", "code"}}`` with a matching status."""

import re
from typing import Any

import orjson
from aiohttp import web

from trtcb.errors import DrainingError, EngineDeadError, QueueFullError, RequestError
from trtcb.server.limits import ServerConfig

# An absolute path of two or more parts, or one below a home folder: a client need not know where things lie here.
_PATH = re.compile(r"(?<![\w./:~-])~?/(?:[\w.@+-]+/)+([\w.@+-]*)")


class ApiError(Exception):
    """What a client is told instead of a result. ``retry_after_s`` becomes the header the OpenAI client honours."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the JSON object, for a response or for an event in the middle of a stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """Make a complete response."""
        headers = dict(headers or {})
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        return json_response(self.body(), status=self.status, headers=headers)


def json_response(data: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Answer with ``data`` as JSON."""
    return web.Response(body=orjson.dumps(data), status=status, headers=headers, content_type="application/json")


def scrub(message: str) -> str:
    """Reduce absolute paths to their last part."""
    return _PATH.sub(lambda match: match.group(1) or "...", message)


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Make a 400."""
    return ApiError(400, message, param=param, code=code)


def draining(config: ServerConfig) -> ApiError:
    """Make the 503 of a server that is shutting down."""
    return ApiError(
        503,
        "The server is shutting down and takes no new requests; retry against another replica or later.",
        kind="server_error",
        code="draining",
        retry_after_s=config.retry_after_s,
    )


def not_ready(config: ServerConfig) -> ApiError:
    """Make the 503 of a server that is still warming up."""
    return ApiError(
        503,
        "The engine is still warming up; /ready answers 200 when it takes requests.",
        kind="server_error",
        code="not_ready",
        retry_after_s=config.retry_after_s,
    )


def engine_failed(detail: str | None) -> ApiError:
    """Make the 500 of one request whose step failed; ``detail`` is the engine's own sentence."""
    message = scrub(detail) if detail else "The engine failed on this request."
    return ApiError(500, message, kind="server_error", code="engine_error")


def from_engine(error: Exception, config: ServerConfig) -> ApiError:
    """Translate what the engine raises at submission. What it does not document is an internal error, said blandly."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, scrub(str(error)), param=error.param, code=error.code)
    if isinstance(error, QueueFullError):
        return ApiError(
            config.overload_status,
            scrub(str(error)) or "The wait queue is full; retry later.",
            kind="rate_limit_error",
            code="queue_full",
            retry_after_s=config.retry_after_s,
        )
    if isinstance(error, DrainingError):
        return draining(config)
    if isinstance(error, EngineDeadError):
        return ApiError(
            503,
            "The engine has stopped on a fatal error and serves nothing until the server is restarted.",
            kind="server_error",
            code="engine_dead",
            retry_after_s=config.retry_after_s,
        )
    return ApiError(
        500, "The server failed on this request; its log says why.", kind="server_error", code="internal_error"
    )
