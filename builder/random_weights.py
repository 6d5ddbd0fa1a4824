"""A model of random weights as a :class:`Checkpoint`: the shape of any preset, with nothing to download."""

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtcb.builder.byte_tokenizer import byte_level_assets
from trtcb.builder.checkpoint import llama_tensors
from trtcb.spec import ModelSpec
from trtcb.tokenizer import TokenizerAssets

# From here on 4-byte weights would not fit the machines these shapes are tried on.
_BF16_FROM_PARAMS = 500_000_000
# Random bits are drawn for this many elements at a time, so that they stay in the core's cache.
_CHUNK_ELEMENTS = 1 << 18


class RandomCheckpoint:
    """A :class:`Checkpoint` whose tensors are a function of (seed, tensor name) alone, whatever the numpy release.

    Matrices are normal with the variance that keeps activations near 1, and norms scatter around 1, so logits differ
    clearly between tokens: greedy decoding of such a model is as reproducible as a trained one's. Small models are
    float32, big ones (from half a billion parameters) bfloat16.
    """

    def __init__(
        self, spec: ModelSpec, seed: int = 0, *, source: str | None = None, tokenizer_is_stand_in: bool = True
    ) -> None:
        self.spec = spec
        self.seed = seed
        self.source = f"{spec.name if source is None else source} (random weights, seed {seed})"
        self._shapes = llama_tensors(spec)
        self._dtype: Any = ml_dtypes.bfloat16 if spec.num_params >= _BF16_FROM_PARAMS else np.float32
        stand_in = f"The tokenizer is a byte-level stand-in of {spec.vocab_size} entries, not {spec.name}'s own."
        self.notes: tuple[str, ...] = (
            f"Weights are random (seed {seed}): the engine's text means nothing.",
            *((stand_in,) if tokenizer_is_stand_in else ()),
        )

    @property
    def weight_dtype(self) -> str:
        """``fp32`` or ``bf16``, by size."""
        return "fp32" if self._dtype is np.float32 else "bf16"

    @property
    def digest(self) -> str:
        """``random-sha256:`` over the shape, the dtype and the seed: equal digests mean equal weights."""
        identity = json.dumps([self.spec.to_json(), self.weight_dtype, self.seed], sort_keys=True)
        return f"random-sha256:{hashlib.sha256(identity.encode()).hexdigest()}"

    @cached_property
    def assets(self) -> TokenizerAssets:
        """A byte-level tokenizer that covers the vocabulary."""
        return byte_level_assets(self.spec)

    def tensor_names(self) -> Iterable[str]:
        """Names in model order."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Generate one tensor; nothing is kept."""
        shape = self.shape(name)
        if len(shape) == 1:
            mean, deviation = 1.0, 0.1
        else:
            # A tied embedding is the head too, and as such must keep logits near 1.
            is_lookup = name == "model.embed_tokens.weight" and not self.spec.tie_embeddings
            mean, deviation = 0.0, 1.0 if is_lookup else shape[1] ** -0.5
        # A table of quantiles turns 16 random bits into a weight: several times faster than numpy's normal(), whose
        # stream may also change between numpy releases where raw bits may not.
        values = (mean + deviation * self._quantiles).astype(self._dtype)
        bits = np.random.SFC64(np.random.SeedSequence(_entropy(self.seed, name)))
        result = np.empty(int(np.prod(shape)), dtype=self._dtype)
        for start in range(0, result.size, _CHUNK_ELEMENTS):
            part = result[start : start + _CHUNK_ELEMENTS]
            words = bits.random_raw(-(-part.size // 4)).astype("<u8", copy=False)
            part[:] = values[words.view("<u2")[: part.size]]
        return result.reshape(shape)

    @cached_property
    def _quantiles(self) -> npt.NDArray[np.float64]:
        normal = NormalDist()
        return np.array([normal.inv_cdf((index + 0.5) / 65536) for index in range(65536)])


def _entropy(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
