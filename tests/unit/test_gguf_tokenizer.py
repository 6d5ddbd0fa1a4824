import random
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from tests.unit.tiny_gguf import SPEC, write_tiny
from trtcb.builder.gguf_checkpoint import GgufCheckpoint
from trtcb.builder.gguf_tokenizer import merges_from_scores
from trtcb.errors import PlanError, UsageError
from trtcb.tokenizer import Tokenizer

PIECES = ["▁the", "▁t", "he", "▁th", "er", "re", "▁there", "▁a", "an", "▁an", "nt", "ant", "▁▁", "▁▁▁▁", "in", "ing"]
LETTERS = ["▁", *"abcdefghinrst"]


def spm_vocabulary():
    """A SentencePiece vocabulary as llama.cpp stores it: specials, bytes, pieces by falling score, letters last."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *LETTERS, "<tool>"]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES) + len(LETTERS))] + [0.0]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) + len(LETTERS)) + [4]
    return tokens, scores, kinds


def spm_metadata(**overrides):
    tokens, scores, kinds = spm_vocabulary()
    keys = {
        "model": "llama", "pre": None, "tokens": tokens, "scores": scores, "token_type": kinds, "merges": None,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **overrides,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def spm_encode(text):
    """SentencePiece's own algorithm, slowly: join the adjacent pair whose result scores best, leftmost first."""
    tokens, scores, kinds = spm_vocabulary()
    score = {token: scores[i] for i, token in enumerate(tokens) if kinds[i] == 1}
    pieces = list(("▁" + text).replace(" ", "▁"))
    while True:
        pairs = [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in score]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids = {token: i for i, token in enumerate(tokens)}
    return [i for piece in pieces for i in ([ids[piece]] if piece in score else [3 + byte for byte in piece.encode()])]


def tokenizer_of(tmp_path, **metadata):
    return Tokenizer(GgufCheckpoint(write_tiny(tmp_path / "t.gguf", **metadata)).assets)


def test_sentencepiece_agrees_with_its_own_algorithm(tmp_path):
    tokenizer = tokenizer_of(tmp_path, **spm_metadata())
    rng = random.Random(1)
    texts = ["there is an ant", " the", "  a  ", "", "x", "thé 日本\n", "▁", "a" * 50]
    texts += ["".join(rng.choice("abcdefghinrst   xé日") for _ in range(rng.randrange(30))) for _ in range(300)]
    for text in texts:
        wanted = spm_encode(text) if text else []
        assert tokenizer.encode(text, add_special_tokens=False) == wanted, text
        assert tokenizer.encode(text) == [1, *wanted], text
        assert tokenizer.decode(wanted) == text.replace("▁", " "), text


def test_sentencepiece_prefix_and_bos_follow_the_flags(tmp_path):
    tokenizer = tokenizer_of(tmp_path, **spm_metadata(add_bos_token=False, add_space_prefix=False))
    the, prefixed = (tokenizer.token_to_id(token) for token in ("he", "▁the"))
    assert tokenizer.encode("he") == [the]
    assert tokenizer.encode(" the") == [prefixed]
    assert tokenizer.decode([prefixed]) == " the"
    assert not tokenizer.adds_bos


def test_special_and_user_defined_tokens_stay_whole(tmp_path):
    tokenizer = tokenizer_of(tmp_path, **spm_metadata())
    tool = tokenizer.token_to_id("<tool>")
    assert tokenizer.encode("the</s><tool>", add_special_tokens=False)[-2:] == [2, tool]
    assert tokenizer.decode([2, tool]) == "<tool>"  # a user-defined token is text, a control token is not


def test_derived_merges_agree_with_transformers():
    generate = pytest.importorskip("transformers.tokenization_utils_base").generate_merges
    tokens, scores, _ = spm_vocabulary()
    ids = {token: i for i, token in enumerate(tokens)}
    rng = np.random.default_rng(0)
    for values in (scores, rng.integers(-9, 0, len(tokens)).astype(float).tolist()):  # the second has many ties
        assert merges_from_scores(ids, values) == generate(ids, dict(zip(tokens, values, strict=True)))


TEXTS = [
    "Hello, world! It's 12345 degrees; isn't IT'S?", "a  b   c\t\td\n\n  e \r\n f", "x=1+22-333*4444/55555",
    "日本語とEnglish。", "ｆｕｌｌ ½ ²³ ٣٤ Ⅷ", "naïve café — “quotes”…", "🦙🦙 emoji👩‍👩‍👧", "don't DON'T don’t",
    "   leading", "trailing   ", "\n\n\n", "C++ != C#; a_b->c::d", "100,000.00$ <tag attr='v'/> ^~|`", "",
]  # fmt: skip


def gpt2_pieces(tmp_path, pre):
    """How the text is cut before merging, spelled in the byte alphabet."""
    tokenizer = tokenizer_of(tmp_path, **{"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False})
    inner = tokenizers.Tokenizer.from_buffer(GgufCheckpoint(tmp_path / "t.gguf").assets.tokenizer_json)
    return tokenizer, lambda text: [piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str(text)]


def test_smollm_splits_digits_first_as_its_published_tokenizer(tmp_path):
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer, pieces = gpt2_pieces(tmp_path, "smollm")
    for text in TEXTS:
        assert pieces(text) == [piece for piece, _ in published.pre_tokenize_str(text)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gpt2_splits_as_the_library_does(tmp_path):
    published = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _, pieces = gpt2_pieces(tmp_path, "gpt-2")
    for text in TEXTS:
        assert pieces(text) == [piece for piece, _ in published.pre_tokenize_str(text)], text


@pytest.mark.parametrize(
    ("pre", "text", "wanted"),
    [
        ("llama-bpe", "IT'S 12345", ["IT", "'S", "Ġ", "123", "45"]),
        ("llama-bpe", "a\n\n b", ["a", "ĊĊ", "Ġb"]),
        ("qwen2", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("smollm", "a 12\n\n 5", ["a", "Ġ", "1", "2", "ĊĊĠ", "5"]),
        ("gpt-2", "a 12\n\n 5", ["a", "Ġ12", "ĊĊ", "Ġ5"]),
        ("default", "a 12345<b>", ["a", "Ġ", "123", "45", "<", "b", ">"]),
        ("tekken", "CamelCase 12", ["Camel", "Case", "Ġ", "1", "2"]),
    ],
)
def test_pre_tokenizers_split_as_llama_cpp_does(tmp_path, pre, text, wanted):
    assert gpt2_pieces(tmp_path, pre)[1](text) == wanted


def test_an_absent_pre_tokenizer_is_llama_cpps_default(tmp_path):
    assert gpt2_pieces(tmp_path, None)[1]("a 12345<b>") == ["a", "Ġ", "123", "45", "<", "b", ">"]


def test_llama_3_files_add_bos_and_know_whole_words(tmp_path):
    tokens = GgufCheckpoint(write_tiny(tmp_path / "a.gguf"))._file.metadata["tokenizer.ggml.tokens"]
    keys = {
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*tokens, "Ġhello", "<|eot_id|>"],
        "tokenizer.ggml.token_type": [3, 3, *[1] * 258, 3],
    }
    checkpoint = GgufCheckpoint(write_tiny(tmp_path / "t.gguf", **keys))
    tokenizer = Tokenizer(checkpoint.assets)
    assert tokenizer.encode(" hello") == [0, tokenizer.token_to_id("Ġhello")]  # no merge leads to it
    assert checkpoint.spec.eos_token_ids == (1, 260)


@pytest.mark.parametrize(
    ("metadata", "error", "named"),
    [
        ({"tokenizer.ggml.model": None}, UsageError, "tokenizer model None"),
        ({"tokenizer.ggml.model": "bert"}, UsageError, "'bert'"),
        ({"tokenizer.ggml.pre": "bloom"}, UsageError, "'bloom'"),
        ({"tokenizer.ggml.tokens": None}, PlanError, "tokens"),
        ({"tokenizer.ggml.tokens": [1, 2, 3]}, PlanError, "tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * 259}, PlanError, "twice"),
        ({"tokenizer.ggml.tokens": [f"t{i}" for i in range(301)]}, PlanError, "301 entries"),
        ({"tokenizer.ggml.token_type": [1, 1]}, PlanError, "token_type"),
        ({"tokenizer.ggml.merges": None}, PlanError, "merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, PlanError, "'ab'"),
        ({"tokenizer.ggml.merges": ["a zz"]}, PlanError, "'a zz'"),
        ({"tokenizer.ggml.add_bos_token": 1}, PlanError, "add_bos_token"),
        ({"tokenizer.ggml.bos_token_id": 299, "tokenizer.ggml.add_bos_token": True}, PlanError, "bos_token_id"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}, PlanError, "scores"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["x" * 513, *map(str, range(258))]},
            PlanError,
            "512 characters",
        ),
    ],
)
def test_broken_tokenizers_are_refused_by_name(tmp_path, metadata, error, named):
    with pytest.raises(error, match=named):
        _ = GgufCheckpoint(write_tiny(tmp_path / "bad.gguf", **metadata)).assets


def test_chat_template_and_special_texts_come_along(tmp_path):
    path = write_tiny(tmp_path / "t.gguf", **{"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"})
    assets = GgufCheckpoint(path).assets
    assert assets.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert Tokenizer(assets).apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi"
    assert assets.generation_config == {"bos_token_id": SPEC.bos_token_id, "eos_token_id": list(SPEC.eos_token_ids)}
