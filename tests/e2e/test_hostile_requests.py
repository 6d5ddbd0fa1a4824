"""What a client may send, however wrong: an error object each, and the server lives on."""

import asyncio
import time

import orjson
import pytest

from tests.e2e.fake_llm import FakeLLM
from tests.e2e.served import get, post, raw, served

GOOD = {"model": "fake", "prompt": "x"}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def with_(**fields) -> bytes:
    return orjson.dumps({**GOOD, **fields})


MALFORMED = {
    "nothing": b"",
    "not json": b"{oops",
    "cut": b'{"model": "fake", "prompt": "x"',
    "not an object": b'["model"]',
    "null": b"null",
    "number": b"7",
    "not utf8": b'{"model": "fake", "prompt": "\xff\xfe"}',
    "utf16": '{"model": "fake"}'.encode("utf-16"),
    "lone surrogate": b'{"model": "fake", "prompt": "\\ud800"}',
    "nan": b'{"model": "fake", "prompt": "x", "temperature": NaN}',
    "infinity": b'{"model": "fake", "prompt": "x", "temperature": -Infinity}',
    "1e400": b'{"model": "fake", "prompt": "x", "temperature": 1e400}',
    "deep": b'{"model": "fake", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep but decodable": b'{"model": "fake", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "trailing": b'{"model": "fake", "prompt": "x"} {}',
    "huge max_tokens": b'{"model": "fake", "prompt": "x", "max_tokens": 100000000000000000000000000}',
    "huge seed": b'{"model": "fake", "prompt": "x", "seed": 9223372036854775808}',
}

INVALID = {
    "no model": (orjson.dumps({"prompt": "x"}), "model"),
    "no prompt": (orjson.dumps({"model": "fake"}), "prompt"),
    "empty prompt": (with_(prompt=""), "prompt"),
    "empty prompts": (with_(prompt=[]), "prompt"),
    "one empty of many": (with_(prompt=["a", ""]), "prompt"),
    "empty ids": (with_(prompt=[[1], []]), "prompt"),
    "mixed": (with_(prompt=["a", 1]), "prompt"),
    "mixed ids": (with_(prompt=[1, "a"]), "prompt"),
    "float id": (with_(prompt=[1, 2.0]), "prompt"),
    "bool id": (with_(prompt=[True]), "prompt"),
    "negative id": (with_(prompt=[-1]), "prompt"),
    "id outside the vocabulary": (with_(prompt=[259]), "prompt"),
    "huge id": (with_(prompt=[2**63]), "prompt"),
    "too many prompts": (with_(prompt=["a"] * 257), "prompt"),
    "prompt object": (with_(prompt={"a": 1}), "prompt"),
    "prompt null": (with_(prompt=None), "prompt"),
    "bool temperature": (with_(temperature=True), "temperature"),
    "text temperature": (with_(temperature="0.5"), "temperature"),
    "hot": (with_(temperature=2.5), "temperature"),
    "zero max_tokens": (with_(max_tokens=0), "max_tokens"),
    "float max_tokens": (with_(max_tokens=2.0), "max_tokens"),
    "two limits": (with_(max_tokens=2, max_completion_tokens=3), "max_completion_tokens"),
    "zero top_p": (with_(top_p=0), "top_p"),
    "top_k": (with_(top_k=-2), "top_k"),
    "min_p": (with_(min_p=1.5), "min_p"),
    "too many stops": (with_(stop=["x"] * 17), "stop"),
    "long stop": (with_(stop="x" * 257), "stop.0"),
    "empty stop": (with_(stop=[""]), "stop.0"),
    "stop id": (with_(stop_token_ids=[259]), "stop_token_ids"),
    "stream text": (with_(stream="yes"), "stream"),
    "options without stream": (with_(stream_options={"include_usage": True}), "stream_options"),
    "priority": (with_(priority=1.01), "priority"),
    "zero n": (with_(n=0), "n"),
    "large n": (with_(n=129), "n"),
    "n beyond the batch": (with_(n=65), "n"),
    "n times prompts": (with_(n=9, prompt=["a"] * 30), "n"),
    "bool n": (with_(n=True), "n"),
    "unsupported echo": (with_(echo=True), "echo"),
    "unsupported best_of": (with_(best_of=2), "best_of"),
    "many logprobs": (with_(logprobs=21), "logprobs"),
    "negative logprobs": (with_(logprobs=-1), "logprobs"),
    "bool logprobs": (with_(logprobs=True), "logprobs"),
    "chat's logprobs": (with_(top_logprobs=2), "top_logprobs"),
    "presence_penalty": (with_(presence_penalty=2.1), "presence_penalty"),
    "frequency_penalty": (with_(frequency_penalty=-2.1), "frequency_penalty"),
    "zero repetition_penalty": (with_(repetition_penalty=0), "repetition_penalty"),
    "huge repetition_penalty": (with_(repetition_penalty=1e308), "repetition_penalty"),
    "text penalty": (with_(presence_penalty="1"), "presence_penalty"),
    "negative min_tokens": (with_(min_tokens=-1), "min_tokens"),
    "float min_tokens": (with_(min_tokens=1.0), "min_tokens"),
    "unsupported suffix": (with_(suffix="z"), "suffix"),
    "bias list": (with_(logit_bias=[[5, 1]]), "logit_bias"),
    "bias key": (with_(logit_bias={"x": 1}), "logit_bias"),
    "bias superscript key": (with_(logit_bias={"²": 1}), "logit_bias"),
    "bias negative key": (with_(logit_bias={"-1": 1}), "logit_bias"),
    "bias outside the vocabulary": (with_(logit_bias={"259": 1}), "logit_bias"),
    "bias huge key": (with_(logit_bias={"9" * 5000: 1}), "logit_bias"),
    "bias too large": (with_(logit_bias={"5": 100.5}), "logit_bias"),
    "bias text": (with_(logit_bias={"5": "1"}), "logit_bias"),
    "bias null": (with_(logit_bias={"5": None}), "logit_bias"),
    "too many biases": (with_(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"),
    "unsupported schema": (with_(response_format={"type": "json_object"}), "response_format"),
    "unsupported option": (with_(stream=True, stream_options={"x": 1}), "stream_options.x"),
    "unknown field": (with_(temprature=1), "temprature"),
}

BAD_MESSAGES = {
    "none": ([], "messages"),
    "text": ("hi", "messages"),
    "role": ([{"role": "tool", "content": "x"}], "messages.0.role"),
    "no content": ([{"role": "user"}], "messages.0.content"),
    "null content": ([{"role": "assistant", "content": None}], "messages.0.content"),
    "image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "messages.0.content.0.type",
    ),
    "name": ([{"role": "user", "content": "x", "name": "me"}], "messages.0.name"),
}


@pytest.fixture
async def server():
    async with served(FakeLLM("ok")) as server:
        yield server
        status, _, answer = await post(f"{server.url}/v1/completions", GOOD)
        assert (status, answer["choices"][0]["text"]) == (200, "ok")


async def test_malformed_json_is_a_400(server):
    for name, body in MALFORMED.items():
        status, _, answer = await post(f"{server.url}/v1/completions", body)
        assert status == 400, (name, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}, name


async def test_invalid_values_are_a_400_that_names_the_field(server):
    for name, (body, param) in INVALID.items():
        status, _, answer = await post(f"{server.url}/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, param), (name, answer)


async def test_bad_messages_are_a_400_that_names_the_field(server):
    for name, (messages, param) in BAD_MESSAGES.items():
        status, _, answer = await post(f"{server.url}/v1/chat/completions", {"model": "fake", "messages": messages})
        assert (status, answer["error"]["param"]) == (400, param), (name, answer)


async def test_refusals_say_what_is_meant(server):
    _, _, unknown = await post(f"{server.url}/v1/completions", with_(temprature=1))
    _, _, unsupported = await post(f"{server.url}/v1/completions", with_(best_of=2))
    assert "did you mean temperature?" in unknown["error"]["message"]
    assert unsupported["error"]["code"] == "unsupported_parameter"


async def test_values_that_ask_for_nothing_are_accepted(server):
    neutral = with_(
        n=1, best_of=1, echo=False, logprobs=None, presence_penalty=0.0, frequency_penalty=0, suffix=None, logit_bias={}
    )
    status, _, answer = await post(f"{server.url}/v1/completions", neutral)
    assert status == 200, answer


async def test_routes_and_methods_and_types(server):
    cases = [
        (await post(f"{server.url}/v1/embeddings", GOOD), 404),
        (await post(f"{server.url}/v1/models", GOOD), 405),
        (await post(f"{server.url}/v1/completions", orjson.dumps(GOOD), Content_Type="text/plain"), 415),
        (await post(f"{server.url}/v1/completions", orjson.dumps(GOOD), Content_Encoding="gzip"), 415),
        (await post(f"{server.url}/v1/completions", b" " * (4 << 20) + b"{}"), 413),
    ]
    for (status, _, answer), expected in cases:
        assert (status, set(answer["error"])) == (expected, {"message", "type", "param", "code"})
    assert cases[1][0][1]["Allow"] == "GET, HEAD"
    status, headers, _ = await get(f"{server.url}/nowhere")
    assert (status, headers["Content-Type"]) == (404, "application/json")


async def test_a_chunked_body_over_the_limit_is_a_413(server):
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = await raw(server, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 70)
    assert answer.startswith(b"HTTP/1.1 413 ")


NOT_HTTP = {
    "binary": bytes(range(256)),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "bad version": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "bad header": b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
    "long header": b"GET /health HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    "negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "length and chunked": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}


async def test_malformed_http_is_a_json_400(server):
    for name, data in NOT_HTTP.items():
        answer = await raw(server, data)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split(b" ")[1] == b"400", (name, answer)
        assert orjson.loads(body)["error"]["code"] == "bad_http", name


async def test_slow_headers_and_bodies_meet_their_deadline():
    async with served(FakeLLM(), header_timeout_s=0.2, body_timeout_s=0.2) as server:
        silent = raw(server, b"")
        half_head = raw(server, b"POST /v1/completions HTTP/1.1\r\nContent-Le")
        half_body = raw(server, POST + b"Content-Length: 99\r\n\r\n{")
        answers = await asyncio.wait_for(asyncio.gather(silent, half_head, half_body), 4)
    assert answers[:2] == [b"", b""]
    assert answers[2].startswith(b"HTTP/1.1 408 ")


async def test_a_header_that_drips_meets_its_deadline():
    async with served(FakeLLM(), header_timeout_s=0.3) as server:
        reader, writer = await asyncio.open_connection(*server.address)

        async def drip():
            writer.write(b"GET /health HTTP/1.1\r\n")
            while True:
                writer.write(b"X-A: 1\r\n")
                await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        assert await asyncio.wait_for(reader.read(), 2) == b""
        dripping.cancel()
        writer.close()


async def test_the_next_request_of_a_connection_has_a_deadline_of_its_own():
    async with served(FakeLLM(), header_timeout_s=0.2) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(0.3)  # idle between requests is not slow
        writer.write(b"GET /hea")
        assert b"HTTP/1.1" not in await asyncio.wait_for(reader.read(), 2)
        writer.close()


async def test_a_long_prompt_does_not_stall_other_streams():
    llm = FakeLLM("x")
    encode_batch = llm.tokenizer.encode_batch

    def slow_for_long_texts(texts, add_special_tokens=True):
        if len(texts[0]) > 10_000:
            time.sleep(0.5)
        return encode_batch(texts, add_special_tokens)

    llm.tokenizer.encode_batch = slow_for_long_texts
    async with served(llm) as server:
        long = asyncio.ensure_future(post(f"{server.url}/v1/completions", with_(prompt="y" * 17_000)))
        await asyncio.sleep(0.05)
        short = await post(f"{server.url}/v1/completions", with_(prompt="y"))
        assert not long.done()
        assert (short[0], (await long)[0]) == (200, 200)
