"""Starting, overload, disconnects, stalls, engine faults and shutdown."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request

import aiohttp
import orjson
import pytest

from tests.e2e.fake_llm import FakeLLM
from tests.e2e.served import get, post, served
from trtcb.errors import EngineDeadError, PortBusyError, QueueFullError, RequestError, UsageError
from trtcb.server.limits import ServerConfig
from trtcb.server.run import HttpServer, bind

GOOD = {"model": "fake", "prompt": "x"}
STREAM = {**GOOD, "stream": True}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def refusing(error):
    def refuse(request):
        raise error

    return refuse


async def eventually(condition, timeout_s=2.0):
    deadline = time.perf_counter() + timeout_s
    while not condition():
        assert time.perf_counter() < deadline, "did not happen in time"
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def streaming(server, body=STREAM):
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/completions", json=body) as response,
    ):
        yield response


async def test_not_ready_before_warm_up():
    llm = FakeLLM()
    llm.gate.clear()
    config = ServerConfig(port=0)
    server = HttpServer(llm, config, bind(config))
    running = asyncio.ensure_future(server.run())
    await eventually(lambda: llm.num_running == 1)
    assert (await get(f"{server.url}/health"))[0] == 200
    status, headers, _ = await get(f"{server.url}/ready")
    assert (status, headers["Retry-After"]) == (503, "1")
    status, headers, answer = await post(f"{server.url}/v1/completions", GOOD)
    assert (status, headers["Retry-After"], answer["error"]["code"]) == (503, "1", "not_ready")
    llm.gate.set()
    await eventually(lambda: server.context.lifecycle.is_ready)
    assert (await get(f"{server.url}/ready"))[0] == 200
    server.stop()
    assert await running is True


async def test_a_signal_during_warm_up_ends_it():
    llm = FakeLLM()
    llm.gate.clear()
    config = ServerConfig(port=0)
    server = HttpServer(llm, config, bind(config))
    running = asyncio.ensure_future(server.run())
    await eventually(lambda: llm.num_running == 1)
    server.stop()
    assert await asyncio.wait_for(running, 2) is True
    assert llm.is_closed


async def test_a_full_queue_is_a_429_with_retry_after():
    async with served(FakeLLM(refuse=refusing(QueueFullError("The queue of 4 is full.")))) as server:
        for body in (GOOD, STREAM):
            status, headers, answer = await post(f"{server.url}/v1/completions", body)
            assert (status, headers["Retry-After"], answer["error"]["code"]) == (429, "1", "queue_full")
    async with served(FakeLLM(refuse=refusing(QueueFullError("full"))), overload_status=503) as server:
        assert (await post(f"{server.url}/v1/completions", GOOD))[0] == 503


async def test_a_refusal_of_one_prompt_leaves_none_behind():
    def refuse(request):
        if request.prompt_token_ids == (3,):
            raise QueueFullError("full")

    llm = FakeLLM("x" * 100, step_s=0.01, refuse=refuse)
    async with served(llm) as server:
        status, _, _ = await post(f"{server.url}/v1/completions", {**GOOD, "prompt": [[1], [2], [3], [4]]})
        assert status == 429
        assert llm.num_running == 0


async def test_a_request_error_of_the_engine_names_its_field():
    error = RequestError("The prompt has 9 tokens; at most 8 fit.", param="prompt", code="context_length_exceeded")
    async with served(FakeLLM(refuse=refusing(error))) as server:
        status, _, answer = await post(f"{server.url}/v1/completions", GOOD)
    assert status == 400
    assert answer["error"]["param"] == "prompt"
    assert answer["error"]["code"] == "context_length_exceeded"


async def test_an_unexpected_error_is_a_bland_500_and_logs_no_prompt(caplog):
    async with served(FakeLLM(refuse=refusing(ValueError("secret prompt")))) as server:
        status, _, answer = await post(f"{server.url}/v1/completions", GOOD)
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert "secret" not in orjson.dumps(answer).decode()
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("body", [GOOD, STREAM, {**STREAM, "prompt": ["a", "b", "c"]}], ids=["whole", "stream", "many"])
@pytest.mark.parametrize("phase", ["queued", "running"])
async def test_a_disconnect_aborts_at_once(body, phase):
    llm = FakeLLM("x" * 1000, step_s=0.005)
    async with served(llm) as server:
        if phase == "queued":
            llm.gate.clear()
        num = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
        _reader, writer = await asyncio.open_connection(*server.address)
        data = orjson.dumps(body)
        writer.write(POST % len(data) + data)
        await eventually(lambda: llm.num_running == num)
        await asyncio.sleep(0.02)
        left_at = time.perf_counter()
        writer.transport.abort()
        await eventually(lambda: len(llm.left) == num)
        assert max(at for _, at in llm.left) - left_at < 1  # ms on an idle machine; the text takes 5 s
        _, _, text = await get(f"{server.url}/metrics")
        assert f'trtcb_aborts_total{{cause="disconnect"}} {num}.0' in text


async def test_a_queued_stream_has_its_headers_at_once():
    llm = FakeLLM()
    async with served(llm) as server:
        llm.gate.clear()
        began = time.perf_counter()
        async with streaming(server) as response:
            assert time.perf_counter() - began < 1
            assert response.status == 200
            llm.gate.set()
            assert (await response.read()).endswith(b"[DONE]\n\n")


async def test_a_queued_stream_is_kept_alive():
    llm = FakeLLM("ab")
    async with served(llm, keepalive_comment_s=0.05) as server:
        llm.gate.clear()
        asyncio.get_running_loop().call_later(0.18, llm.gate.set)
        async with streaming(server) as response:
            body = await response.read()
    comments, _, events = body.partition(b"data:")
    assert comments in (b": keep-alive\n\n" * 2, b": keep-alive\n\n" * 3)
    assert b": keep-alive" not in events


async def test_a_reader_that_stalls_is_aborted_and_holds_little():
    llm = FakeLLM("x" * 20_000)
    async with served(llm, write_stall_s=0.2) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(server.address)
        data = orjson.dumps(STREAM)
        sock.sendall(POST % len(data) + data)
        await eventually(lambda: llm.left, timeout_s=5)
        _, _, text = await get(f"{server.url}/metrics")
        assert 'trtcb_aborts_total{cause="stalled_reader"} 1.0' in text
        assert 'cause="disconnect"' not in text
        sock.close()


async def test_health_follows_the_engine_and_not_the_process():
    llm = FakeLLM()
    async with served(llm, health_stall_s=0.5) as server:
        assert (await get(f"{server.url}/health"))[0] == 200
        llm.engine.has_work = True
        llm.engine.last_progress_s = time.monotonic() - 0.6
        status, _, text = await get(f"{server.url}/health")
        assert (status, orjson.loads(text)["error"]["code"]) == (503, "engine_stalled")
        assert (await get(f"{server.url}/ready"))[0] == 503
        llm.engine.has_work = False
        assert (await get(f"{server.url}/health"))[0] == 200


async def test_a_dead_engine_ends_the_server():
    llm = FakeLLM(refuse=refusing(EngineDeadError("dead")))
    config = ServerConfig(port=0)
    server = HttpServer(llm, config, bind(config))
    ready = asyncio.Event()
    running = asyncio.ensure_future(server.run(ready.set))
    await ready.wait()
    llm.engine.state, llm.engine.error = "dead", "illegal access in /opt/lib/kernel.so"
    status, _, text = await get(f"{server.url}/health")
    assert (status, orjson.loads(text)["error"]["code"]) == (503, "engine_dead")
    assert "/opt" not in text
    assert (await post(f"{server.url}/v1/completions", GOOD))[0] == 503
    with pytest.raises(EngineDeadError, match="illegal access"):
        await asyncio.wait_for(running, 5)


async def test_a_drain_lets_streams_finish_and_refuses_new_requests():
    llm = FakeLLM("x" * 20, step_s=0.05)
    async with served(llm, shutdown_timeout_s=10) as server, streaming(server) as one, streaming(server) as two:
        whole = asyncio.ensure_future(post(f"{server.url}/v1/completions", GOOD))
        await eventually(lambda: llm.num_running == 3)
        server.stop()
        await eventually(lambda: server.context.lifecycle.is_draining)
        began = time.perf_counter()
        status, headers, answer = await post(f"{server.url}/v1/completions", GOOD)
        assert time.perf_counter() - began < 1
        assert (status, headers["Retry-After"], answer["error"]["code"]) == (503, "1", "draining")
        assert (await get(f"{server.url}/ready"))[0] == 503
        for stream in (one, two):
            text = await stream.read()
            assert text.count(b'"text":"x"') == 20
            assert text.endswith(b"data: [DONE]\n\n")
        assert (await whole)[2]["choices"][0]["text"] == "x" * 20


@pytest.mark.parametrize("how", ["timeout", "second signal"])
async def test_a_drain_out_of_time_ends_streams_with_an_error_event(how):
    llm = FakeLLM("x" * 1000, step_s=0.01)
    config = ServerConfig(port=0, shutdown_timeout_s=0.2 if how == "timeout" else 60)
    server = HttpServer(llm, config, bind(config))
    ready = asyncio.Event()
    running = asyncio.ensure_future(server.run(ready.set))
    await ready.wait()
    async with streaming(server) as stream:
        await eventually(lambda: llm.num_running == 1)
        server.stop()
        if how == "second signal":
            await asyncio.sleep(0.05)
            server.stop()
        text = await stream.read()
    assert await asyncio.wait_for(running, 2) is False
    assert b"[DONE]" not in text
    assert orjson.loads(text.strip().split(b"\n\n")[-1].removeprefix(b"data: "))["error"]["code"] == "aborted"
    assert llm.is_closed


async def test_a_stuck_engine_does_not_hold_the_exit_up():
    llm = FakeLLM("x" * 1000, step_s=60)
    llm.close = lambda: asyncio.sleep(60)
    config = ServerConfig(port=0, shutdown_timeout_s=60)
    server = HttpServer(llm, config, bind(config))
    llm.engine.abort = lambda request_id: None
    llm.step_s = 0
    ready = asyncio.Event()
    running = asyncio.ensure_future(server.run(ready.set))
    await ready.wait()
    llm.step_s = 60
    async with streaming(server, {**STREAM, "prompt": ["a", "b"]}) as stream:
        server.stop()
        await eventually(lambda: server.context.lifecycle.is_draining)
        began = time.perf_counter()
        server.stop()
        with pytest.raises(aiohttp.ClientPayloadError):
            await stream.read()
        assert await running is False
        assert time.perf_counter() - began < 2


def test_a_busy_port_is_said_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortBusyError, match="taken") as caught:
            bind(ServerConfig(port=taken.getsockname()[1]))
    assert caught.value.exit_code == 7


def test_other_machines_need_a_key_or_an_explicit_word():
    with pytest.raises(UsageError, match="--insecure"):
        bind(ServerConfig(host="0.0.0.0", port=0))
    bind(ServerConfig(host="0.0.0.0", port=0, insecure=True)).close()
    bind(ServerConfig(host="0.0.0.0", port=0, api_keys=("k",))).close()
    bind(ServerConfig(host="localhost", port=0)).close()
    with pytest.raises(UsageError, match="--host"):
        bind(ServerConfig(host="no such host", port=0))


PROGRAM = textwrap.dedent(
    """
    import sys
    from tests.e2e.fake_llm import FakeLLM
    from trtcb.errors import TrtcbError
    from trtcb.server.limits import ServerConfig
    from trtcb.server.run import serve

    try:
        sys.exit(
            serve(
                lambda: FakeLLM("x" * 60, step_s=0.01),
                ServerConfig(port=0, shutdown_timeout_s=float(sys.argv[1])),
                lambda server: print(server.url, flush=True),
            )
        )
    except TrtcbError as error:
        sys.exit(error.exit_code)
    """
)


@pytest.mark.parametrize(
    ("signals", "timeout_s", "code"),
    [
        ([signal.SIGTERM], 10, 0),
        ([signal.SIGINT], 10, 130),
        ([signal.SIGTERM], 0.1, 9),
        ([signal.SIGTERM, signal.SIGTERM], 60, 9),
    ],
    ids=["drained", "interrupted", "out of time", "in a hurry"],
)
def test_the_exit_code_tells_how_it_ended(signals, timeout_s, code):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(timeout_s)], stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().strip()
        request = urllib.request.Request(
            f"{url}/v1/completions", orjson.dumps(STREAM), {"Content-Type": "application/json"}
        )
        response = urllib.request.urlopen(request, timeout=10)
        response.readline()
        for number in signals:
            process.send_signal(number)
            time.sleep(0.1)
        text = response.read()
        assert process.wait(5) == code
        assert (b"[DONE]" in text) is (code != 9)
        assert (b'"error"' in text) is (code == 9)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
