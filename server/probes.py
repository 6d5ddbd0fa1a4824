"""``/health``, ``/ready``, ``/metrics`` and ``/v1/models``."""

import time
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from trtcb.server.answer import Json, check_model
from trtcb.server.context import CONTEXT, ServerContext
from trtcb.server.errors import ApiError, draining, json_response, not_ready, scrub


@dataclass(frozen=True, slots=True)
class EngineFault:
    """Why the engine is not healthy; a fatal one does not heal."""

    message: str
    is_fatal: bool


def engine_fault(context: ServerContext) -> EngineFault | None:
    """Judge the engine by its thread's life and its progress. A process that answers HTTP proves nothing."""
    now = context.llm.engine.snapshot()
    if now.state in ("dead", "closed"):
        return EngineFault(scrub(now.error or "its thread has ended"), is_fatal=True)
    idle_s = time.monotonic() - now.last_progress_s
    if now.has_work and idle_s > context.config.health_stall_s:
        return EngineFault(f"no progress for {idle_s:.0f} s with work at hand", is_fatal=False)
    return None


async def health(request: web.Request) -> web.Response:
    """Answer 200 while the engine lives and, if it has work, moves."""
    fault = engine_fault(request.app[CONTEXT])
    if fault is None:
        return json_response({"status": "ok"})
    code = "engine_dead" if fault.is_fatal else "engine_stalled"
    raise ApiError(503, f"The engine is not healthy: {fault.message}.", kind="server_error", code=code)


async def ready(request: web.Request) -> web.Response:
    """Answer 200 from the end of warm-up to the beginning of shutdown, while the engine is healthy."""
    context = request.app[CONTEXT]
    if context.lifecycle.is_draining:
        raise draining(context.config)
    if not context.lifecycle.is_ready:
        raise not_ready(context.config)
    await health(request)
    return json_response({"status": "ready"})


async def metrics(request: web.Request) -> web.Response:
    """Answer a Prometheus scrape. Reading resets nothing."""
    body = generate_latest(request.app[CONTEXT].metrics.registry)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def models(request: web.Request) -> web.Response:
    """List the one model."""
    return json_response({"object": "list", "data": [_model(request.app[CONTEXT])]})


async def model(request: web.Request) -> web.Response:
    """Show the one model, by its name."""
    context = request.app[CONTEXT]
    check_model(context, request.match_info["id"])
    return json_response(_model(context))


def _model(context: ServerContext) -> Json:
    return {"id": context.model_name, "object": "model", "created": context.created, "owned_by": "trtcb"}
