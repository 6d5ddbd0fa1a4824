"""Around every handler: connection deadlines, JSON errors, keys."""

import logging
import traceback

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from trtcb.server.auth import OPEN_PATHS, ApiKeys
from trtcb.server.connection import Connection
from trtcb.server.context import CONTEXT
from trtcb.server.errors import ApiError, from_engine

_log = logging.getLogger(__name__)


@web.middleware
async def mark_busy(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the connection that headers are complete, and when the next request may begin."""
    connection = request.protocol
    if not isinstance(connection, Connection):
        return await handler(request)
    connection.busy()
    try:
        return await handler(request)
    finally:
        connection.idle()


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into the API's error object."""
    try:
        return await handler(request)
    except ConnectionError:
        raise  # aiohttp closes the connection in silence
    except web.HTTPException as error:
        return _from_http(request, error)
    except Exception as error:
        api_error = from_engine(error, request.app[CONTEXT].config)
        if request.method == "POST":
            request.app[CONTEXT].metrics.rejected(api_error.code or api_error.kind)
        if api_error.code == "internal_error":
            # The exception's own text may quote a prompt; its type and where it was raised do not.
            trace = "".join(traceback.format_tb(error.__traceback__))
            _log.error("request to %s failed with %s\n%s", request.path, type(error).__name__, trace)
        return api_error.response()


def require_key(keys: ApiKeys) -> Middleware:
    """Ask for a key on every route but the probes; unknown routes are no exception."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            keys.admit(request)
        return await handler(request)

    return middleware


def _from_http(request: web.Request, error: web.HTTPException) -> web.Response:
    headers = {}
    if error.status == 404:
        message, code = "There is no such route; see /v1/models, /v1/completions and /v1/chat/completions.", "not_found"
    elif isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message, code = f"This route answers {allowed} only.", "method_not_allowed"
        headers["Allow"] = allowed
    else:
        message, code = error.reason, "http_error"
    return ApiError(error.status, message, code=code).response(headers)
