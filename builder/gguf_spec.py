"""The shape of a Llama from GGUF metadata, with the rotary scaling that llama.cpp stores as a tensor."""

from typing import Any

import numpy as np
import numpy.typing as npt

from trtcb.builder.gguf import GgufFile, GgufTensor
from trtcb.builder.gguf_tokenizer import gguf_eos_ids
from trtcb.builder.model_facts import spec_from_facts
from trtcb.errors import PlanError, UsageError
from trtcb.spec import ModelSpec, RopeScaling

ROPE_FREQS = "rope_freqs.weight"
_FACT_KEYS = {
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_layers": "llama.block_count",
    "num_heads": "llama.attention.head_count",
    "num_kv_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.attention.key_length",
    "vocab_size": "llama.vocab_size",
    "max_position": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
}
# llama.cpp drops the parameters of Llama 3.1's frequency scaling and stores only its result. All published models
# share these.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def spec_from_gguf(file: GgufFile, name: str) -> ModelSpec:
    """Spec of the model in ``file``.

    Raises :class:`UsageError` for a model that is no plain Llama and :class:`PlanError` for metadata that makes no
    sense; both name the key.
    """
    metadata, origin = file.metadata, str(file.path)
    architecture = file.get("general.architecture", str, None)
    if architecture != "llama":
        raise UsageError(f"{origin}: the architecture {architecture!r} is not supported: choose a Llama-family model.")
    _refuse_variants(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise PlanError(f"{origin} lacks the tensor 'token_embd.weight': it is incomplete, fetch it again.")
    heads, hidden = metadata.get(_FACT_KEYS["num_heads"]), metadata.get(_FACT_KEYS["hidden_size"])
    default_dim = hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else None
    facts = {fact: metadata.get(key) for fact, key in _FACT_KEYS.items()}
    facts |= {
        "num_kv_heads": metadata.get(_FACT_KEYS["num_kv_heads"], heads),
        "head_dim": metadata.get(_FACT_KEYS["head_dim"], default_dim),
        "vocab_size": metadata.get(_FACT_KEYS["vocab_size"], embedding.shape[0]),
        "rms_norm_eps": _shortest(facts["rms_norm_eps"]),
        "rope_theta": _shortest(metadata.get(_FACT_KEYS["rope_theta"], 10000.0)),
        "tie_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int, None),
        "eos_token_ids": gguf_eos_ids(file),
    }
    spec = spec_from_facts(facts, name=name, origin=origin, error=PlanError, field_names=_FACT_KEYS)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        size = file.get(key, int, spec.head_dim)
        if size != spec.head_dim:
            raise UsageError(f"{origin}: {key} ({size}) differs from the head size ({spec.head_dim}): not supported.")
    scaling = _rope_scaling(file, spec)
    if scaling is None:
        return spec
    facts["rope_scaling"] = {field: getattr(scaling, field) for field in RopeScaling.__dataclass_fields__}
    return spec_from_facts(facts, name=name, origin=origin, error=PlanError, field_names=_FACT_KEYS)


def _refuse_variants(file: GgufFile) -> None:
    """Features that share the name ``llama`` but compute something else."""
    if file.get("llama.expert_count", int, 0):
        raise UsageError(
            f"{file.path} is a mixture of experts (llama.expert_count): choose a dense Llama-family model."
        )
    window = file.get("llama.attention.sliding_window", int, 0)
    if 0 < window < file.get("llama.context_length", int, 0):
        raise UsageError(
            f"{file.path} uses sliding-window attention (llama.attention.sliding_window): choose another model."
        )


def _shortest(value: Any) -> Any:
    """GGUF stores these as float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_scaling(file: GgufFile, spec: ModelSpec) -> RopeScaling | None:
    """Frequency scaling from metadata (``linear``) or from the stored divisors (``llama3``)."""
    kind = file.get("llama.rope.scaling.type", str, None)
    # Old files have the second key; without a type, a factor means linear.
    factor = file.get("llama.rope.scaling.factor", float, file.get("llama.rope.scale_linear", float, 1.0))
    if kind not in (None, "none", "linear", "llama3"):
        raise UsageError(
            f"{file.path}: rope scaling {kind!r} is not supported: choose a model with none, 'linear' or 'llama3'."
        )
    if ROPE_FREQS in file.tensors:
        return _llama3_scaling(file, spec, file.tensors[ROPE_FREQS])
    if kind == "llama3":
        raise UsageError(f"{file.path} declares llama3 rope scaling without {ROPE_FREQS}: convert the model again.")
    return None if kind == "none" or factor == 1.0 else RopeScaling("linear", factor)


def _llama3_scaling(file: GgufFile, spec: ModelSpec, tensor: GgufTensor) -> RopeScaling | None:
    """Find the scaling whose divisors the file stores; they are checked against the formula."""
    width = spec.head_dim // 2
    if tensor.kind != "F32" or tensor.shape != (width,):
        raise PlanError(f"{file.path}: tensor {ROPE_FREQS!r} is not F32 [{width}]: fetch or convert it again.")
    divisors = file.blocks(tensor).view(np.float32)[0].astype(np.float64)
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise PlanError(f"{file.path}: tensor {ROPE_FREQS!r} holds values that are no divisors: fetch it again.")
    if (divisors == 1.0).all():
        return None
    scaling = RopeScaling("llama3", _shortest(float(divisors[-1])), _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT)
    if not np.allclose(divisors, llama3_divisors(spec, scaling), rtol=1e-4, atol=0.0):
        raise UsageError(
            f"{file.path}: {ROPE_FREQS} follows another rule than llama3 rope scaling: choose another model."
        )
    return scaling


def llama3_divisors(spec: ModelSpec, scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """Return what llama3 scaling divides the rotary frequencies by ``[head_dim / 2]``; llama.cpp stores these."""
    inv_freq = 1.0 / spec.rope_theta ** (np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_max_position * inv_freq / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / scaling.factor + smooth))
