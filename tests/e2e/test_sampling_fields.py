"""Penalties, biases, min_tokens, logprobs and n over HTTP, with the official client, on the runtime without a model."""

import math
import threading

import openai
import pytest

from tests.e2e.served import post, served
from tests.e2e.test_real_engine import TOKENIZER, client, engine
from tests.e2e.tiny_tokenizer import EOS, VOCAB_SIZE
from trtcb.executor.request import SamplingParams
from trtcb.executor.sim_runtime import SimRuntime, expected_logprobs, expected_tokens

PROMPT = "Once upon a time"
IDS = TOKENIZER.encode(PROMPT)
COUNT = 40


def wide_engine(**settings):
    """An engine whose runtime can draw every token of the model, end tokens included."""
    runtime = SimRuntime(num_blocks=256, block_size=16, vocab_size=VOCAB_SIZE)
    return engine(runtime, **settings)


def expected(params: SamplingParams, count: int = COUNT) -> list[int]:
    return expected_tokens(IDS, params, count, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(IDS + tokens)[len(PROMPT) :]


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.75},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"65": 3.0, "66": -100}},
        {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 0.4, "min_tokens": 30},
    ],
    ids=str,
)
async def test_fields_change_the_tokens_as_they_are_defined(fields):
    bias = tuple((int(token), bias) for token, bias in fields.get("logit_bias", {}).items())
    params = SamplingParams(temperature=0.0, ignore_eos=True, **{**fields, "logit_bias": bias})
    assert expected(params) != expected(SamplingParams(temperature=0.0))
    body = {"model": "fake", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, **fields}
    async with served(wide_engine()) as server:
        status, _, answer = await post(f"{server.url}/v1/completions", body)
    assert (status, answer["choices"][0]["text"]) == (200, text_of(expected(params)))


async def test_min_tokens_holds_ends_back_and_too_many_are_refused():
    params = {"model": "fake", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    ends = sorted(set(expected(SamplingParams(temperature=0.0), 3)))
    async with served(wide_engine()) as server, client(server) as api:
        short = await api.completions.create(**params, extra_body={"stop_token_ids": ends})
        held = await api.completions.create(**params, extra_body={"stop_token_ids": ends, "min_tokens": 20})
        with pytest.raises(openai.BadRequestError) as caught:
            await api.completions.create(**params, extra_body={"min_tokens": 41})
    assert short.usage.completion_tokens == 1
    assert held.usage.completion_tokens > 20
    assert caught.value.param == "min_tokens"


async def test_stop_strings_are_not_looked_for_before_min_tokens():
    text = text_of(expected(SamplingParams(temperature=0.0, ignore_eos=True)))
    stop = text[3]
    params = {"model": "fake", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "stop": stop}
    async with served(wide_engine()) as server, client(server) as api:
        short = await api.completions.create(**params, extra_body={"ignore_eos": True})
        held = await api.completions.create(**params, extra_body={"ignore_eos": True, "min_tokens": 30})
    assert short.choices[0].text == text[: text.index(stop)]
    assert len(held.choices[0].text) > len(short.choices[0].text)
    assert held.usage.completion_tokens > 30


def logprob_rows(tokens):
    return expected_logprobs(IDS, SamplingParams(temperature=0.0), tokens, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(stream):
    asked = {"model": "fake", "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "logprobs": 3, "stream": stream}
    async with served(wide_engine()) as server, client(server) as api:
        answer = await api.completions.create(**asked, extra_body={"ignore_eos": True})
        choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = expected(SamplingParams(temperature=0.0), 30)
    rows = logprob_rows(tokens)
    drawn = [logprob for part in parts for logprob in part.token_logprobs]
    assert drawn == [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
    names = [name for part in parts for name in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert offsets == [sum(len(name) for name in names[:i]) for i in range(30)]
    whole = b"".join(TOKENIZER.token_bytes(token) for token in tokens)
    as_bytes = b"".join(
        bytes.fromhex(name[6:].replace("\\x", "")) if name.startswith("bytes:") else name.encode() for name in names
    )
    assert as_bytes == whole
    for top, row, token in zip([top for part in parts for top in part.top_logprobs], rows, tokens, strict=True):
        assert len(top) in (3, 4)
        best = sorted(row.tolist(), reverse=True)[:3]
        assert sorted(top.values(), reverse=True)[:3] == best
        assert float(row[token]) in top.values()


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(stream):
    messages = [{"role": "user", "content": "Say hello."}]
    prompt = TOKENIZER.encode_chat(messages)
    asked = {"model": "fake", "messages": messages, "max_tokens": 30, "temperature": 0, "stream": stream}
    async with served(wide_engine()) as server, client(server) as api:
        answer = await api.chat.completions.create(
            **asked, logprobs=True, top_logprobs=4, extra_body={"ignore_eos": True}
        )
        choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
        plain = await api.chat.completions.create(**{**asked, "stream": False}, logprobs=True)
        with pytest.raises(openai.BadRequestError) as caught:
            await api.chat.completions.create(**asked, top_logprobs=4)
    content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    tokens = expected_tokens(prompt, SamplingParams(temperature=0.0), 30, vocab_size=VOCAB_SIZE)
    rows = expected_logprobs(prompt, SamplingParams(temperature=0.0), tokens, vocab_size=VOCAB_SIZE)
    assert [bytes(entry.bytes) for entry in content] == [TOKENIZER.token_bytes(token) for token in tokens]
    for entry, token, row in zip(content, tokens, rows, strict=True):
        assert entry.logprob == float(row[token])
        assert [top.logprob for top in entry.top_logprobs] == sorted(row.tolist(), reverse=True)[:4]
        assert entry.token == TOKENIZER.token_bytes(token).decode(errors="replace")
    assert all(entry.top_logprobs == [] for entry in plain.choices[0].logprobs.content)
    assert caught.value.param == "top_logprobs"


async def test_logprobs_are_the_models_own_whatever_edits_the_logits():
    asked = {"model": "fake", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 0}
    async with served(wide_engine()) as server, client(server) as api:
        answer = await api.completions.create(**asked, logit_bias={"65": 100})
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == [TOKENIZER.decode([65])] * 5
    rows = logprob_rows([65] * 5)
    assert logprobs.token_logprobs == [float(row[65]) for row in rows]
    assert all(math.exp(logprob) < 0.2 for logprob in logprobs.token_logprobs)


@pytest.mark.parametrize("stream", [False, True])
async def test_n_answers_differ_by_their_seed_and_share_the_prompt(stream):
    prompt = PROMPT * 4  # four whole blocks of 16
    asked = {"model": "fake", "max_tokens": 12, "temperature": 1.0, "seed": 7, "n": 3, "stream": stream}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    async with served(wide_engine(max_num_tokens=64)) as server, client(server) as api:
        answer = await api.completions.create(prompt=[prompt, "z"], **asked, **usage, extra_body={"ignore_eos": True})
        texts = [""] * 6
        if stream:
            async for chunk in answer:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                count = chunk.usage
        else:
            count = answer.usage
            assert [choice.index for choice in answer.choices] == list(range(6))
            texts = [choice.text for choice in answer.choices]
    for index, text in enumerate(texts):
        its_prompt = prompt if index < 3 else "z"
        ids = TOKENIZER.encode(its_prompt)
        params = SamplingParams(temperature=1.0, seed=7 + index % 3)
        tokens = expected_tokens(ids, params, 12, vocab_size=VOCAB_SIZE)
        assert text == TOKENIZER.decode(ids + tokens)[len(its_prompt) :]
    assert len(set(texts)) == 6
    assert (count.prompt_tokens, count.completion_tokens) == (65, 72)


@pytest.mark.parametrize("prefix_caching", [False, True])
async def test_n_answers_compute_their_prompt_once(prefix_caching, monkeypatch):
    steps, all_sent = [], threading.Event()
    all_sent.set()

    class Held(SimRuntime):
        def wait(self):
            assert all_sent.wait(60)
            return super().wait()

    llm = engine(Held(num_blocks=256, block_size=16, vocab_size=VOCAB_SIZE), prefix_caching=prefix_caching)
    llm.observe_steps(steps.append)
    submit = llm.engine.submit

    def submit_and_tell(request):
        submit(request)
        if request.request_id.endswith("-4"):
            all_sent.set()

    async with served(llm) as server, client(server) as api:
        before = sum(step.prompt_tokens for step in steps)
        monkeypatch.setattr(llm.engine, "submit", submit_and_tell)
        all_sent.clear()  # otherwise the first may be through with its four tokens before the last is there
        answer = await api.completions.create(model="fake", prompt="y" * 100, max_tokens=4, n=5, temperature=0)
    # the prompt once, and of the others each its last token
    assert sum(step.prompt_tokens for step in steps) - before == 100 + 4
    assert sum(step.prefix_hit_tokens for step in steps) == 4 * 99
    assert [choice.text for choice in answer.choices] == [answer.choices[0].text] * 5


async def test_n_chat_answers_each_have_their_opening():
    async with served(wide_engine()) as server, client(server) as api:
        stream = await api.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], n=2, max_tokens=5, seed=1, stream=True
        )
        roles = []
        async for chunk in stream:
            roles += [choice.index for choice in chunk.choices if choice.delta.role]
    assert sorted(roles) == [0, 1]
