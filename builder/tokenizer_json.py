"""Sections of the ``tokenizers`` library's JSON that several sources share. All tokenizers here are BPE."""

from collections.abc import Mapping, Sequence
from typing import Any

# GPT-2's splitting rule: contractions, words, numbers and symbols with the space before them.
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def bos_processor(token: str, token_id: int) -> dict[str, Any]:
    """Return the ``tokenizers`` post-processor that puts one token in front of a text."""
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", 1)))
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def bpe_document(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    added_tokens: Sequence[Mapping[str, Any]],
    decoder: Mapping[str, Any],
    normalizer: Mapping[str, Any] | None = None,
    pre_tokenizer: Mapping[str, Any] | None = None,
    post_processor: Mapping[str, Any] | None = None,
    **model: Any,
) -> dict[str, Any]:
    """Return a ``tokenizer.json`` with a BPE model; ``model`` overrides its settings, such as ``fuse_unk``."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added_tokens),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **model,
            "vocab": dict(vocab),
            "merges": list(merges),
        },
    }


def byte_level_parts(splits: Sequence[str]) -> dict[str, Any]:
    """Return the pre-tokenizer and decoder of byte-level BPE with these split expressions."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in splits
    ]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, byte_level]}, "decoder": byte_level}
