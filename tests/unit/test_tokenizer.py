import json
from dataclasses import replace
from datetime import datetime

import pytest

from trtcb.builder.byte_tokenizer import byte_level_assets
from trtcb.builder.presets import load_preset
from trtcb.errors import PlanError, RequestError
from trtcb.tokenizer import Tokenizer, TokenizerAssets

ASSETS = byte_level_assets(load_preset("tiny-random").spec)
TOKENIZER = Tokenizer(ASSETS)
BOS = 0
USER = [{"role": "user", "content": "hi"}]


def with_template(source):
    return Tokenizer(replace(ASSETS, chat_template=source))


def test_bos_is_added_once_and_only_when_asked_for():
    body = TOKENIZER.encode("hi", add_special_tokens=False)
    assert TOKENIZER.encode("hi") == [BOS, *body]
    assert TOKENIZER.encode("") == [BOS]
    assert TOKENIZER.encode("<|bos|>hi") == [BOS, *body]
    assert TOKENIZER.encode(TOKENIZER.apply_chat_template(USER)) == TOKENIZER.encode_chat(USER)


def test_a_batch_equals_its_members():
    texts = ["", "the", "<|bos|>x", "日本", "a" * 100]
    assert TOKENIZER.encode_batch(texts) == [TOKENIZER.encode(text) for text in texts]
    assert TOKENIZER.encode_batch([]) == []


def test_special_tokens_can_be_shown():
    assert TOKENIZER.decode([BOS, *TOKENIZER.encode("hi", False)], skip_special_tokens=False) == "<|bos|>hi"


def test_half_a_character_decodes_to_the_replacement_character():
    ids = TOKENIZER.encode("日", add_special_tokens=False)
    assert TOKENIZER.decode(ids[:-1]) == "\ufffd"


def test_half_a_surrogate_pair_is_the_clients_fault():
    with pytest.raises(RequestError, match="Unicode"):
        TOKENIZER.encode("a\ud800b")


def test_sections_round_trip():
    assert TokenizerAssets.from_sections(memoryview(ASSETS.tokenizer_json), memoryview(ASSETS.config_json())) == ASSETS


@pytest.mark.parametrize("config", [b"", b"[]", b"{}", b"null", b'{"chat_template": null, "generation_config": 3}'])
def test_foreign_sections_are_a_plan_error(config):
    with pytest.raises(PlanError, match="tokenizer_config"):
        TokenizerAssets.from_sections(ASSETS.tokenizer_json, config)


def test_a_broken_tokenizer_json_is_a_plan_error():
    with pytest.raises(PlanError, match=r"tokenizer\.json"):
        Tokenizer(TokenizerAssets(b'{"model": {}}'))


def test_padding_and_truncation_of_the_file_are_ignored():
    document = json.loads(ASSETS.tokenizer_json)
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|bos|>",
    }  # fmt: skip
    tokenizer = Tokenizer(replace(ASSETS, tokenizer_json=json.dumps(document).encode()))
    assert tokenizer.encode("abcdef") == TOKENIZER.encode("abcdef")


@pytest.mark.parametrize("eos", [None, 7, [7, 8]])
def test_eos_ids_come_in_three_forms(eos):
    tokenizer = Tokenizer(replace(ASSETS, generation_config={"bos_token_id": None, "eos_token_id": eos}))
    assert tokenizer.eos_token_ids == ({7, 8} if isinstance(eos, list) else {eos} - {None})
    assert not tokenizer.adds_bos


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),  # trim_blocks and lstrip_blocks
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "<|bos|>|<|eos|>|"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'b': '<é>', 'a': 1} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 1,\n "b": "<é>"\n}'),
        ("{% for m in messages %}{% break %}x{% endfor %}", ""),
        ("{% generation %}a{{ messages[0].content }}{% endgeneration %}", "ahi"),
        ("{{ add_generation_prompt }}", "True"),
        ("{{ tools is defined }}", "False"),
        ("{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}", "2"),
    ],
)
def test_templates_render_as_in_transformers(source, wanted):
    assert with_template(source).apply_chat_template(USER) == wanted
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    rendered, _ = utils.render_jinja_template(
        [USER], chat_template=source, add_generation_prompt=True, bos_token="<|bos|>", eos_token="<|eos|>"
    )
    if "tools" not in source:  # transformers passes tools=None, which counts as defined
        assert rendered == [wanted]


def test_strftime_now_and_variables_are_there():
    today = with_template("{{ strftime_now('%Y') }}").apply_chat_template(USER)
    assert today == str(datetime.now().year)
    assert with_template("{{ x }}").apply_chat_template(USER, x=3) == "3"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages[5].content.x }}", "no element 5|undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|__class__"),
        ("{{ messages.append(1) }}", "immutable|unsafe|not safely callable"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ range(10 ** 9) }}", "Range too big"),
    ],
)
def test_a_template_that_objects_is_a_request_error(source, reason):
    with pytest.raises(RequestError, match=reason) as caught:
        with_template(source).apply_chat_template(USER)
    assert caught.value.param == "messages"


def test_no_template_is_a_request_error_that_names_the_way_out():
    tokenizer = with_template(None)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="/v1/completions"):
        tokenizer.apply_chat_template(USER)


@pytest.mark.parametrize("eos", [1.5, [[1]], "2", {}, True])
def test_eos_ids_of_another_type_are_a_plan_error(eos):
    assets = replace(ASSETS, generation_config={"eos_token_id": eos})
    with pytest.raises(PlanError, match="eos_token_id"):
        Tokenizer(assets)


def test_a_panic_of_the_library_ends_one_request():
    document = json.loads(ASSETS.tokenizer_json)
    document["decoder"] = {"type": "Strip", "content": "a", "start": 0, "stop": 50}
    tokenizer = Tokenizer(replace(ASSETS, tokenizer_json=json.dumps(document).encode()))
    with pytest.raises(RequestError, match="these tokens"):
        tokenizer.decode(tokenizer.encode("a"))
