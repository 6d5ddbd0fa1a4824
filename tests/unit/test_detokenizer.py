"""Incremental text equals the text of everything at once, for both families of tokenizers; stop strings cut exactly."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from trtcb.executor.detokenizer import Detokenizer, StopMatcher, TextOutput
from trtcb.tokenizer import Tokenizer, TokenizerAssets

TEXTS = [
    "Hello, world!",
    "naïve café über",
    "日本語のテキストです。",
    "emoji 👩‍👩‍👧‍👦 and 🇩🇪!",
    "  two  spaces ",
    "a\n\n b\t",
    "नमस्ते",
]


class Counting:
    """Counts the tokens that a decoder is asked for."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.num_tokens = 0

    def decode(self, ids):
        ids = list(ids)
        self.num_tokens += len(ids)
        return self.decoder.decode(ids)


def byte_level() -> tuple[Tokenizer, int]:
    """Tokens are strings of bytes: all single bytes, and pairs that straddle characters. The last id is special."""
    alphabet = sorted(ByteLevel.alphabet())
    rng = random.Random(1)
    pairs = sorted({a + b for a, b in (rng.sample(alphabet, 2) for _ in range(200))})
    vocab = {token: index for index, token in enumerate([*alphabet, *pairs])}
    tokenizer = HfTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return Tokenizer(TokenizerAssets(tokenizer.to_str().encode())), len(vocab)


def sentencepiece() -> tuple[Tokenizer, dict[str, int]]:
    """Llama-2 style: ``▁`` for spaces, byte tokens as the fallback, one leading space stripped."""
    pieces = ["<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁Hello", "▁world", ",", "!", "a", "▁a", "b"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = HfTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(TokenizerAssets(tokenizer.to_str().encode())), vocab


BYTES, SPECIAL = byte_level()
SPM, SPM_VOCAB = sentencepiece()
BYTE_IDS = {BYTES.id_to_token(i): i for i in range(256)}


def byte_tokens(text: str) -> list[int]:
    """Ids of the single bytes of ``text``."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in printable}
    table |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in table)}
    return [BYTE_IDS[table[b]] for b in text.encode()]


def spm_tokens(*parts: "str | bytes") -> list[int]:
    ids = []
    for part in parts:
        ids += [SPM_VOCAB[f"<0x{b:02X}>"] for b in part] if isinstance(part, bytes) else [SPM_VOCAB[part]]
    return ids


def stream(decoder, prompt, output) -> list[str]:
    detokenizer = Detokenizer(decoder, prompt)
    pieces = [detokenizer.push(token) for token in output]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "Prompt: ", "é"])
def test_byte_level_text_comes_whole_and_never_in_halves(text, prompt):
    pieces = stream(BYTES, byte_tokens(prompt), byte_tokens(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.lists(st.integers(0, SPECIAL), max_size=8),
    output=st.lists(st.integers(0, SPECIAL), max_size=70),
)
@example(prompt=[], output=[255] * 100)
@example(prompt=[], output=[SPECIAL] * 100)
def test_any_byte_level_tokens_give_the_text_of_everything_at_once(prompt, output):
    before = BYTES.decode(prompt)
    at_once = BYTES.decode(prompt + output)
    text = "".join(stream(BYTES, prompt, output))
    if at_once.startswith(before):
        assert text == at_once[len(before) :]
    else:  # the output completes the prompt's last character, which then is new text as a whole
        assert text == at_once[len(before.rstrip("\ufffd")) :]


def test_a_prompt_that_ends_in_half_a_character_is_not_sent_again():
    half, rest = byte_tokens("x😀")[:3], byte_tokens("x😀")[3:]
    assert "".join(stream(BYTES, half, rest + byte_tokens("!"))) == "😀!"
    assert "".join(stream(BYTES, half, byte_tokens("b!"))) == "b!"


@pytest.mark.parametrize("length", range(1, 14))
def test_a_prompt_is_cut_for_context_without_splitting_characters(length):
    tokens = byte_tokens("a😀字😀é字😀 rest of it")
    prompt, output = tokens[:length], tokens[length:]
    whole = BYTES.decode(prompt).rstrip("\ufffd")
    assert whole + "".join(stream(BYTES, prompt, output)) == "a😀字😀é字😀 rest of it"


def test_byte_tokens_of_sentencepiece_run_on_for_ever():
    text = "字😀é" * 40  # one run of byte tokens, which is decoded whole or not at all
    assert "".join(stream(SPM, spm_tokens("<s>", "▁Hello"), spm_tokens(text.encode()))) == text


def test_half_a_character_at_the_end_is_shown_as_such():
    assert stream(BYTES, [], byte_tokens("a😀")[:-1]) == ["a", "", "", "", "\ufffd"]


def test_a_character_is_sent_with_the_token_that_completes_it():
    assert stream(BYTES, [], byte_tokens("é😀")) == ["", "é", "", "", "", "😀", ""]


def test_characters_that_straddle_every_token_are_still_right():
    text = "漢字" * 30
    data = byte_tokens(text)
    # Tokens of two bytes over characters of three: most boundaries split a character.
    joined = [tuple(data[i : i + 2]) for i in range(0, len(data), 2)]

    class Pairs:
        def decode(self, ids):
            return BYTES.decode([token for index in ids for token in joined[index]])

    pieces = stream(Pairs(), [], range(len(joined)))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_sentencepiece_keeps_the_space_between_prompt_and_output_and_between_tokens():
    prompt = spm_tokens("<s>", "▁Hello")
    assert stream(SPM, prompt, spm_tokens("▁world", "!", "▁a")) == [" world", "!", " a", ""]
    assert stream(SPM, spm_tokens("<s>"), spm_tokens("▁Hello", "▁world")) == ["Hello", " world", ""]
    assert "".join(stream(SPM, spm_tokens("<s>"), spm_tokens("▁", "▁Hello"))) == " Hello"


def test_a_special_token_in_between_does_not_swallow_a_space():
    output = spm_tokens("▁Hello", *["</s>"] * 30, "▁world", "</s>", "▁a")
    pieces = stream(SPM, spm_tokens("<s>"), output)
    assert "".join(pieces) == "Hello world a"
    assert pieces[31] == " world"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_valid_sentencepiece_text_comes_as_at_once(data):
    parts = data.draw(
        st.lists(
            st.sampled_from(["▁Hello", "▁world", ",", "▁", "▁a", "b", "</s>", *(t.encode() for t in "é😀字x")]),
            max_size=60,
        )
    )
    prompt, output = spm_tokens("<s>", "▁Hello"), spm_tokens(*parts)
    pieces = stream(SPM, prompt, output)
    assert "".join(pieces) == SPM.decode(prompt + output)[len("Hello") :]


@pytest.mark.parametrize(
    "output", [byte_tokens("word ") * 400, [255] * 2000, [SPECIAL] * 2000, byte_tokens("漢字") * 300]
)
def test_the_cost_of_a_token_does_not_grow(output):
    counting = Counting(BYTES)
    detokenizer = Detokenizer(counting, byte_tokens("prompt") * 1000)
    for token in output:
        detokenizer.push(token)
    assert counting.num_tokens < 45 * len(output)


class TestStopMatcher:
    def feed(self, stops, pieces):
        matcher = StopMatcher(stops)
        sent = []
        for piece in pieces:
            text, found = matcher.push(piece)
            sent.append(text)
            if found:
                return sent, True
        return [*sent, matcher.flush()], False

    def test_text_before_the_stop_is_kept_and_the_stop_itself_is_not(self):
        assert self.feed(["STOP"], ["abSTOPcd"]) == (["ab"], True)

    def test_a_possible_beginning_is_held_until_it_is_decided(self):
        assert self.feed(["STOP"], ["abS", "T", "OP", "x"]) == (["ab", "", ""], True)
        assert self.feed(["STOP"], ["abS", "T", "ILL"]) == (["ab", "", "STILL", ""], False)
        assert self.feed(["STOP"], ["ab", "ST"]) == (["ab", "", "ST"], False)

    def test_only_the_undecided_end_is_held(self):
        assert self.feed(["aab"], ["aaa", "c"]) == (["a", "aac", ""], False)
        assert self.feed(["aab"], ["aaab"]) == (["a"], True)

    def test_the_first_complete_match_wins_and_the_longest_of_those(self):
        assert self.feed(["bc", "abcd"], ["xabcd"]) == (["xa"], True)
        assert self.feed(["bc", "abc"], ["xabc"]) == (["x"], True)
        assert self.feed(["cd", "b"], ["abcd"]) == (["a"], True)

    @settings(max_examples=500, deadline=None)
    @given(
        stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
        pieces=st.lists(st.text("abc", max_size=6), max_size=12),
    )
    def test_where_pieces_break_makes_no_difference(self, stops, pieces):
        text = "".join(pieces)
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        want = (text[: min(ends)[1]], True) if ends else (text, False)
        for way in (pieces, list(text), [text]):
            sent, found = self.feed(stops, way)
            assert ("".join(sent), found) == want

    def test_nothing_is_held_that_cannot_become_a_stop(self):
        matcher = StopMatcher(["xyz"])
        assert [matcher.push(c)[0] for c in "abxab"] == ["a", "b", "", "xa", "b"]


class TestTextOutput:
    def push_all(self, output, tokens):
        sent = []
        for token in tokens:
            text, found = output.push(token)
            sent.append(text)
            if found:
                return "".join(sent), True
        text, found = output.finish()
        return "".join([*sent, text]), found

    def test_a_stop_string_across_tokens_and_half_characters(self):
        output = TextOutput(BYTES, [], ["é!"])
        assert self.push_all(output, byte_tokens("café!rest")) == ("caf", True)

    def test_the_first_tokens_may_be_exempt_from_stop_strings(self):
        tokens = byte_tokens("abxabx")
        assert self.push_all(TextOutput(BYTES, [], ["bx"], num_exempt_tokens=2), tokens) == ("abxa", True)
        assert self.push_all(TextOutput(BYTES, [], ["bx"], num_exempt_tokens=6), tokens) == ("abxabx", False)

    def test_without_stops_everything_comes(self):
        assert self.push_all(TextOutput(BYTES, [], []), byte_tokens("café!")) == ("café!", False)

    def test_the_end_releases_what_was_held(self):
        assert self.push_all(TextOutput(BYTES, [], ["!!"]), byte_tokens("a!")) == ("a!", False)

    def test_a_stop_that_the_flush_completes_counts(self):
        output = TextOutput(BYTES, [], ["a\ufffd"])
        assert self.push_all(output, byte_tokens("xaé")[:-1]) == ("x", True)
