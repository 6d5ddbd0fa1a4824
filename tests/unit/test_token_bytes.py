"""Bytes of single tokens, in both spellings of vocabularies."""

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from trtcb.token_bytes import TokenBytes


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate([*alphabet, "Ġt"])}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(["日本"])
    return tokenizer


def sentence_piece() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "\u2581": 1, "a": 2, "\u2581a": 3, "é": 4} | {f"<0x{i:02X}>": 5 + i for i in range(256)}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[("\u2581", "a")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def test_byte_level_tokens_add_up_to_the_text():
    tokenizer = byte_level()
    token_bytes = TokenBytes(tokenizer)
    text = "the tea \n\t\x00 naïve 👩‍👩‍👧 \u00ad\u00a0 日本 <end>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.token_to_id("Ġt") in ids
    assert b"".join(token_bytes(token) for token in ids) == text.encode()
    assert {token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}


def test_sentence_piece_tokens():
    tokenizer = sentence_piece()
    token_bytes = TokenBytes(tokenizer)
    assert token_bytes(3) == b" a"
    assert token_bytes(4) == "é".encode()
    assert [token_bytes(5 + i) for i in range(256)] == [bytes([i]) for i in range(256)]
    ids = tokenizer.encode("日").ids
    assert b"".join(token_bytes(token) for token in ids) == "日".encode()


def test_ids_outside_the_vocabulary_have_no_bytes():
    assert TokenBytes(byte_level())(10_000) == b""
