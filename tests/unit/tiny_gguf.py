"""Small Llama files written as llama.cpp's converter writes them, through the ``gguf`` package's writer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from trtcb.builder.checkpoint import llama_tensors
from trtcb.spec import ModelSpec

# Rows of 256 elements, the block of the K types.
SPEC = ModelSpec(
    name="tiny",
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=300,
    max_position=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    bos_token_id=0,
    eos_token_ids=(1,),
)
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in top:
        return f"{top[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.weight"


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What ``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py does to q_proj and k_proj."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def random_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in llama_tensors(spec).items()}


def stored_tensors(spec: ModelSpec, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors under GGUF names, in llama.cpp's row order."""
    heads = {"q_proj.weight": spec.num_heads, "k_proj.weight": spec.num_kv_heads}
    result = {}
    for name, tensor in tensors.items():
        suffix = ".".join(name.split(".")[-2:])
        result[gguf_name(name)] = permute(tensor, heads[suffix]) if suffix in heads else tensor
    return result


def metadata_of(spec: ModelSpec) -> dict[str, Any]:
    """Keys of a converted model, with a vocabulary of bytes; ints are written as u32 and floats as f32."""
    tokens = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), "ab"]
    return {
        "llama.block_count": spec.num_layers,
        "llama.context_length": spec.max_position,
        "llama.embedding_length": spec.hidden_size,
        "llama.feed_forward_length": spec.intermediate_size,
        "llama.attention.head_count": spec.num_heads,
        "llama.attention.head_count_kv": spec.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "llama.rope.dimension_count": spec.head_dim,
        "llama.rope.freq_base": spec.rope_theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * 257,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, str]],
    metadata: Mapping[str, Any],
    *,
    architecture: str = "llama",
) -> Path:
    """Write ``tensors`` (plain arrays, or quantised bytes with the type's name); ``None`` drops a metadata key."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, list(value))
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=None if kind is None else gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny(path: Path, *, spec: ModelSpec = SPEC, drop: tuple[str, ...] = (), **metadata: Any) -> Path:
    """A complete F32 file; ``metadata`` overrides keys (``__`` is ``.``), ``drop`` removes tensors by GGUF name."""
    tensors = stored_tensors(spec, random_tensors(spec))
    keys = {**metadata_of(spec), **{key.replace("__", "."): value for key, value in metadata.items()}}
    return write_gguf(path, {name: tensor for name, tensor in tensors.items() if name not in drop}, keys)
