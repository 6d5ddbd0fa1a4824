"""The text that is scored: the project's own or the user's, cut into windows that share nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from trtcb.errors import UsageError
from trtcb.executor.runtime import Int32
from trtcb.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens to feed from position 0, and the token that follows each of them in the text."""

    inputs: list[int]
    targets: Int32


def shipped_text() -> str:
    """About 33,000 tokens of English; ``data/README.md`` says where they are from.

    The first 13,000 are prose, dialogue, lists, figures and code of this project's own, the others public-domain prose.
    """
    return _data("eval.txt")


def shipped_prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Token ids of the project's prompts by name; without a chat template, of the plain ones alone."""
    prompts: dict[str, list[int]] = {}
    for prompt in json.loads(_data("prompts.json")):
        if "text" in prompt:
            prompts[prompt["name"]] = tokenizer.encode(prompt["text"])
        elif tokenizer.has_chat_template:
            prompts[prompt["name"]] = tokenizer.encode_chat(prompt["messages"])
    return {name: ids for name, ids in prompts.items() if ids}


def read_text(path: Path) -> str:
    """The contents of a UTF-8 file; raises ``UsageError`` if it is missing, of another kind or blank."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--text {path} cannot be read ({error.strerror or error}): name a text file") from None
    except UnicodeDecodeError:
        raise UsageError(f"--text {path} is not UTF-8: convert it, or name another text file") from None
    if not text.strip():
        raise UsageError(f"--text {path} is empty: name a file with text to score")
    return text


def cut_windows(tokenizer: Tokenizer, ids: Sequence[int], *, window: int, max_tokens: int) -> list[Window]:
    """Windows of ``window`` scored tokens, the last one shorter, at most ``max_tokens`` in all.

    ``ids`` are without special tokens; where the model wants BOS, every window begins with it. Raises ``UsageError`` if
    there is nothing to score.
    """
    lead = [tokenizer.bos_token_id] if tokenizer.adds_bos and tokenizer.bos_token_id is not None else []
    stream = list(ids)
    first = 0 if lead else 1  # a token with nothing before it cannot be scored
    end = min(len(stream), first + max_tokens)
    windows = []
    for begin in range(first, end, window):
        stop = min(begin + window, end)
        inputs = [*lead, *stream[begin : stop - 1]] if lead else stream[begin - 1 : stop - 1]
        windows.append(Window(inputs, np.array(stream[begin:stop], np.int32)))
    if not windows:
        raise UsageError(f"the text has {len(stream)} tokens, too few to score: give a longer one with --text")
    return windows


def _data(name: str) -> str:
    return (resources.files("trtcb.evaluation") / "data" / name).read_text(encoding="utf-8")
