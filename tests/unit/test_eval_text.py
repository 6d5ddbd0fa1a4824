"""What ``trtcb eval`` feeds to a plan: windows of a text, prompts, haystacks."""

import re
from importlib import resources
from pathlib import Path

import pytest

from trtcb.builder.byte_tokenizer import byte_level_assets
from trtcb.builder.presets import load_preset
from trtcb.errors import UsageError
from trtcb.evaluation.needle import ANSWERS, FACT, make_haystack
from trtcb.evaluation.text import cut_windows, read_text, shipped_prompts, shipped_text
from trtcb.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_assets(load_preset("tiny-random").spec))


class WithBos:
    """A tokenizer of a model that wants BOS before every text."""

    adds_bos, bos_token_id = True, 99


class Plain:
    """One of a model that wants nothing there."""

    adds_bos, bos_token_id = False, 99


@pytest.mark.parametrize(("window", "max_tokens"), [(4, 100), (4, 8), (4, 9), (100, 100), (1, 3)])
def test_every_token_is_scored_once_and_after_what_precedes_it(window: int, max_tokens: int) -> None:
    ids = list(range(20))
    windows = cut_windows(Plain(), ids, window=window, max_tokens=max_tokens)
    assert [t for w in windows for t in w.targets.tolist()] == ids[1 : 1 + max_tokens]
    for w in windows:
        assert len(w.inputs) == len(w.targets) <= window
        assert [token + 1 for token in w.inputs] == w.targets.tolist()


def test_windows_of_a_model_with_bos_begin_with_it() -> None:
    windows = cut_windows(WithBos(), list(range(10)), window=4, max_tokens=100)
    assert [w.inputs[0] for w in windows] == [99, 99, 99]
    assert [t for w in windows for t in w.targets.tolist()] == list(range(10))
    assert all([token + 1 for token in w.inputs[1:]] == w.targets.tolist()[1:] for w in windows)


def test_a_text_of_one_token_cannot_be_scored() -> None:
    with pytest.raises(UsageError, match="1 tokens, too few"):
        cut_windows(Plain(), [5], window=8, max_tokens=8)


def test_a_text_shorter_than_a_window_is_one_short_window() -> None:
    [window] = cut_windows(Plain(), [5, 6, 7], window=1024, max_tokens=8192)
    assert (window.inputs, window.targets.tolist()) == ([5, 6], [6, 7])


@pytest.mark.parametrize(("content", "message"), [(b" \n", "is empty"), (b"\xff\xfe", "not UTF-8")])
def test_a_text_file_of_no_use_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_text(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_text(tmp_path / "missing")


def test_shipped_prompts_that_are_chats_need_a_template(tokenizer: Tokenizer) -> None:
    prompts = shipped_prompts(tokenizer)
    assert "capital" in prompts
    assert ("chat_haiku" in prompts) == tokenizer.has_chat_template


@pytest.mark.parametrize("length", [2048, 4096])
def test_a_haystack_has_its_length_and_every_fact_at_its_depth(tokenizer: Tokenizer, length: int) -> None:
    haystack = make_haystack(tokenizer, shipped_text(), length)
    tail = max(map(len, haystack.questions.values())) + max(map(len, haystack.answers.values()))
    assert len(haystack.text) + tail == length
    text = tokenizer.decode(haystack.text)
    for name, word in ANSWERS.items():
        assert text.count(FACT.format(name=name, word=word)) == 1
        at = haystack.text[round(haystack.depths[name] * len(haystack.text)) :]
        assert tokenizer.decode(at).startswith(f"\n\nNote: the password of {name}")
    assert sorted(haystack.depths.values()) == list(haystack.depths.values())


def test_short_filler_is_repeated_and_too_short_a_haystack_refused(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(make_haystack(tokenizer, "hay ", 2048).text).count("hay") > 200
    with pytest.raises(UsageError, match="--no-needle"):
        make_haystack(tokenizer, "hay ", 300)


def test_the_shipped_text_is_named_and_free_of_what_does_not_belong_to_the_works() -> None:
    text, origin = shipped_text(), (resources.files("trtcb.evaluation") / "data" / "README.md").read_text("utf-8")
    assert text.startswith("The Lamplighter's Last Round")  # results and the golden file refer to its first tokens
    excerpts = re.findall(r"^(.+), (?:[^,\n]+) \([^()\n]*\b(1[89]\d\d)\)(?:, .*)?$", text, re.MULTILINE)
    assert len(excerpts) == 7
    for author, year in excerpts:
        assert re.search(rf"\| {author}\b.* \| {year} \|", origin), author
    assert not re.search(r"gutenberg|copyright|all rights reserved|http", text, re.IGNORECASE)
    assert 1.2e5 < len(text.encode()) < 1.6e5  # 30,000 to 40,000 tokens; an installed package stays small


def test_answers_are_distinct_words_that_the_filler_does_not_pair_with_names() -> None:
    assert len(set(ANSWERS.values())) == len(ANSWERS)
    assert "password" not in shipped_text()
