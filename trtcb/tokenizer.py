"""Text to token ids and back, from what a plan carries: the ``tokenizers`` library and a chat template."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tokenizers

from trtcb.errors import PlanError, RequestError
from trtcb.token_bytes import TokenBytes

if TYPE_CHECKING:
    from trtcb.chat_template import ChatTemplate, Message


@dataclass(frozen=True, slots=True)
class TokenizerAssets:
    """What a checkpoint knows about text, and what a plan stores of it.

    ``tokenizer_json`` is the file format of the ``tokenizers`` library; whether it adds BOS is part of it (its
    post-processor). ``generation_config`` always has ``bos_token_id`` (an id or None) and ``eos_token_id`` (a list,
    every id that ends a text). ``special_tokens`` are the texts a chat template reaches by name: ``bos_token``,
    ``eos_token``, ``unk_token``, ``pad_token``.
    """

    tokenizer_json: bytes
    chat_template: str | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)

    def config_json(self) -> bytes:
        """Everything but ``tokenizer_json``, as the plan's ``tokenizer_config`` section."""
        return json.dumps(
            {
                "chat_template": self.chat_template,
                "generation_config": self.generation_config,
                "special_tokens": self.special_tokens,
            },
            sort_keys=True,
        ).encode()

    @staticmethod
    def from_sections(tokenizer: "bytes | memoryview", config: "bytes | memoryview") -> "TokenizerAssets":
        """Inverse of storing ``tokenizer_json`` and :meth:`config_json`; raises :class:`PlanError` on foreign data."""
        try:
            data = json.loads(bytes(config))
            return TokenizerAssets(
                tokenizer_json=bytes(tokenizer),
                chat_template=data["chat_template"],
                generation_config=dict(data["generation_config"]),
                special_tokens=dict(data.get("special_tokens", {})),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlanError("The plan's section 'tokenizer_config' is not readable: rebuild the plan.") from error


class Tokenizer:
    """A model's tokenizer. Immutable after construction and safe to use from several threads at once.

    Raises :class:`PlanError` if the assets are not a tokenizer.
    """

    def __init__(self, assets: TokenizerAssets) -> None:
        self._tokenizer = _load(assets.tokenizer_json)
        self._assets = assets
        self._template: ChatTemplate | None = None
        self.bos_token_id: int | None = assets.generation_config.get("bos_token_id")
        self.eos_token_ids: frozenset[int] = _eos_ids(assets.generation_config)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        start = self._tokenizer.encode("", add_special_tokens=True).ids[:1]
        self.token_bytes = TokenBytes(self._tokenizer)
        self.adds_bos: bool = self.bos_token_id is not None and start == [self.bos_token_id]

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest vocabulary entry, and so an upper bound on the text that one token stands for."""
        return max(len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`apply_chat_template` can work."""
        return self._assets.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids; ``add_special_tokens`` adds BOS if the model wants one and ``text`` has not got it."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """:meth:`encode` for many texts in one call, spread over the library's threads."""
        try:
            with _contained("this text"):
                encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # the library raises either, by its version
            raise RequestError(
                "The text holds half of a surrogate pair, which is not a character: send valid Unicode."
            ) from error
        ids = [list(encoding.ids) for encoding in encodings]
        if add_special_tokens and self.adds_bos:
            # A rendered chat prompt already starts with BOS; models were never trained on two.
            ids = [row[1:] if row[1:2] == [self.bos_token_id] else row for row in ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return text; bytes that are no complete UTF-8 become U+FFFD, ids outside the vocabulary become nothing."""
        with _contained("these tokens"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        """Id of one vocabulary entry, spelled as in the vocabulary; None if there is none such."""
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Vocabulary spelling of an id; None if it is outside the vocabulary."""
        return self._tokenizer.id_to_token(token_id)

    def apply_chat_template(
        self, messages: "Sequence[Message]", *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render ``messages`` to the prompt text. Raises :class:`RequestError` without a template, or if it objects."""
        if self._template is None:
            if self._assets.chat_template is None:
                raise RequestError(
                    "This model has no chat template: send a plain prompt to /v1/completions, or build a chat model.",
                    param="messages",
                )
            from trtcb.chat_template import (
                ChatTemplate,
            )  # Jinja is a sixth of a second that plain completions never need

            self._template = ChatTemplate(self._assets.chat_template, self._assets.special_tokens)
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(
        self, messages: "Sequence[Message]", *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of the rendered ``messages``. The template alone decides about BOS, as in ``transformers``."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)


@contextmanager
def _contained(what: str) -> Iterator[None]:
    """Turn a failure of the library into a :class:`RequestError`; its panics, which are no ``Exception``, too."""
    try:
        yield
    except (RequestError, KeyboardInterrupt, SystemExit, UnicodeError, TypeError):
        raise
    except BaseException as error:
        raise RequestError(f"The model's tokenizer cannot handle {what}: {error}") from error


def _eos_ids(generation_config: Mapping[str, Any]) -> frozenset[int]:
    value = generation_config.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise PlanError("The model's eos_token_id is neither a token id nor a list of them: correct generation_config.")
    return frozenset(ids)


def _load(tokenizer_json: bytes) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        # Some published files carry the padding and truncation of their training run.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode("a", add_special_tokens=True)  # finds a post-processor with tokens that are not there
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exception, and its panics are no Exception at all
        raise PlanError(
            f"The tokenizer.json of this model is not readable ({error}): fetch the model again."
        ) from error
    return tokenizer
