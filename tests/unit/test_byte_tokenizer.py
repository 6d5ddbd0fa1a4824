from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtcb.builder.byte_tokenizer import byte_level_assets
from trtcb.builder.presets import load_preset, preset_names
from trtcb.errors import UsageError
from trtcb.tokenizer import Tokenizer

TINY = load_preset("tiny-random").spec
TOKENIZER = Tokenizer(byte_level_assets(TINY))


@pytest.mark.parametrize("name", preset_names())
def test_every_id_of_every_preset_is_a_token(name):
    spec = load_preset(name).spec
    tokenizer = Tokenizer(byte_level_assets(spec))
    assert tokenizer.vocab_size == spec.vocab_size
    assert all(tokenizer.id_to_token(index) is not None for index in range(spec.vocab_size))
    assert tokenizer.bos_token_id == spec.bos_token_id
    assert tokenizer.eos_token_ids == set(spec.eos_token_ids)
    assert tokenizer.decode(list(spec.eos_token_ids)) == ""
    text = "the quick 日本 🦙\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_round_trips(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    if "<|" not in text:
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= index < TINY.vocab_size for index in ids)


def test_common_words_are_single_tokens():
    assert len(TOKENIZER.encode(" the", add_special_tokens=False)) == 1
    assert len(TOKENIZER.encode("the of and to", add_special_tokens=False)) == 4


def test_a_chat_is_framed_by_special_tokens():
    ids = TOKENIZER.encode_chat([{"role": "user", "content": "a"}])
    assert ids[0] == TINY.bos_token_id
    assert ids.count(TINY.bos_token_id) == 1
    assert ids.count(TOKENIZER.token_to_id("<|im_start|>")) == 2
    assert TOKENIZER.decode(ids) == "user\na\nassistant\n"


def test_models_without_special_tokens_and_odd_sizes_work():
    for size in (260, 261, 300, 5000):
        spec = replace(TINY, vocab_size=size, bos_token_id=None, eos_token_ids=())
        tokenizer = Tokenizer(byte_level_assets(spec))
        assert tokenizer.vocab_size == size
        assert not tokenizer.adds_bos
        assert tokenizer.decode(tokenizer.encode("ü the")) == "ü the"


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(UsageError, match="at least 260"):
        byte_level_assets(replace(TINY, vocab_size=259))
