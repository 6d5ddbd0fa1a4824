"""The official client against a real server."""

import asyncio

import openai
import pytest

from tests.e2e.fake_llm import FakeLLM
from tests.e2e.served import served
from trtcb.server.run import HttpServer


def client(server: HttpServer, **settings) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **settings)


MESSAGES = [{"role": "user", "content": "Say hello."}]


async def test_models_lists_and_retrieves_the_served_name():
    async with served(FakeLLM(), served_model_name="house/model") as server, client(server) as api:
        assert [model.id async for model in api.models.list()] == ["house/model"]
        assert (await api.models.retrieve("house/model")).owned_by == "trtcb"
        with pytest.raises(openai.NotFoundError) as caught:
            await api.models.retrieve("other")
        assert caught.value.code == "model_not_found"


async def test_completion_whole():
    async with served(FakeLLM("abc")) as server, client(server) as api:
        answer = await api.completions.create(model="fake", prompt="1234", max_tokens=2)
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 2, 6)
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_many_prompts_are_answered_in_their_order():
    llm = FakeLLM("xyz")
    async with served(llm) as server, client(server) as api:
        texts = await api.completions.create(model="fake", prompt=["a", "bb", "ccc"])
        ids = await api.completions.create(model="fake", prompt=[[1, 2], [3]])
    assert [(choice.index, choice.text) for choice in texts.choices] == [(0, "xyz"), (1, "xyz"), (2, "xyz")]
    assert texts.usage.prompt_tokens == 6
    assert len(ids.choices) == 2
    assert [request.prompt_token_ids for request in llm.requests[3:]] == [(1, 2), (3,)]


async def test_many_prompts_streamed_reach_their_own_choice():
    async with served(FakeLLM("pqr")) as server, client(server) as api:
        stream = await api.completions.create(model="fake", prompt=[[1], [2], [3]], stream=True)
        texts = ["", "", ""]
        reasons = {}
        async for chunk in stream:
            choice = chunk.choices[0]
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == ["pqr"] * 3
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}


async def test_chat_whole_goes_through_the_template():
    llm = FakeLLM("Hello!")
    async with served(llm) as server, client(server) as api:
        parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]
        answer = await api.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert llm.tokenizer.decode(llm.requests[0].prompt_token_ids) == "user: Say\nhello.\nassistant:"


async def test_chat_streamed_with_usage():
    async with served(FakeLLM("Hé!")) as server, client(server) as api:
        stream = await api.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]).startswith("H")
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4  # é is two bytes, and a token is a byte


async def test_parameters_reach_the_engine():
    llm = FakeLLM()
    async with served(llm) as server, client(server) as api:
        await api.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_completion_tokens=3,
            temperature=0.5,
            top_p=0.9,
            seed=-1,
            stop=["\n", "END"],
            user="somebody",
            extra_body={
                "top_k": 40,
                "min_p": 0.05,
                "stop_token_ids": [7],
                "ignore_eos": True,
                "priority": 0.75,
                "cache_salt": "mine",
            },
        )
    (request,) = llm.requests
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (3, 0.5, 0.9, 2**64 - 1)
    assert (params.top_k, params.min_p, params.stop_token_ids, params.ignore_eos) == (40, 0.05, (7,), True)
    assert (params.stop, request.priority, request.cache_salt) == (("\n", "END"), 0.75, "mine")


async def test_a_failure_in_mid_stream_is_an_error_event_after_the_text():
    async with served(FakeLLM("abcdef", fail_at=3)) as server, client(server) as api:
        stream = await api.completions.create(model="fake", prompt="x", stream=True)
        texts = []

        async def read():
            async for chunk in stream:
                texts.append(chunk.choices[0].text)

        with pytest.raises(openai.APIError) as caught:
            await read()
    assert texts == ["a", "b", "c"]
    assert "kernel died" in str(caught.value)
    assert "/opt" not in str(caught.value)


async def test_a_failure_of_a_whole_answer_is_a_500():
    async with served(FakeLLM("abcdef", fail_at=3)) as server, client(server) as api:
        with pytest.raises(openai.InternalServerError) as caught:
            await api.completions.create(model="fake", prompt="x")
    assert caught.value.code == "engine_error"


async def test_a_cancelled_stream_is_aborted():
    llm = FakeLLM("x" * 500, step_s=0.01)
    async with served(llm) as server, client(server) as api:
        stream = await api.completions.create(model="fake", prompt="x", stream=True)
        await anext(aiter(stream))
        await stream.close()
        for _ in range(200):
            if llm.left:
                break
            await asyncio.sleep(0.005)
        assert [request_id for request_id, _ in llm.left] == [llm.requests[0].request_id]
        assert llm.num_running == 0


async def test_unknown_model_and_bad_value_name_their_field():
    async with served(FakeLLM()) as server, client(server) as api:
        with pytest.raises(openai.NotFoundError) as missing:
            await api.completions.create(model="gpt", prompt="x")
        with pytest.raises(openai.BadRequestError) as bad:
            await api.completions.create(model="fake", prompt="x", temperature=9)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert bad.value.param == "temperature"


async def test_an_answer_may_be_sent_back_as_the_client_got_it():
    async with served(FakeLLM("Hello!")) as server, client(server) as api:
        first = await api.chat.completions.create(model="fake", messages=MESSAGES)
        message = first.choices[0].message
        for turn in (message, message.model_dump(), {**message.model_dump(), "annotations": [], "name": None}):
            again = await api.chat.completions.create(model="fake", messages=[*MESSAGES, turn, *MESSAGES])
            assert again.choices[0].message.content == "Hello!"
        with pytest.raises(openai.BadRequestError):
            await api.chat.completions.create(model="fake", messages=[{**MESSAGES[0], "name": "Ann"}])


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised():
    async with served(FakeLLM()) as server, client(server) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            await api.completions.create(model="fake", prompt="7" * 3_000_000)
        assert caught.value.code == "context_length_exceeded"
        assert "characters" in str(caught.value)
        with pytest.raises(openai.BadRequestError):
            await api.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 3_000_000}])
