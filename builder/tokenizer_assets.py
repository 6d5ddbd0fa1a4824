"""The tokenizer of a Hugging Face folder: ``tokenizer.json`` and the files around it that change what it does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from trtcb.builder.hf_config import read_json
from trtcb.builder.tokenizer_json import bos_processor
from trtcb.errors import ModelNotFoundError, PlanError
from trtcb.spec import ModelSpec
from trtcb.tokenizer import Tokenizer, TokenizerAssets

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def folder_assets(folder: Path, spec: ModelSpec) -> TokenizerAssets:
    """Collect the tokenizer's files. ``generation_config`` keeps the publisher's defaults; its ids come from ``spec``.

    Raises :class:`ModelNotFoundError` without ``tokenizer.json``, :class:`PlanError` for unreadable files.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFoundError(
            f"{folder} has no tokenizer.json: write one with AutoTokenizer.from_pretrained and save_pretrained."
        )
    config = read_json(folder / "tokenizer_config.json")
    special = {role: text for role in _ROLES if (text := _token_text(config.get(role))) is not None}
    assets = TokenizerAssets(
        tokenizer_json=path.read_bytes(),
        chat_template=_chat_template(folder, config),
        generation_config={
            **read_json(folder / "generation_config.json"),
            "bos_token_id": spec.bos_token_id,
            "eos_token_id": list(spec.eos_token_ids),
        },
        special_tokens=special,
    )
    return _with_bos_setting(assets, config.get("add_bos_token"))


def _token_text(value: Any) -> str | None:
    """Return a token's text, which is written as such or in an object that also says how it is matched."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Read the file, else the key: a text, or a list of named ones of which ``default`` is for chat."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{path} is not readable text ({error}): fetch the model again.") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _with_bos_setting(assets: TokenizerAssets, add_bos: Any) -> TokenizerAssets:
    """Let an explicit ``add_bos_token`` overrule the post-processor of ``tokenizer.json``, as in ``transformers``."""
    if not isinstance(add_bos, bool):
        return assets
    tokenizer = Tokenizer(assets)
    if tokenizer.bos_token_id is None or tokenizer.adds_bos == add_bos:
        return assets
    token = tokenizer.id_to_token(tokenizer.bos_token_id)
    if token is None:
        raise PlanError(
            f"The tokenizer has no token of the id bos_token_id ({tokenizer.bos_token_id}): fetch the model again."
        )
    document = orjson.loads(assets.tokenizer_json)
    document["post_processor"] = bos_processor(token, tokenizer.bos_token_id) if add_bos else None
    return TokenizerAssets(
        tokenizer_json=orjson.dumps(document),
        chat_template=assets.chat_template,
        generation_config=assets.generation_config,
        special_tokens=assets.special_tokens,
    )
