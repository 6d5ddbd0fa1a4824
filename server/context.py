"""What every handler shares, and where the server stands between start and exit."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from trtcb.server.limits import ServerConfig
from trtcb.server.metrics import Metrics

if TYPE_CHECKING:
    from trtcb.executor.llm import AsyncLLM


class Lifecycle:
    """Phases: warming up, ready, draining. Belongs to the event loop; not thread-safe.

    ``request_ids`` are the engine's ids of what is being generated, so that shutdown can end it.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self.is_draining = False
        self.request_ids: set[str] = set()
        self._num_answering = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Hold shutdown back while a generation is answered to its last byte."""
        self._num_answering += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._num_answering -= 1
            if not self._num_answering:
                self._quiet.set()

    async def wait_quiet(self) -> None:
        """Return when no generation is being answered."""
        await self._quiet.wait()


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The collaborators of the handlers. ``pool`` runs what would hold the event loop up; ``created`` is Unix time."""

    llm: "AsyncLLM"
    config: ServerConfig
    metrics: Metrics
    pool: Executor
    model_name: str
    created: int
    lifecycle: Lifecycle = field(default_factory=Lifecycle)


CONTEXT: web.AppKey[ServerContext] = web.AppKey("context", ServerContext)
