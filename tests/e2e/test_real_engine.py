"""The server over the real engine, on the runtime whose every token can be told in advance."""

import asyncio

import aiohttp
import openai
import orjson
import pytest

from tests.e2e.fake_llm import MODEL
from tests.e2e.served import get, post, served
from tests.e2e.tiny_tokenizer import tiny_tokenizer
from trtcb.executor.config import EngineConfig
from trtcb.executor.llm import AsyncLLM
from trtcb.executor.request import SamplingParams
from trtcb.executor.sim_runtime import SimRuntime, expected_tokens

TOKENIZER = tiny_tokenizer()


class FaultyRuntime(SimRuntime):
    """Fails the step that carries ``poison``, blaming its row, or the whole device if ``is_fatal``."""

    def __init__(self, *, poison: int, is_fatal: bool, **sizes) -> None:
        super().__init__(**sizes)
        self.poison = poison
        self.is_fatal = is_fatal

    def launch(self, batch) -> None:
        if self.poison not in batch.input_ids:
            super().launch(batch)
            return
        error = RuntimeError("bad row")
        if self.is_fatal:
            self.healthy = False
        else:
            at = int((batch.input_ids == self.poison).argmax())
            error.request_index = int((batch.cu_q <= at).sum()) - 1
        raise error


def engine(runtime=None, *, num_blocks=256, step_time_s=0.0, **settings) -> AsyncLLM:
    settings = {"block_size": 16, "max_seq_len": 512, "max_num_tokens": 256, "num_blocks": num_blocks, **settings}
    runtime = runtime or SimRuntime(num_blocks=num_blocks, block_size=16, step_time_s=step_time_s)
    return AsyncLLM(runtime, EngineConfig(**settings), tokenizer=TOKENIZER, model=MODEL)


def client(server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def expected_text(prompt: str, count: int) -> str:
    params = SamplingParams(temperature=0.0)
    ids = TOKENIZER.encode(prompt)
    return TOKENIZER.decode(ids + expected_tokens(ids, params, count))[len(prompt) :]


async def test_text_equals_what_the_engine_draws():
    async with served(engine()) as server, client(server) as api:
        whole = await api.completions.create(model="fake", prompt="Once upon", max_tokens=40, temperature=0)
        stream = await api.completions.create(
            model="fake", prompt="Once upon", max_tokens=40, temperature=0, stream=True
        )
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == streamed == expected_text("Once upon", 40)
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (9, 40)


async def test_a_stop_string_is_cut_exactly():
    text = expected_text("Once upon", 40)
    stop = next(text[at : at + 2] for at in range(8, 30) if text[at : at + 2].isascii())
    async with served(engine()) as server, client(server) as api:
        for stream in (False, True):
            answer = await api.completions.create(
                model="fake", prompt="Once upon", max_tokens=40, temperature=0, stop=["\x00nope", stop], stream=stream
            )
            if stream:
                chunks = [chunk async for chunk in answer]
                got, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
            else:
                got, reason = answer.choices[0].text, answer.choices[0].finish_reason
            assert (got, reason) == (text[: text.index(stop)], "stop")


async def test_a_repeated_prompt_is_counted_as_cached_unless_its_salt_differs():
    body = {"model": "fake", "prompt": "x" * 100, "max_tokens": 2, "temperature": 0}
    async with served(engine()) as server:
        url = f"{server.url}/v1/completions"
        cached = [
            (await post(url, {**body, **salt}))[2]["usage"]["prompt_tokens_details"]["cached_tokens"]
            for salt in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"})
        ]
    assert cached == [0, 96, 0, 96]


async def test_many_streams_under_pauses_are_each_their_own_solo_run():
    llm = engine(num_blocks=40, scheduler_policy="max_utilization")
    prompts = [f"{index:02d} " + "y" * (index * 3) for index in range(32)]
    async with served(llm) as server, client(server) as api:

        async def run(prompt: str) -> str:
            stream = await api.completions.create(
                model="fake", prompt=prompt, max_tokens=60, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*map(run, prompts))
        _, _, metrics = await get(f"{server.url}/metrics")
    assert texts == [expected_text(prompt, 60) for prompt in prompts]
    pauses = next(line for line in metrics.splitlines() if line.startswith("trtcb_pauses_total{"))
    assert float(pauses.rsplit(" ", 1)[1]) > 0
    assert "trtcb_kv_audit_failures_total 0.0" in metrics


async def test_overload_is_a_429_and_those_accepted_finish():
    llm = engine(step_time_s=0.002, max_batch_size=2, max_queue_size=2)
    body = {"model": "fake", "prompt": "x", "max_tokens": 30, "temperature": 0}
    async with served(llm) as server:
        answers = await asyncio.gather(*(post(f"{server.url}/v1/completions", body) for _ in range(20)))
    codes = [status for status, _, _ in answers]
    assert set(codes) == {200, 429}
    assert codes.count(200) >= 2
    for status, headers, answer in answers:
        if status == 429:
            assert (answer["error"]["code"], headers["Retry-After"]) == ("queue_full", "1")
        else:
            assert answer["choices"][0]["text"] == expected_text("x", 30)


async def test_what_can_never_fit_is_a_400_with_numbers():
    async with served(engine(num_blocks=4)) as server:
        long = {"model": "fake", "prompt": [1] * 512}
        big = {"model": "fake", "prompt": "x", "max_tokens": 400}
        for body, param in ((long, "prompt"), (big, "max_tokens")):
            status, _, answer = await post(f"{server.url}/v1/completions", body)
            assert (status, answer["error"]["param"]) == (400, param)
            assert answer["error"]["code"] == "context_length_exceeded"


async def test_disconnects_free_every_block():
    llm = engine(step_time_s=0.002)
    body = {"model": "fake", "prompt": "z" * 50, "max_tokens": 400, "stream": True}
    async with served(llm) as server:

        async def leave_after(num_chunks: int) -> None:
            async with aiohttp.ClientSession() as session:
                response = await session.post(f"{server.url}/v1/completions", json=body)
                for _ in range(num_chunks):
                    await response.content.readline()
                response.close()

        await asyncio.gather(*(leave_after(index % 7) for index in range(24)))
        for _ in range(400):
            now = llm.engine.snapshot()
            if not now.has_work and not now.used_blocks:
                break
            await asyncio.sleep(0.005)
        assert (now.has_work, now.used_blocks, now.num_running, now.num_waiting) == (False, 0, 0, 0)
        assert server.context.lifecycle.request_ids == set()


async def test_a_failure_of_one_request_spares_its_neighbours():
    runtime = FaultyRuntime(poison=200, is_fatal=False, num_blocks=256, block_size=16, vocab_size=128)
    llm = engine(runtime)
    async with served(llm) as server:
        url = f"{server.url}/v1/completions"
        good = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 50}
        bad = {"model": "fake", "prompt": [1, 200, 3], "max_tokens": 50}
        answers = await asyncio.gather(*(post(url, body) for body in (good, bad, good)))
        assert [status for status, _, _ in answers] == [200, 500, 200]
        assert answers[1][2]["error"]["code"] == "engine_error"
        assert (await get(f"{server.url}/health"))[0] == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_fatal_failure_is_told_to_all_and_health_says_so():
    runtime = FaultyRuntime(poison=200, is_fatal=True, num_blocks=256, block_size=16, vocab_size=128, step_time_s=0.005)
    llm = engine(runtime)
    async with served(llm) as server:
        url = f"{server.url}/v1/completions"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={"model": "fake", "prompt": [1], "max_tokens": 400, "stream": True}) as stream,
        ):
            await stream.content.readline()
            status, _, _ = await post(url, {"model": "fake", "prompt": [200], "max_tokens": 5})
            rest = await stream.read()
        assert status in (500, 503)
        assert "error" in orjson.loads(rest.strip().split(b"\n\n")[-1].removeprefix(b"data: "))
        assert b"[DONE]" not in rest
        assert (await get(f"{server.url}/health"))[0] == 503


async def test_a_drain_waits_for_the_engine():
    llm = engine(step_time_s=0.005)
    async with served(llm, shutdown_timeout_s=10) as server, client(server) as api:
        streams = [
            await api.completions.create(model="fake", prompt="x", max_tokens=40, temperature=0, stream=True)
            for _ in range(8)
        ]
        server.stop()
        texts = []
        for stream in streams:
            texts.append("".join([chunk.choices[0].text async for chunk in stream]))
    assert texts == [expected_text("x", 40)] * 8
    assert llm.engine.snapshot().state == "closed"


async def test_chat_with_the_official_client():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    async with served(engine()) as server, client(server) as api:
        answer = await api.chat.completions.create(model="fake", messages=messages, max_tokens=20, temperature=0)
    ids = TOKENIZER.encode_chat(messages)
    tokens = expected_tokens(ids, SamplingParams(temperature=0.0), 20)
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].message.content == TOKENIZER.decode(tokens)
