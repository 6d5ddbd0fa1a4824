"""``trtcb bench serve`` against our server, and against servers that behave as others do or misbehave."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.e2e.fake_llm import FakeLLM
from tests.e2e.served import served
from tests.e2e.tiny_tokenizer import VOCAB_SIZE
from trtcb.bench.http_client import ApiClient, Reply
from trtcb.bench.http_load import Answer, Asking, LoadGenerator, LoadRun, warm_up
from trtcb.bench.load_report import LoadReport
from trtcb.bench.metrics import Slo
from trtcb.bench.prompt_style import PromptStyle, request_body
from trtcb.bench.workload import RandomWorkload, TraceWorkload
from trtcb.errors import QueueFullError, TrtcbError, UsageError
from trtcb.executor.request import Request, SamplingParams

ASKING = Asking("fake", PromptStyle.IDS, VOCAB_SIZE, temperature=0.0, ignore_eos=False)
LOAD = RandomWorkload(num_prompts=8, random_input_len=20, random_output_len=6)
BODY = request_body(Request("0", (1, 2, 3), SamplingParams(max_tokens=4, temperature=0.0)), ASKING.style, "fake")
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def client_of(url: str, endpoint: str = "/v1/completions", key: str | None = None) -> AsyncIterator[ApiClient]:
    async with aiohttp.ClientSession() as session:
        yield ApiClient(session, url, endpoint, key)


@contextlib.asynccontextmanager
async def foreign(handler: Handler) -> AsyncIterator[ApiClient]:
    """A server of another make: one handler at /v1/completions and /v1/chat/completions."""
    app = web.Application()
    app.add_routes([web.post("/v1/completions", handler), web.post("/v1/chat/completions", handler)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with client_of(f"http://{host}:{port}") as client:
            yield client
    finally:
        await runner.cleanup()


def streams(*frames: bytes, pause_s: float = 0.0, cut: bool = False) -> Handler:
    """A handler that sends these bytes, one write each."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for frame in frames:
            await response.write(frame)
            await asyncio.sleep(pause_s)
        if cut:
            request.transport.abort()
        return response

    return handle


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": reason}])


async def run_load(client: ApiClient, source: RandomWorkload = LOAD, asking: Asking = ASKING, **changes) -> LoadRun:
    workload = replace(source.generate(0), **changes)
    return await LoadGenerator(client, asking, workload).run(asyncio.Event())


async def test_every_request_is_sent_once_and_every_token_counted() -> None:
    llm = FakeLLM()
    async with served(llm) as server, client_of(server.url) as client:
        llm.requests.clear()
        run = await run_load(client)
    report = LoadReport(run, Slo())
    counts = report.counts()
    assert (counts["completed"], counts["failed"], counts["cut_off"], counts["not_sent"]) == (8, 0, 0, 0)
    assert (counts["total_input_tokens"], counts["total_output_tokens"]) == (8 * 20, 8 * 6)
    drawn = [request.prompt_token_ids for request in LOAD.generate(0).requests(VOCAB_SIZE)]
    assert sorted(request.prompt_token_ids for request in llm.requests) == sorted(drawn)
    assert {request.params.max_tokens for request in llm.requests} == {6}
    for answer in report.whole:
        assert len(answer.reply.gaps_s) == 5
        assert 0 < answer.reply.ttft_s <= answer.reply.e2e_s
        assert answer.reply.ttft_s + sum(answer.reply.gaps_s) == pytest.approx(answer.reply.e2e_s)


async def test_requests_keep_their_schedule_and_lateness_is_the_clients_own() -> None:
    async with served(FakeLLM(step_s=0.01)) as server, client_of(server.url) as client:
        source = replace(LOAD, request_rate=50)
        run = await run_load(client, source)
    due = source.generate(0).arrival_s
    for answer in run.answers:
        assert answer.sent_s - answer.lag_s == pytest.approx(due[answer.number] - due[0], abs=1e-6)
        assert answer.lag_s >= 0


async def test_a_closed_loop_holds_requests_back_and_calls_that_no_lateness() -> None:
    llm = FakeLLM(step_s=0.01)
    most = 0

    def count(request: Request) -> None:
        nonlocal most
        most = max(most, llm.num_running + 1)

    llm.refuse = count
    async with served(llm) as server, client_of(server.url) as client:
        most = 0
        run = await run_load(client, max_concurrency=2)
    assert most == 2
    assert len(run.answers) == 8
    last = max(run.answers, key=lambda answer: answer.number)
    assert last.sent_s > 3 * 6 * 0.01  # three rounds went before
    assert last.lag_s < last.sent_s / 2


async def test_refusals_are_counted_by_kind_with_the_servers_words() -> None:
    def refuse(request: Request) -> None:
        if llm.num_running >= 3:
            raise QueueFullError("3 requests are waiting already.")

    llm = FakeLLM(step_s=0.02)
    async with served(llm) as server, client_of(server.url) as client:
        llm.refuse = refuse
        run = await run_load(client)
    report = LoadReport(run, Slo.parse(["e2el:60000"]))
    assert report.failures == {"HTTP 429 (queue_full)": 5}
    assert "failed, 5 x HTTP 429 (queue_full): 3 requests are waiting already." in report.text()
    assert report.counts()["good_share"] == 3 / 8
    assert report.to_json(is_detailed=True)["errors"].count("") == 3


async def test_an_engine_that_fails_in_the_middle_of_a_stream_is_a_failure() -> None:
    async with served(FakeLLM(fail_at=2)) as server, client_of(server.url) as client:
        run = await run_load(client)
    assert LoadReport(run, Slo()).failures == {"error in the stream (engine_error)": 8}


async def test_ignore_eos_expects_every_token() -> None:
    """The double stops after its 13 characters, as a server would that does not know ignore_eos."""
    source = replace(LOAD, random_output_len=20)
    async with served(FakeLLM()) as server, client_of(server.url) as client:
        as_model_says = await run_load(client, source)
        to_the_end = await run_load(client, source, replace(ASKING, ignore_eos=True))
    assert LoadReport(as_model_says, Slo()).counts()["total_output_tokens"] == 8 * 13
    assert LoadReport(to_the_end, Slo()).failures == {"wrong token count": 8}


async def test_chat_is_sent_words() -> None:
    llm = FakeLLM()
    asking = replace(ASKING, style=PromptStyle.CHAT)
    async with served(llm) as server, client_of(f"{server.url}/v1", "/v1/chat/completions") as client:
        run = await run_load(client, asking=asking)
    report = LoadReport(run, Slo())
    assert report.counts()["completed"] == 8
    assert all(len(answer.reply.gaps_s) == 5 for answer in report.whole)
    assert report.counts()["total_input_tokens"] == sum(a.reply.num_prompt_tokens for a in report.whole) > 0


@pytest.mark.parametrize(
    ("handler", "failure"),
    [
        (streams(piece("a"), piece("b", "stop"), b"data: [DONE]\n\n"), "no usage"),
        (streams(piece("a"), event(choices=[], usage=USAGE)), "stream cut off"),
        (streams(piece("a"), cut=True, pause_s=0.01), "connection lost"),
        (streams(b"data: {nonsense\n\n"), "not the API's stream"),
        (streams(b"data: [1, 2]\n\n"), "not the API's stream"),
        (
            streams(event(error={"message": "no memory", "type": "oom"})),
            "error in the stream (oom)",
        ),
        (streams(event(error="plain")), "error in the stream"),
        (streams(event(choices=[], usage=USAGE)), "stream cut off"),
    ],
)
async def test_misbehaviour_has_a_name(handler: Handler, failure: str) -> None:
    async with foreign(handler) as client:
        assert (await client.ask(BODY)).failure == failure


async def test_streams_of_another_make_are_read() -> None:
    """Role first, comments, CRLF, frames cut anywhere, an end of its own."""
    frames = (
        event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]),
        b": ping\n\ndata: ",
        json.dumps({"choices": [{"index": 0, "delta": {"reasoning_content": "Hm"}}]}).encode() + b"\r\n\r",
        b"\ndata:" + json.dumps({"choices": [{"index": 0, "delta": {"content": "A"}}]}).encode() + b"\n\n",
        event(choices=[{"index": 0, "delta": {"content": "B"}}])
        + event(choices=[{"delta": {}, "finish_reason": "stop"}]),
        event(choices=[], usage=USAGE) + b"data: [DONE]\n\n",
    )
    async with foreign(streams(*frames, pause_s=0.05)) as client:
        reply = await client.ask(BODY)
    assert reply.failure is None
    assert (reply.num_prompt_tokens, reply.num_output_tokens, len(reply.gaps_s)) == (3, 2, 2)
    assert reply.ttft_s > 0.09  # not the frame that only said who speaks
    assert min(reply.gaps_s) > 0.03
    assert reply.ttft_s + sum(reply.gaps_s) <= reply.e2e_s


async def test_a_server_that_takes_no_token_ids_is_sent_words() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        if not isinstance((await request.json())["prompt"], str):
            return web.json_response({"detail": "prompt must be text"}, status=422)
        return await streams(piece("a", "stop"), event(choices=[], usage=USAGE))(request)

    async with foreign(handle) as client:
        asking, why = await warm_up(client, ASKING, LOAD.generate(0))
    assert asking.style is PromptStyle.WORDS
    assert "prompt must be text" in why


async def test_the_warm_up_is_no_prompt_of_the_run() -> None:
    llm = FakeLLM()
    async with served(llm) as server, client_of(server.url) as client:
        llm.requests.clear()
        await warm_up(client, ASKING, LOAD.generate(0))
    drawn = [request.prompt_token_ids for request in LOAD.generate(0).requests(VOCAB_SIZE)]
    assert len(llm.requests[0].prompt_token_ids) == 20
    assert llm.requests[0].prompt_token_ids not in drawn


async def test_what_is_wrong_with_the_address_is_one_sentence() -> None:
    async def plain(request: web.Request) -> web.Response:
        return web.json_response({"choices": []})

    with pytest.raises(TrtcbError, match=r"No server answers at http://127\.0\.0\.1:1 .*--base-url"):
        async with client_of("http://127.0.0.1:1") as client:
            await client.models()
    async with served(FakeLLM(), api_keys=("secret",)) as server:
        async with client_of(server.url, key="wrong") as client:
            with pytest.raises(UsageError, match="--api-key"):
                await client.models()
            with pytest.raises(UsageError, match="--api-key"):
                await warm_up(client, ASKING, LOAD.generate(0))
        async with client_of(server.url, key="secret") as client:
            assert await client.models() == ["fake"]
            with pytest.raises(UsageError, match=r"no model 'other': choose --model from fake"):
                await warm_up(client, replace(ASKING, model="other"), LOAD.generate(0))
        async with client_of(server.url, "/v1/nothing", key="secret") as client:
            with pytest.raises(UsageError, match="set --endpoint"):
                await warm_up(client, ASKING, LOAD.generate(0))
    async with foreign(plain) as client:
        with pytest.raises(UsageError, match="does not stream"):
            await warm_up(client, ASKING, LOAD.generate(0))
        with pytest.raises(UsageError, match="--model"):
            await client.models()


def test_numbers_of_a_report_by_hand() -> None:
    replies = [
        Reply(0.1, (0.2, 0.4), 0.7, 10, 3),
        Reply(0.3, (), 0.3, 20, 1),
        Reply(e2e_s=0.05, failure="timed out"),
    ]
    answers = tuple(Answer(number, 0.0, 0.01 * number, reply) for number, reply in enumerate(replies))
    report = LoadReport(LoadRun(answers, 5, 1, 2.0), Slo.parse(["ttft:200 tpot:300"]), percentiles=(50.0,))
    data = report.to_json()
    assert (data["completed"], data["failed"], data["cut_off"], data["not_sent"]) == (2, 1, 1, 1)
    assert (data["output_throughput"], data["total_token_throughput"], data["request_throughput"]) == (2.0, 17.0, 1.0)
    assert data["mean_ttft_ms"] == pytest.approx(200)
    assert data["mean_tpot_ms"] == pytest.approx(300)  # of the one that has it
    assert data["p50_itl_ms"] == pytest.approx(300)
    assert data["mean_client_lag_ms"] == pytest.approx(10)
    assert (data["request_goodput"], data["good_share"]) == (0.5, pytest.approx(1 / 3))
    assert data["failures"] == {"timed out": 1}
    empty = LoadReport(LoadRun((), 3, 0, 0.0), Slo())
    assert empty.to_json()["mean_ttft_ms"] is None
    assert "never sent" in empty.text()


async def trtcb(*arguments: str, key: str = "") -> tuple[int, str, str]:
    environment = {**os.environ, "OPENAI_API_KEY": key}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trtcb", "bench", "serve", *arguments),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_command_line(tmp_path: Path) -> None:
    load = ("--num-prompts", "6", "--random-input-len", "10", "--random-output-len", "5", "--vocab-size", "256")
    async with served(FakeLLM(), api_keys=("secret",)) as server:
        code, out, err = await trtcb(
            *("--base-url", server.url, *load, "--goodput", "e2el:60000", "ttft:60000"),
            *("--metric-percentiles", "90,99.5", "--json", str(tmp_path / "r.json")),
            *("--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new" / "folder")),
            key="secret",
        )
    assert code == 0, err
    assert "model fake, prompts as token ids; 6 requests, seed 0" in out
    assert "p99.5" in out
    (saved,), named = (tmp_path / "new" / "folder").iterdir(), tmp_path / "r.json"
    assert saved.name.startswith("trtcb-infqps-fake-")
    data = json.loads(named.read_text())
    assert data["slo_s"] == {"e2el": 60.0, "ttft": 60.0}
    assert json.loads(saved.read_text()) == data
    assert (data["completed"], data["good_share"], len(data["ttfts"])) == (6, 1.0, 6)
    assert "secret" not in out + err + named.read_text()


async def test_users_of_a_trace_reach_the_server(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [{"prompt_len": 5, "output_len": 3, "user": user, "priority": 0.25} for user in ("ada", "bob")]
    trace.write_text("\n".join(map(json.dumps, [*lines, {"prompt_len": 5, "output_len": 3}])))
    llm = FakeLLM()
    async with served(llm) as server, client_of(server.url) as client:
        llm.requests.clear()
        await LoadGenerator(client, ASKING, TraceWorkload(trace).generate(0)).run(asyncio.Event())
    assert sorted((request.tenant, request.priority) for request in llm.requests) == [
        *[("", 0.5), ("ada", 0.25), ("bob", 0.25)]
    ]


async def test_a_warm_up_that_is_refused_names_the_flag() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "the prompt alone fills it: shorten it."}}, status=400)

    async with foreign(refuse) as client:
        with pytest.raises(TrtcbError, match=r"of 20 prompt and 6 output tokens, failed: HTTP 400.*--random-input-len"):
            await warm_up(client, ASKING, LOAD.generate(0))


async def test_ctrl_c_shows_what_was_measured() -> None:
    load = ("--num-prompts", "30", "--random-input-len", "10", "--random-output-len", "10", "--vocab-size", "256")
    llm = FakeLLM()
    async with served(llm) as server:
        arguments = ("--base-url", server.url, *load, "--max-concurrency", "2")
        running = asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "trtcb", "bench", "serve", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        process = await running
        while len(llm.requests) < 6:  # warm-up of the server, of the client, and four of the run
            await asyncio.sleep(0.005)
        llm.gate.clear()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        llm.gate.set()
    assert process.returncode == 130, err.decode()
    assert "cut off by Ctrl-C" in out.decode()
    assert "never sent" in out.decode()
    assert "Traceback" not in err.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--port", "1"),
        ("--percentile-metrics", "ttft,speed"),
        ("--metric-percentiles", "95,x"),
        ("--metric-percentiles", "101"),
        ("--goodput", "ttft"),
        ("--json", "no/such/folder/r.json"),
        ("--ignore-eos", "--max-tokens", "5"),
        ("--request-rate", "0"),
        ("--base-url", "127.0.0.1:8123"),
        ("--save-result", "--result-dir", "/proc"),
        ("--json", "/tmp"),
    ],
)
async def test_command_line_mistakes_are_one_sentence(arguments: tuple[str, ...]) -> None:
    code, _, err = await trtcb(*arguments)
    assert code == (1 if "--port" in arguments else 2)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
