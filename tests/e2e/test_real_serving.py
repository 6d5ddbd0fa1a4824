"""The main job: SmolLM2-135M from a plan with an fp8 KV cache, asked through the official client."""

import asyncio
import math

import openai
import pytest

from tests.e2e.served import served
from trtcb.executor.config import EngineConfig
from trtcb.executor.llm import AsyncLLM

pytestmark = pytest.mark.model

STORY = (
    "The ferry was late again, and the five people on the pier had stopped pretending not to look at each other. An "
    "old man in a green coat fed the gulls from a paper bag. Two sisters argued about a map that neither of them could "
    "read. A boy counted the boats, lost count, and began once more, while his mother wrote a letter on her knee. Far "
    "out, where the water turned from grey to silver, something large rose slowly, looked around, and went down. Then"
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def test_the_openai_client_works_on_the_real_model(smollm2_plan):
    llm = AsyncLLM.from_plan(smollm2_plan("bf16", "fp8"), EngineConfig(max_batch_size=8, num_blocks=256))
    async with (
        served(llm) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api,
    ):
        [model] = [model.id async for model in api.models.list()]
        await check_completion(api, model)
        await check_chat(api, model)
        await check_streamed_chat_with_usage(api, model)
        await check_stop_string(api, model)
        await check_logprobs(api, model)
        await check_penalty(api, model)
        await check_n(api, model)
        await check_n_answers_are_those_of_their_seeds(api, model, llm)
        await check_cancelled_stream(api, model, llm)


async def check_completion(api, model):
    answer = await api.completions.create(model=model, prompt="The capital of France is", max_tokens=2, temperature=0)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 2)


async def check_chat(api, model):
    answer = await api.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


async def check_streamed_chat_with_usage(api, model):
    stream = await api.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert "Paris" in text
    assert len(chunks) > 5  # it really came piece by piece
    assert chunks[-1].usage.completion_tokens >= 5
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 32  # the question was asked before


async def check_stop_string(api, model):
    prompt = "Count: one, two, three, four, five,"
    whole = await api.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0)
    text = whole.choices[0].text
    stop = text[6:10]
    cut = await api.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


async def check_logprobs(api, model):
    asked = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    answer = await api.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    text = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert text == answer.choices[0].message.content + "<|im_end|>"
    assert len(content) == answer.usage.completion_tokens
    for entry in content:  # greedy takes the likeliest
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-5


async def check_penalty(api, model):
    asked = {"model": model, "prompt": "one two one two one two", "temperature": 0, "max_tokens": 24}
    plain = await api.completions.create(**asked, logprobs=0)
    varied = await api.completions.create(**asked, logprobs=0, frequency_penalty=2, presence_penalty=2)
    first, second = plain.choices[0].logprobs.tokens, varied.choices[0].logprobs.tokens
    assert len(set(second)) > len(set(first))


async def check_n(api, model):
    answer = await api.completions.create(
        model=model, prompt="Once upon a time", n=3, seed=1, max_tokens=8, extra_body={"min_tokens": 8}
    )
    assert len({choice.text for choice in answer.choices}) == 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 24)


async def check_n_answers_are_those_of_their_seeds(api, model, llm):
    """Forked answers are those that the seeds give alone, and the prompt is computed once for all of them."""
    steps = []
    llm.observe_steps(steps.append)
    asked = {"model": model, "prompt": STORY, "max_tokens": 12, "temperature": 1.2}

    def options(salt: str) -> dict:
        return {"min_tokens": 12, "cache_salt": salt}  # nothing is found that another call has computed

    together = await api.completions.create(**asked, n=4, seed=21, extra_body=options("together"))
    computed = sum(step.prompt_tokens for step in steps)
    hits = sum(step.prefix_hit_tokens for step in steps)
    alone = [
        await api.completions.create(**asked, seed=21 + index, extra_body=options(f"alone {index}"))
        for index in range(4)
    ]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert len({choice.text for choice in together.choices}) == 4
    length = together.usage.prompt_tokens
    assert 90 < length < 128
    assert (computed, hits) == (length + 3, 3 * (length - 1))
    assert together.usage.prompt_tokens_details.cached_tokens == 0  # the prompt is counted once, and was computed
    assert sum(step.prompt_tokens for step in steps) == computed + 4 * length


async def check_cancelled_stream(api, model, llm):
    stream = await api.completions.create(
        model=model, prompt="Once upon a time", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    assert llm.engine.snapshot().used_blocks > 0
    await stream.close()
    for _ in range(200):
        if llm.engine.snapshot().num_running == 0:
            break
        await asyncio.sleep(0.01)
    picture = llm.engine.snapshot()
    assert picture.used_blocks == 0
    assert picture.free_blocks + picture.cached_blocks == picture.num_blocks
