"""Small Hugging Face model folders, as ``save_pretrained`` writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.unit.tiny_gguf import SPEC
from trtcb.builder.byte_tokenizer import byte_level_assets

_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8"}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_size": SPEC.hidden_size,
    "intermediate_size": SPEC.intermediate_size,
    "num_hidden_layers": SPEC.num_layers,
    "num_attention_heads": SPEC.num_heads,
    "num_key_value_heads": SPEC.num_kv_heads,
    "head_dim": SPEC.head_dim,
    "vocab_size": SPEC.vocab_size,
    "max_position_embeddings": SPEC.max_position,
    "rms_norm_eps": SPEC.rms_norm_eps,
    "rope_theta": SPEC.rope_theta,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def safetensors_bytes(tensors: Mapping[str, np.ndarray], *, pad: int = 0) -> bytes:
    """The format written by hand; ``pad`` spaces after the header shift the data."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8 + pad)
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.tobytes() for tensor in tensors.values())


def write_folder(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    folder.mkdir(exist_ok=True)
    merged = {**CONFIG, **(config or {})}
    (folder / "config.json").write_text(json.dumps(merged))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer.json").write_bytes(byte_level_assets(SPEC).tokenizer_json)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return folder
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[shard::shards]}
        (folder / name).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def to_bf16(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
