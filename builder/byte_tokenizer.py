"""A byte-level BPE tokenizer built in code for any vocabulary size: what a model of random weights is served with."""

import orjson

from trtcb.builder.tokenizer_json import GPT2_SPLIT, bos_processor, bpe_document, byte_level_parts
from trtcb.errors import UsageError
from trtcb.spec import ModelSpec
from trtcb.tokenizer import TokenizerAssets

_TURN_START, _TURN_END = "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Words whose prefixes become tokens, so that a token is now and then longer than a byte, as in a trained vocabulary.
_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were her all she there would their we him been has when who will more no if out so said what up its about into than
them can only other new some could time these two may then do first any my now such like our over man me even most
made after also did many before must through back years where much your way well down should because each just those
people how too little state good very make world still own see men work long get here between both life being under
never day same another know while last
"""


def byte_level_assets(spec: ModelSpec) -> TokenizerAssets:
    """Return a tokenizer of exactly ``spec.vocab_size`` entries: bytes, pieces of English words, special ids, fillers.

    Every text round-trips; ids the words leave over are spelled ``<|id|>``. Raises :class:`UsageError` for less than
    260 entries.
    """
    special = _special_tokens(spec)
    free = [index for index in range(min(spec.vocab_size, 4096)) if index not in special.values()]
    if len(free) < 258:
        raise UsageError(f"A byte-level tokenizer needs a vocabulary of at least 260 entries, not {spec.vocab_size}.")
    for token in (_TURN_START, _TURN_END):
        special[token] = free.pop(0)
    vocab = dict(zip(_byte_alphabet(), free, strict=False))
    merges: list[tuple[str, str]] = []
    for left, right in _word_merges(set(vocab)):
        if len(vocab) == len(free):
            break
        vocab[left + right] = free[len(vocab)]
        merges.append((left, right))
    used = {*vocab.values(), *special.values()}
    vocab |= {f"<|{index}|>": index for index in range(spec.vocab_size) if index not in used}
    bos = next((token for token, index in special.items() if index == spec.bos_token_id), None)
    eos = next(
        (token for token, index in special.items() if spec.eos_token_ids and index == spec.eos_token_ids[0]), None
    )
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = bpe_document(
        {**vocab, **special},
        merges,
        added_tokens=[
            {"id": index, "content": token, **plain}
            for token, index in sorted(special.items(), key=lambda item: item[1])
        ],
        post_processor=None if bos is None else bos_processor(bos, special[bos]),
        **byte_level_parts((GPT2_SPLIT,)),
    )
    return TokenizerAssets(
        tokenizer_json=orjson.dumps(document),
        chat_template=_CHAT_TEMPLATE,
        generation_config={"bos_token_id": spec.bos_token_id, "eos_token_id": list(spec.eos_token_ids)},
        special_tokens={role: token for role, token in (("bos_token", bos), ("eos_token", eos)) if token is not None},
    )


def _special_tokens(spec: ModelSpec) -> dict[str, int]:
    special = {} if spec.bos_token_id is None else {"<|bos|>": spec.bos_token_id}
    for position, index in enumerate(spec.eos_token_ids):
        if index not in special.values():
            special["<|eos|>" if position == 0 else f"<|eos_{position}|>"] = index
    return special


def _byte_alphabet() -> list[str]:
    """Return the printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _word_merges(known: set[str]) -> list[tuple[str, str]]:
    """Pairs that grow each word letter by letter, then put a space (``Ġ``) in front; each result appears once."""
    merges: list[tuple[str, str]] = []
    for word in _WORDS.split():
        pairs = [*((word[:cut], word[cut]) for cut in range(1, len(word))), ("Ġ", word)]
        for left, right in pairs:
            if left + right not in known:
                known.add(left + right)
                merges.append((left, right))
    return merges
