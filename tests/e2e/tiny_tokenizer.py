"""A real tokenizer small enough to build in a test: one token a byte, and three special ones."""

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from trtcb.tokenizer import Tokenizer, TokenizerAssets

BOS, EOS = 256, 257
VOCAB_SIZE = 259
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_assets(chat_template: str | None = TEMPLATE) -> TokenizerAssets:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    return TokenizerAssets(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=chat_template,
        generation_config={"bos_token_id": BOS, "eos_token_id": [EOS]},
        special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
    )


def tiny_tokenizer(chat_template: str | None = TEMPLATE) -> Tokenizer:
    return Tokenizer(tiny_assets(chat_template))
