"""Every byte of a stream, held against transcripts kept in the repository (ids and times masked)."""

import re
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.fake_llm import FakeLLM
from tests.e2e.served import served

TRANSCRIPTS = Path(__file__).parent.parent / "golden" / "sse"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "stream": True}
CASES = {
    "completion": ("/v1/completions", {"model": "fake", "prompt": "x", "stream": True}, {}),
    "completion_two_prompts_limit": (
        "/v1/completions",
        {"model": "fake", "prompt": [[1], [2]], "max_tokens": 1, "stream": True},
        {},
    ),
    "chat_usage": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, {}),
    "chat_failure": ("/v1/chat/completions", CHAT, {"fail_at": 1}),
}


@pytest.mark.parametrize("name", CASES)
async def test_transcript(name):
    path, body, faults = CASES[name]
    async with (
        served(FakeLLM("Hi!", **faults)) as server,
        aiohttp.ClientSession() as session,
        session.post(server.url + path, json=body) as response,
    ):
        text = (await response.read()).decode()
    kept = ("Content-Type", "Cache-Control", "X-Accel-Buffering", "Server", "Connection")
    head = "".join(f"{name}: {response.headers[name]}\n" for name in kept if name in response.headers)
    text = re.sub(r'"id":"(\w+)-[0-9a-f]{32}"', r'"id":"\1-ID"', text)
    text = re.sub(r'"created":\d+', '"created":TIME', text)
    assert f"HTTP {response.status}\n{head}\n{text}" == (TRANSCRIPTS / f"{name}.txt").read_text()
