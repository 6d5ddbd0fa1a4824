"""What a model is and what an engine is built for: the facts that cross from the builder to the executor."""

import math
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt


class WeightDtype(str, Enum):
    """How weights are stored and multiplied.

    ``int8`` means weights and activations of all layers: one scale per output and per row, both rotated along the depth
    so that 8 bits suffice, no calibration. ``int4`` means weights of 4 bits with a scale and a zero for each 32 along
    the depth, as GGUF's Q4_1, and activations of 8 bits with a scale for each 32. The head of both is ``int8``, their
    embedding ``bf16``.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def quantized_rows(self) -> str | None:
        """Type of the rounded activations that products read; None if they read them as they are."""
        return {"int8": "int8", "int4": "int8_g32"}.get(self.value)

    @property
    def table_dtype(self) -> str:
        """Type of the embedding."""
        return self.value if self.quantized_rows is None else "bf16"

    @property
    def head_dtype(self) -> "WeightDtype":
        """Type of the head: it decides between tokens, and 4 bits would cost more there than they save."""
        return WeightDtype.INT8 if self is WeightDtype.INT4 else self

    @property
    def activation_dtype(self) -> str:
        """Type of what passes between operators."""
        return self.value if self.quantized_rows is None else "fp32"


class KVDtype(str, Enum):
    """How keys and values are stored in the paged pool.

    ``int8`` (symmetric) and ``fp8`` (e4m3fn, saturating) carry one fp16 scale per token and KV head, computed from that
    token's own values when it is written: no calibration, and a recomputed block is bit-equal to a cached one.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def value_bytes(self) -> int:
        """Bytes of one stored element."""
        return {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}[self.value]

    @property
    def is_quantized(self) -> bool:
        """Whether a scale pool stands beside the value pool."""
        return self in (KVDtype.INT8, KVDtype.FP8)


SCALE_BYTES = 2  # fp16

# Wide enough for any published Llama; what reads models and what reads plans hold to the same.
MAX_ROPE_THETA = 1e12
MAX_ROPE_FACTOR = 1e9
MAX_EOS_TOKENS = 256


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings: ``llama3`` is the smooth scheme of Llama 3.1, ``linear`` divides."""

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a Llama-family model. Sizes count elements; ``max_position`` counts tokens."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_shapes(self) -> frozenset[tuple[int, int]]:
        """``[N, K]`` of every product of a layer, with the projections of one input fused."""
        return frozenset(
            {
                (self.q_size + 2 * self.kv_size, self.hidden_size),
                (self.hidden_size, self.q_size),
                (2 * self.intermediate_size, self.hidden_size),
                (self.hidden_size, self.intermediate_size),
            }
        )

    @property
    def num_params(self) -> int:
        """Weights, with a tied head counted once."""
        layer = self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * self.intermediate_size + 2)
        head = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size + head + self.hidden_size

    def kv_bytes_per_token(self, kv_dtype: KVDtype) -> int:
        """Bytes the pool spends on one token over all layers, scales included."""
        per_head = self.head_dim * kv_dtype.value_bytes + (SCALE_BYTES if kv_dtype.is_quantized else 0)
        return 2 * self.num_layers * self.num_kv_heads * per_head

    def rope_tables(self, num_positions: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Cosines and sines ``[num_positions, head_dim / 2]``, computed in float64 and rounded once."""
        inv_freq = 1.0 / self.rope_theta ** (np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        if self.rope_scaling is not None:
            inv_freq = _scale_frequencies(inv_freq, self.rope_scaling)
        angle = np.outer(np.arange(num_positions, dtype=np.float64), inv_freq)
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a plan header."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "ModelSpec":
        """Inverse of :meth:`to_json`; raises ``TypeError`` or ``KeyError`` on foreign data."""
        scaling = data["rope_scaling"]
        return ModelSpec(
            **{
                **data,
                "rope_scaling": None if scaling is None else RopeScaling(**scaling),
                "eos_token_ids": tuple(data["eos_token_ids"]),
            }
        )


def _scale_frequencies(inv_freq: npt.NDArray[np.float64], scaling: RopeScaling) -> npt.NDArray[np.float64]:
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    # Llama 3.1: long wavelengths are divided by `factor`, short ones kept, the band between interpolated.
    wavelength = 2 * math.pi / inv_freq
    position = scaling.original_max_position / wavelength
    smooth = (position - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """Upper bounds an engine is compiled for; a server may choose lower ones, never higher."""

    max_batch_size: int = 64
    max_num_tokens: int = 512
    max_seq_len: int = 4096
    block_size: int = 32
