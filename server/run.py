"""A server's life: claim the address, warm up, serve, drain on a signal, and say by the exit code how it went."""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import signal
import socket
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from trtcb.errors import DrainTimeoutError, EngineDeadError, PortBusyError, TrtcbError, UsageError
from trtcb.executor.request import FinishReason, Request, SamplingParams
from trtcb.server.app import create_app
from trtcb.server.connection import listen
from trtcb.server.context import CONTEXT, ServerContext
from trtcb.server.limits import ServerConfig
from trtcb.server.probes import engine_fault

if TYPE_CHECKING:
    from trtcb.executor.llm import AsyncLLM

_log = logging.getLogger(__name__)

EXIT_OK, EXIT_INTERRUPTED = 0, 130

_WARM_UP_PROMPT_TOKENS = 8
# Together these stay below the two seconds that a second signal may take, even if the engine is stuck.
_CUT_GRACE_S = 0.5  # for the error events of requests that shutdown ends
_CONNECTION_GRACE_S = 0.25  # for a handler to end, and again for it to be cancelled
_ENGINE_GRACE_S = 0.5  # for a step that is still running when the server had to stop
_RELEASE_GRACE_S = 30.0  # for an idle engine to give its memory back
_FAULT_POLL_S = 1.0


def bind(config: ServerConfig) -> socket.socket:
    """Claim the address, before anything expensive is loaded. Raises :class:`PortBusyError` or :class:`UsageError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {config.host} is no address of this machine: use 127.0.0.1 or 0.0.0.0.") from error
    if not (config.api_keys or config.insecure or ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback):
        raise UsageError(
            f"Listening on {config.host} lets other machines in without a key: give --api-key-file, or say --insecure."
        )
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _address_error(config, error) from error
    return sock


class HttpServer:
    """One engine behind one bound socket. ``run`` serves until ``stop`` is called or the engine dies.

    ``stop`` begins a drain: new requests get 503, running ones finish. A second ``stop``, or ``shutdown_timeout_s``,
    ends what still runs with error events. Both belong to the event loop.
    """

    def __init__(self, llm: "AsyncLLM", config: ServerConfig, sock: socket.socket) -> None:
        self._llm = llm
        self._config = config
        self._sock = sock
        self._app = create_app(llm, config)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def context(self) -> ServerContext:
        """What the handlers share."""
        return self._app[CONTEXT]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, the real ones even where the system chose."""
        host, port = self._sock.getsockname()[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """Where the server is reached."""
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stop(self) -> None:
        """Begin to drain; called again, hurry."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> bool:
        """Serve; return whether every accepted request was answered. ``on_ready`` is called once after warm-up.

        Raises :class:`EngineDeadError` when the engine died, after the connections are closed.
        """
        # Disconnects must cancel handlers: an idle stream would never notice otherwise.
        runner = web.AppRunner(self._app, handler_cancellation=True, shutdown_timeout=_CONNECTION_GRACE_S)
        await runner.setup()
        listener: asyncio.Server | None = None
        is_complete = False
        try:
            try:
                listener = await listen(runner, self._config, self._sock)
            except OSError as error:  # another process began to listen since `bind`
                raise _address_error(self._config, error) from error
            await self._llm.start()
            if not await self._get_ready():
                return True
            on_ready()
            fault = await self._wait_for_stop()
            is_complete = await self._drain()
            if fault is not None:
                raise EngineDeadError(f"The engine stopped: {fault}")
            return is_complete
        finally:
            if listener is not None:
                listener.close()
            await runner.cleanup()
            try:
                await asyncio.wait_for(self._llm.close(), _RELEASE_GRACE_S if is_complete else _ENGINE_GRACE_S)
            except asyncio.TimeoutError:
                _log.error("the engine is stuck in a step and was left behind")

    async def _get_ready(self) -> bool:
        """Warm up; return False if asked to stop meanwhile."""
        warm_up = asyncio.ensure_future(_warm_up(self._llm))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({warm_up, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not warm_up.done():
                return False
            warm_up.result()
            self.context.lifecycle.is_ready = True
            return True
        finally:
            warm_up.cancel()
            stop.cancel()

    async def _wait_for_stop(self) -> str | None:
        """Return None when asked to stop, or what the engine died of."""
        while not self._stop.is_set():
            fault = engine_fault(self.context)
            if fault is not None and fault.is_fatal:
                return fault.message
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _FAULT_POLL_S)
        return None

    async def _drain(self) -> bool:
        """Let running requests finish; end what is left when time is up. Return whether nothing was left."""
        lifecycle = self.context.lifecycle
        lifecycle.is_draining = True
        finish = asyncio.ensure_future(self._finish())
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait(
                {finish, hurry}, timeout=self._config.shutdown_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if finish.done():
                finish.result()
                return True
            for request_id in list(lifecycle.request_ids):
                self._llm.engine.abort(request_id)
                self.context.metrics.aborted("shutdown")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(lifecycle.wait_quiet(), _CUT_GRACE_S)
            return False
        finally:
            for task in (finish, hurry):
                task.cancel()

    async def _finish(self) -> None:
        await self._llm.drain()
        await self.context.lifecycle.wait_quiet()


def serve(
    load: Callable[[], "AsyncLLM"], config: ServerConfig, on_ready: Callable[[HttpServer], None] = lambda server: None
) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code. ``load`` makes the engine once the address is claimed."""
    sock = bind(config)
    try:
        llm = load()
    except BaseException:
        sock.close()
        raise
    return asyncio.run(_serve(llm, config, sock, on_ready))


async def _serve(
    llm: "AsyncLLM", config: ServerConfig, sock: socket.socket, on_ready: Callable[[HttpServer], None]
) -> int:
    server = HttpServer(llm, config, sock)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        server.stop()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.stop)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    is_complete = await server.run(lambda: on_ready(server))
    if not is_complete:
        raise DrainTimeoutError(
            "Requests were still running when the server had to stop: "
            f"raise --shutdown-timeout ({config.shutdown_timeout_s:g} s) to let them finish."
        )
    return EXIT_INTERRUPTED if interrupted else EXIT_OK


async def _warm_up(llm: "AsyncLLM") -> None:
    """Run one prefill and one decode step, so that the first client does not pay for lazy compilation."""
    token = llm.model.bos_token_id or 0
    request = Request(
        request_id=f"warmup-{uuid.uuid4().hex}",
        prompt_token_ids=(token,) * max(1, min(_WARM_UP_PROMPT_TOKENS, llm.engine.config.max_seq_len - 2)),
        params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
        cache_salt="warmup",  # nobody's prompt may begin with these blocks
    )
    async for delta in llm.stream(request):
        if delta.finish_reason is FinishReason.ERROR:
            raise EngineDeadError(f"The engine failed its warm-up: {delta.error}")


def _address_error(config: ServerConfig, error: OSError) -> TrtcbError:
    if error.errno == errno.EADDRINUSE:
        return PortBusyError(f"Port {config.port} of {config.host} is taken: stop its owner or give another --port.")
    return UsageError(
        f"Cannot listen on {config.host} port {config.port} ({error.strerror}): choose another --host or --port."
    )
