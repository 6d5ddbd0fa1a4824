"""The tokenizer that GGUF metadata describes, written as the ``tokenizers`` library's JSON.

Sources: llama.cpp's ``llama-vocab.cpp`` for what each key means, and the ``tokenizer.json`` files of the original
models.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import orjson

from trtcb.builder.gguf import GgufFile
from trtcb.builder.tokenizer_json import GPT2_SPLIT, bos_processor, bpe_document, byte_level_parts
from trtcb.errors import PlanError, UsageError
from trtcb.spec import ModelSpec
from trtcb.tokenizer import TokenizerAssets

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_MAX_PIECE_CHARACTERS = 512  # SentencePiece's own default is 16; without stored merges, every split is looked at

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> regular expressions; each splits the pieces the one before it left.
_DIGITS_FIRST = (r"\p{N}", GPT2_SPLIT)
_SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_FIRST),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat"), (GPT2_SPLIT,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx", "pixtral"), (_LLAMA3_SPLIT,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_QWEN2_SPLIT,)),
    "tekken": (_TEKKEN_SPLIT,),
}
# Vocabularies of these hold whole words that their merges do not reach; and llama.cpp adds BOS unless told otherwise.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
# llama.cpp ends a generation at these texts too when they are control tokens: chat models end a turn with one of them.
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>")
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def gguf_eos_ids(file: GgufFile) -> tuple[int, ...]:
    """Every id that ends a text: the file's end tokens, then control tokens known to end a turn."""
    named = [file.get(f"tokenizer.ggml.{key}_token_id", int, None) for key in ("eos", "eot", "eom")]
    tokens, kinds = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.token_type")
    ids = [value for value in named if value is not None]
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(kinds) == len(tokens):
        ids += [int(i) for i in np.flatnonzero(kinds == _CONTROL) if tokens[i] in _END_OF_TURN]
    return tuple(dict.fromkeys(ids))


def gguf_assets(file: GgufFile, spec: ModelSpec) -> TokenizerAssets:
    """Build the tokenizer; :class:`PlanError` for inconsistent metadata, :class:`UsageError` for unsupported ones."""
    vocabulary = _Vocabulary(file, spec)
    model = file.get("tokenizer.ggml.model", str, None)
    if model == "gpt2":
        document = _byte_level(vocabulary)
    elif model == "llama":
        document = _sentencepiece(vocabulary)
    else:
        raise UsageError(
            f"{file.path}: the tokenizer model {model!r} is not supported: choose a file with 'gpt2' or 'llama'."
        )
    special = {role: file.get(f"tokenizer.ggml.{key}_token_id", int, None) for role, key in _ROLES.items()}
    return TokenizerAssets(
        tokenizer_json=orjson.dumps(document),
        chat_template=file.get("tokenizer.chat_template", str, None),
        generation_config={"bos_token_id": spec.bos_token_id, "eos_token_id": list(spec.eos_token_ids)},
        special_tokens={
            role: vocabulary.tokens[index]
            for role, index in special.items()
            if index is not None and 0 <= index < len(vocabulary.tokens)
        },
    )


class _Vocabulary:
    """The ``tokenizer.ggml.*`` arrays, checked against each other and against the spec."""

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        self.file = file
        self.bos_token_id = spec.bos_token_id
        self.tokens = self.strings("tokens")
        if len(self.tokens) > spec.vocab_size:
            self.fail("tokens", f"has {len(self.tokens)} entries for an embedding of {spec.vocab_size} rows")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            self.fail("tokens", "holds the same token twice")
        self.kinds = self.numbers("token_type") if self.has("token_type") else np.ones(len(self.tokens), np.int32)

    def fail(self, key: str, reason: str) -> NoReturn:
        raise PlanError(
            f"{self.file.path}: metadata key 'tokenizer.ggml.{key}' {reason}; fetch or convert the file again."
        )

    def has(self, key: str) -> bool:
        return f"tokenizer.ggml.{key}" in self.file.metadata

    def strings(self, key: str) -> list[str]:
        value = self.file.get(f"tokenizer.ggml.{key}", list, None)
        return self.fail(key, "is missing") if value is None else value

    def numbers(self, key: str) -> npt.NDArray[Any]:
        """Return a numeric array with one entry for each token."""
        value = self.file.get(f"tokenizer.ggml.{key}", np.ndarray, None)
        if value is None or len(value) != len(self.tokens):
            self.fail(key, f"does not have one number for each of the {len(self.tokens)} tokens")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return self.file.get(f"tokenizer.ggml.{key}", bool, default)

    def added_tokens(self, special_kinds: Sequence[int]) -> list[dict[str, Any]]:
        """List the tokens matched whole in the text, before any splitting."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": int(index), "content": self.tokens[index], "special": bool(self.kinds[index] != _USER_DEFINED)}
            | plain
            for index in np.flatnonzero(np.isin(self.kinds, (*special_kinds, _USER_DEFINED)))
            if self.tokens[index]
        ]

    def bos_processor(self, default: bool) -> dict[str, Any] | None:
        """Return the post-processor that puts BOS in front, if the file wants that."""
        if self.bos_token_id is None or not self.flag("add_bos_token", default):
            return None
        if self.bos_token_id >= len(self.tokens):
            self.fail("bos_token_id", f"is {self.bos_token_id} in a vocabulary of {len(self.tokens)}")
        return bos_processor(self.tokens[self.bos_token_id], self.bos_token_id)


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    pre = vocabulary.file.get("tokenizer.ggml.pre", str, "default")
    if pre not in _SPLITS:
        raise UsageError(
            f"{vocabulary.file.path}: the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; "
            f"choose a file with one of {', '.join(_SPLITS)}."
        )
    whole_words = pre in _WHOLE_WORDS
    return bpe_document(
        vocabulary.ids,
        _stored_merges(vocabulary),
        added_tokens=vocabulary.added_tokens((_CONTROL,)),
        post_processor=vocabulary.bos_processor(default=whole_words),
        ignore_merges=whole_words,
        **byte_level_parts(_SPLITS[pre]),
    )


def _stored_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in vocabulary.strings("merges"):
        left, space, right = merge.partition(" ")
        if not space or left not in vocabulary.ids or right not in vocabulary.ids or left + right not in vocabulary.ids:
            vocabulary.fail("merges", f"holds {merge[:40]!r}, whose parts or result are not in the vocabulary")
        merges.append((left, right))
    return merges


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Describe SentencePiece BPE: spaces are U+2581, one goes in front of the text, unknown characters become bytes."""
    prefix = vocabulary.flag("add_space_prefix", default=True)
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    to_spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders: list[dict[str, Any]] = [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    unknown = np.flatnonzero(vocabulary.kinds == _UNKNOWN)
    if max(map(len, vocabulary.ids), default=0) > _MAX_PIECE_CHARACTERS:
        vocabulary.fail("tokens", f"holds a piece of more than {_MAX_PIECE_CHARACTERS} characters")
    return bpe_document(
        vocabulary.ids,
        _stored_merges(vocabulary)
        if vocabulary.has("merges")
        else merges_from_scores(vocabulary.ids, vocabulary.numbers("scores").tolist()),
        added_tokens=vocabulary.added_tokens((_CONTROL, _UNKNOWN)),
        normalizer={
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), to_marks],
        },
        post_processor=vocabulary.bos_processor(default=True),
        decoder={
            "type": "Sequence",
            "decoders": [*decoders, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else [])],
        },
        unk_token=vocabulary.tokens[unknown[0]] if len(unknown) else None,
        fuse_unk=True,
        byte_fallback=True,
    )


MAX_PIECE_CHARACTERS = 512  # SentencePiece's own default is 16; every split of a piece is looked at


def merges_from_scores(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merge list that orders pairs as SentencePiece does: by the score of the piece they form, best first.

    SentencePiece has no merge list; a pair may merge whenever the result is a piece. All splits of a piece are listed.
    """
    merges: list[tuple[float, int, int, int, int, int, str, str]] = []
    for piece, index in ids.items():
        score = float(scores[index])
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                merges.append((-score, -len(left), -len(right), index, ids[left], ids[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]
