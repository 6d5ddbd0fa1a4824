"""The application: routes and what their handlers share."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from aiohttp import web

from trtcb.errors import UsageError
from trtcb.server.auth import ApiKeys
from trtcb.server.chat import chat_completions
from trtcb.server.completions import completions
from trtcb.server.context import CONTEXT, ServerContext
from trtcb.server.limits import ServerConfig
from trtcb.server.metrics import Metrics
from trtcb.server.middlewares import json_errors, mark_busy, require_key
from trtcb.server.probes import health, metrics, model, models, ready

if TYPE_CHECKING:
    from trtcb.executor.llm import AsyncLLM

_NUM_PREPARE_THREADS = 2


def create_app(llm: "AsyncLLM", config: ServerConfig) -> web.Application:
    """Build the application over an engine that the caller starts and closes.

    It answers 503 until ``app[CONTEXT].lifecycle.is_ready`` is set. Serve it with ``handler_cancellation=True`` and
    :func:`trtcb.server.connection.listen`: without the first no idle stream notices that its client left, without the
    second there are no header deadlines.
    """
    if llm.tokenizer is None:
        raise UsageError("An engine without a tokenizer cannot be served: give AsyncLLM the model's.")
    app = web.Application(
        middlewares=[mark_busy, json_errors, require_key(ApiKeys(config.api_keys))],
        client_max_size=config.max_body_bytes,
    )
    context = ServerContext(
        llm=llm,
        config=config,
        metrics=Metrics(llm.engine.snapshot),
        pool=ThreadPoolExecutor(_NUM_PREPARE_THREADS, thread_name_prefix="trtcb-prepare"),
        model_name=config.served_model_name or llm.model.name,
        created=int(time.time()),
    )
    app[CONTEXT] = context
    llm.observe_steps(context.metrics.observe_step)
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.get("/v1/models", models),
            web.get("/v1/models/{id:.+}", model),
            web.get("/health", health),
            web.get("/ready", ready),
            web.get("/metrics", metrics),
        ]
    )

    async def hide_versions(_: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "trtcb"

    async def close_pool(_: web.Application) -> None:
        context.pool.shutdown(wait=False, cancel_futures=True)

    app.on_response_prepare.append(hide_versions)
    app.on_cleanup.append(close_pool)
    return app
