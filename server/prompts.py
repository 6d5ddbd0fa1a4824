"""From a request's ``prompt`` or ``messages`` to token ids."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeVar

from trtcb.server.errors import invalid
from trtcb.server.schemas import ChatMessage

if TYPE_CHECKING:
    from trtcb.tokenizer import Tokenizer

T = TypeVar("T")
TokenIds = tuple[int, ...]


def completion_prompts(
    prompt: Any, tokenizer: "Tokenizer", *, vocab_size: int, max_prompts: int, max_seq_len: int
) -> list[TokenIds]:
    """Return all prompts of a call: a text, texts, token ids, or lists of token ids. Raises a 400 for anything else."""
    if isinstance(prompt, str):
        return _encode([prompt], tokenizer, max_seq_len)
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt must be a text, a list of texts, token ids, or a list of lists of token ids.", "prompt")
    if isinstance(prompt[0], int):
        return [_token_ids(prompt, vocab_size)]
    if len(prompt) > max_prompts:
        raise invalid(f"prompt has {len(prompt)} entries; at most {max_prompts} fit in one call.", "prompt")
    if all(isinstance(item, str) for item in prompt):
        return _encode(prompt, tokenizer, max_seq_len)
    return [_token_ids(item, vocab_size) for item in prompt]


def chat_prompt(messages: Sequence[ChatMessage], tokenizer: "Tokenizer", *, max_seq_len: int) -> TokenIds:
    """Encode a conversation through the model's chat template, which writes its own special tokens."""
    num_chars = sum(len(part.text) for message in messages for part in message.content)
    _refuse_hopeless(num_chars, tokenizer, max_seq_len, "messages")
    return tuple(tokenizer.encode_chat([message.as_template_input() for message in messages]))


async def offload(pool: Executor, function: Callable[[], T], *, size: int, threshold: int) -> T:
    """Run ``function`` here if its input is small, else in ``pool``: one long text must not stall every stream."""
    if size <= threshold:
        return function()
    return await asyncio.get_running_loop().run_in_executor(pool, function)


def _refuse_hopeless(num_chars: int, tokenizer: "Tokenizer", max_seq_len: int, param: str) -> None:
    """Spare a text that cannot fit the seconds it would take to tokenise it. A character is at least a byte."""
    if num_chars > max_seq_len * tokenizer.longest_token:
        raise invalid(
            f"{param} has {num_chars} characters, which cannot fit in the {max_seq_len} tokens a request may have.",
            param,
            "context_length_exceeded",
        )


def _encode(texts: list[str], tokenizer: "Tokenizer", max_seq_len: int) -> list[TokenIds]:
    for text in texts:
        _refuse_hopeless(len(text), tokenizer, max_seq_len, "prompt")
    # Checked before encoding: a tokenizer that adds BOS makes one token of no text.
    prompts = [tuple(ids) for ids in tokenizer.encode_batch(texts)] if all(texts) else []
    if not prompts or not all(prompts):
        raise invalid("prompt is empty.", "prompt")
    return prompts


def _token_ids(ids: Any, vocab_size: int) -> TokenIds:
    if not isinstance(ids, list) or not ids:
        raise invalid("prompt must hold texts or non-empty lists of token ids, not a mixture.", "prompt")
    for token in ids:
        if type(token) is not int:  # a bool is an int to isinstance
            raise invalid("prompt mixes token ids with something else; token ids are whole numbers.", "prompt")
        if not 0 <= token < vocab_size:
            raise invalid(f"A token id of prompt lies outside the vocabulary of {vocab_size}.", "prompt")
    return tuple(ids)
