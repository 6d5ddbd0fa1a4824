"""``config.json`` of a Hugging Face model, with the old ``rope_theta`` and ``rope_scaling`` or ``rope_parameters``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from trtcb.builder.model_facts import spec_from_facts
from trtcb.errors import PlanError, UsageError
from trtcb.spec import ModelSpec

_FIELD_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_position": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
    "eos_token_ids": "eos_token_id",
    "rope_scaling": "rope_parameters",
}
# key -> the only values that describe a plain Llama
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "num_local_experts": (None,),
}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or an empty one if there is no such file; :class:`PlanError` if it is anything else."""
    try:
        data = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise PlanError(f"{path} is not readable JSON ({error}): fetch the model again.") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path} is not a JSON object: fetch the model again.")
    return data


def spec_from_config(folder: Path, name: str) -> ModelSpec:
    """Spec of the model in ``folder``; end tokens are those of both ``generation_config.json`` and ``config.json``.

    Raises :class:`UsageError` naming the key whose value this project has no support for.
    """
    origin = str(folder / "config.json")
    config, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json")
    _refuse_variants(config, origin)
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    default_dim = hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else None
    facts = {
        "hidden_size": hidden,
        "intermediate_size": config.get("intermediate_size"),
        "num_layers": config.get("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": _first(config.get("num_key_value_heads"), heads),
        "head_dim": _first(config.get("head_dim"), default_dim),
        "vocab_size": config.get("vocab_size"),
        "max_position": _first(config.get("max_position_embeddings"), 2048),
        "rms_norm_eps": _first(config.get("rms_norm_eps"), 1e-6),
        "tie_embeddings": _first(config.get("tie_word_embeddings"), False),
        "bos_token_id": _first(generation.get("bos_token_id"), config.get("bos_token_id")),
        "eos_token_ids": _distinct([*_ids(generation), *_ids(config)]),
        **_rope_facts(config, origin),
    }
    return spec_from_facts(facts, name=name, origin=origin, error=UsageError, field_names=_FIELD_NAMES)


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _ids(config: Mapping[str, Any]) -> list[Any]:
    value = config.get("eos_token_id")
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _distinct(values: list[Any]) -> tuple[Any, ...]:
    """Drop repetitions; what a stranger's list holds need not be hashable."""
    return tuple(value for index, value in enumerate(values) if value not in values[:index])


def _refuse_variants(config: Mapping[str, Any], origin: str) -> None:
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if config.get("model_type") != "llama" or architectures != ["LlamaForCausalLM"]:
        raise UsageError(
            f"{origin}: model_type {config.get('model_type')!r} with architectures {architectures} is not supported: "
            "choose a model with model_type 'llama' and LlamaForCausalLM."
        )
    for key, allowed in _REQUIRED.items():
        if config.get(key) not in allowed:
            shown = str(config[key])[:60]
            raise UsageError(f"{origin}: {key} = {shown} is not supported: choose a plain Llama-family model.")


def _rope_facts(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise UsageError(f"{origin}: rope_parameters is not an object: fetch the model again.")
    theta = _first(parameters.get("rope_theta"), _first(config.get("rope_theta"), 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind not in ("llama3", "linear"):
        raise UsageError(
            f"{origin}: rope type {kind!r} is not supported: choose a model with 'default', 'llama3' or 'linear'."
        )
    scaling = {"kind": kind, "factor": parameters.get("factor")}
    if kind == "llama3":
        scaling |= {
            "low_freq_factor": parameters.get("low_freq_factor"),
            "high_freq_factor": parameters.get("high_freq_factor"),
            "original_max_position": parameters.get("original_max_position_embeddings"),
        }
    return {"rope_theta": theta, "rope_scaling": scaling}
