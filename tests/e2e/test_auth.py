"""Keys: asked for everywhere but at the probes, never logged, and a wall between prefix caches."""

import logging

import pytest

from tests.e2e.fake_llm import FakeLLM
from tests.e2e.served import get, post, served
from trtcb.errors import UsageError
from trtcb.server.auth import read_keys

GOOD = {"model": "fake", "prompt": "x"}
KEYS = ("alpha-key", "beta-key")


async def test_every_route_but_the_probes_asks_for_a_key():
    async with served(FakeLLM(), api_keys=KEYS) as server:
        for path in ("/health", "/ready"):
            assert (await get(server.url + path))[0] == 200
        for path in ("/v1/models", "/v1/models/fake", "/metrics", "/", "/nowhere", "/health/", "//health"):
            assert (await get(server.url + path))[0] == 401, path
        for path in ("/v1/completions", "/v1/chat/completions", "/health/x"):
            status, _, answer = await post(server.url + path, GOOD)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), path


async def test_only_the_exact_key_opens(caplog):
    caplog.set_level(logging.DEBUG)
    async with served(FakeLLM(), api_keys=KEYS) as server:
        url = f"{server.url}/v1/models"
        wrong = (
            "",
            "alpha-key",
            "Bearer",
            "Bearer ",
            "Bearer alpha-ke",
            "Bearer alpha-key1",
            "Basic alpha-key",
            "Bearer é",
        )
        for value in wrong:
            assert (await get(url, Authorization=value))[0] == 401, value
        for value in ("Bearer alpha-key", "Bearer beta-key", "bearer alpha-key", "Bearer  alpha-key"):
            assert (await get(url, Authorization=value))[0] == 200, value
    assert "alpha-key" not in caplog.text


async def test_keys_and_salts_do_not_share_prefixes():
    llm = FakeLLM()
    async with served(llm, api_keys=KEYS) as server:
        url = f"{server.url}/v1/completions"
        for key in KEYS:
            for salt in ({}, {"cache_salt": "s"}, {"cache_salt": "key1/"}):
                assert (await post(url, {**GOOD, **salt}, Authorization=f"Bearer {key}"))[0] == 200
    scopes = [request.cache_salt for request in llm.requests]
    assert len(set(scopes)) == len(scopes)


async def test_one_key_shares_prefixes_across_requests_without_a_salt():
    llm = FakeLLM()
    async with served(llm, api_keys=KEYS[:1]) as server:
        await post(f"{server.url}/v1/completions", GOOD, Authorization="Bearer alpha-key")
    assert llm.requests[0].cache_salt == ""


async def test_a_tenant_is_the_key_where_there_are_several_and_the_user_otherwise():
    for keys, tenants in ((KEYS, ["key0", "key1"]), (KEYS[:1], ["u", "u"])):
        llm = FakeLLM()
        async with served(llm, api_keys=keys) as server:
            for key in (keys[0], keys[-1]):
                await post(f"{server.url}/v1/completions", {**GOOD, "user": "u"}, Authorization=f"Bearer {key}")
        assert [request.tenant for request in llm.requests] == tenants
    llm = FakeLLM()
    async with served(llm) as server:
        await post(f"{server.url}/v1/completions", GOOD)
    assert llm.requests[-1].tenant == ""


def test_a_key_file_holds_one_key_a_line(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# team a\n alpha-key \n\nbeta-key\n")
    assert read_keys(file) == KEYS
    file.write_text("# none\n")
    with pytest.raises(UsageError, match="holds no key"):
        read_keys(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "missing")
