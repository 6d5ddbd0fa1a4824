"""Thousands of wrong requests over one server: an answer each, never a 5xx."""

import random

import aiohttp
import orjson

from tests.e2e.fake_llm import FakeLLM
from tests.e2e.served import served
from trtcb.server.schemas import UNSUPPORTED, ChatRequest, CompletionRequest

NUM_MUTANTS = 1500
BODIES = {
    "/v1/completions": {"model": "fake", "prompt": ["ab", "c"], "max_tokens": 3, "stop": ["x"], "temperature": 0.5},
    "/v1/chat/completions": {
        "model": "fake",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hé"}]}],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
}
SCHEMAS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
VALUES = [None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 1e308, -0.5, "", "x", "é" * 300, [], [[]], [None], {}]
VALUES += [{"type": "text"}, [{"role": "user"}], [1, "a"], [[1], "a"], [999], ["", ""], {"include_usage": 1}]


def mutate(rng: random.Random, path: str) -> bytes:
    body = dict(BODIES[path])
    if rng.random() < 0.7:
        names = [*SCHEMAS[path].model_fields, *UNSUPPORTED, "surprise"]
        for _ in range(rng.randint(1, 3)):
            body[rng.choice(names)] = rng.choice(VALUES)
        return orjson.dumps(body)
    data = bytearray(orjson.dumps(body))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        data[at : at + rng.randint(0, 3)] = bytes(rng.randrange(256) for _ in range(rng.randint(0, 3)))
    return bytes(data)


async def test_no_mutant_is_a_server_error():
    rng = random.Random(17)
    counts: dict[int, int] = {}
    async with served(FakeLLM("ok")) as server, aiohttp.ClientSession() as session:
        for _ in range(NUM_MUTANTS):
            path = rng.choice(list(BODIES))
            body = mutate(rng, path)
            headers = {"Content-Type": "application/json"}
            async with session.post(server.url + path, data=body, headers=headers) as response:
                answer = await response.read()
            assert response.status in (200, 400, 404), (response.status, body, answer)
            if response.status != 200:
                assert orjson.loads(answer)["error"]["message"], body
            counts[response.status] = counts.get(response.status, 0) + 1
        assert server.context.lifecycle.request_ids == set()
    assert counts[200] > 20
    assert counts[400] > 500
