"""A checkpoint held in memory, for tests that export models they make up."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from trtcb.builder.random_weights import RandomCheckpoint
from trtcb.plugins.cpu import grouped
from trtcb.spec import ModelSpec

TINY = ModelSpec(
    name="tiny",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_position=128,
)


@dataclass(frozen=True)
class ArrayCheckpoint:
    spec: ModelSpec
    tensors: Mapping[str, np.ndarray]
    source: str = "memory"

    def tensor_names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name]


def random_checkpoint(spec: ModelSpec, seed: int = 0) -> ArrayCheckpoint:
    source = RandomCheckpoint(spec, seed)
    return ArrayCheckpoint(spec, {name: source.tensor(name) for name in source.tensor_names()})


def on_int4_grid(checkpoint: ArrayCheckpoint) -> ArrayCheckpoint:
    """The same with the weights of its layers rounded, so that ``int4`` stores them exactly."""
    rounded = {
        name: grouped.dequantize(grouped.quantize(tensor)) if ".layers." in name and tensor.ndim == 2 else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    return ArrayCheckpoint(checkpoint.spec, rounded)
