"""The same models in transformers: an implementation that shares nothing with ours."""

import logging
from collections.abc import Mapping

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from trtcb.spec import ModelSpec


def llama_config(spec: ModelSpec) -> LlamaConfig:
    rope = {"rope_theta": spec.rope_theta, "rope_type": "default"}
    if spec.rope_scaling is not None:
        s = spec.rope_scaling
        rope |= {
            "rope_type": s.kind,
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_position,
        }
    return LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=spec.tie_embeddings,
    )


def llama(spec: ModelSpec, tensors: Mapping[str, object]) -> LlamaForCausalLM:
    """A model in fp32 with the given weights, by checkpoint name."""
    model = LlamaForCausalLM(llama_config(spec)).eval()
    values = {name: torch.as_tensor(value) for name, value in tensors.items()}
    missing, unexpected = model.load_state_dict(values, strict=False)
    if unexpected or not set(missing) <= ({"lm_head.weight"} if spec.tie_embeddings else set()):
        raise ValueError(f"weights do not fit: {missing} missing, {unexpected} too many")
    model.tie_weights()
    return model


def llama_from_gguf(spec: ModelSpec, path: str) -> LlamaForCausalLM:
    """A model in fp32 from a GGUF file, read by transformers' own code."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(llama_config(spec))
    return llama(spec, load_gguf_checkpoint(path, return_tensors=True, model_to_load=skeleton)["tensors"])


def logits_of(model: LlamaForCausalLM, tokens: list[int]) -> np.ndarray:
    """Logits after each token, ``[len(tokens), vocab_size]``."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def greedy(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """``prompt`` and its most likely continuation."""
    out = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
    return out[0].tolist()
