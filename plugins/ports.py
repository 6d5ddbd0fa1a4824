"""The inputs and outputs of a step graph, by name: what the exporter declares and what a runtime binds."""

from dataclasses import dataclass
from typing import Literal

from trtcb.plugins.schema import Tensor, fresh_op, write_op
from trtcb.spec import KVDtype, ModelSpec

GraphDtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Port:
    """One named tensor at the edge of the graph. Strings in ``shape`` are dimensions that vary from step to step.

    ``dtype`` is ``int32``, ``int8``, ``fp32``, ``bf16`` or ``fp16``. ``updates`` of an output names the input whose
    memory it shares.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    updates: str | None = None


BATCH_PORTS: tuple[Port, ...] = (
    Port("input_ids", "int32", ("T",)),
    Port("positions", "int32", ("T",)),
    Port("slot_mapping", "int32", ("T",)),
    Port("token_sequence", "int32", ("T",)),
    Port("cu_q", "int32", ("B1",)),
    Port("block_tables", "int32", ("B", "MB")),
    Port("q_range", "int32", ("S",)),
    Port("logit_index", "int32", ("NL",)),
)
"""What describes a step: see ``trtcb.executor.runtime.Batch`` and, for the derived two, ``trtcb.plugins.schema``."""


def pool_port(layer: int, pool: str) -> str:
    """Name of what carries ``pool`` (an operator's ``k_pool``, ``v_scale_pool``, ``k_new``, ...) of ``layer``."""
    return f"layers.{layer}.{pool}"


def pool_ports(spec: ModelSpec, kv_dtype: KVDtype) -> tuple[Port, ...]:
    """Return the cache's inputs layer by layer: ``k_pool``, ``v_pool`` and, when quantised, their scale pools."""
    return _cache_ports(spec, kv_dtype, write_op(kv_dtype).inputs)


def new_ports(spec: ModelSpec, kv_dtype: KVDtype) -> tuple[Port, ...]:
    """Return what a deferred graph gives layer by layer: ``k_new``, ``v_new`` and their scales, a row a token."""
    return _cache_ports(spec, kv_dtype, fresh_op(kv_dtype).outputs)


def graph_inputs(spec: ModelSpec, kv_dtype: KVDtype, *, deferred: bool = False) -> tuple[Port, ...]:
    """Return all inputs of the step graph, in order. A deferred one does not know where its tokens will be stored."""
    batch = (port for port in BATCH_PORTS if not (deferred and port.name == "slot_mapping"))
    return (*batch, *pool_ports(spec, kv_dtype))


def graph_outputs(spec: ModelSpec, kv_dtype: KVDtype, *, deferred: bool = False) -> tuple[Port, ...]:
    """Return all outputs of the step graph, in order: the logits, then the updated pools, or what to add to them."""
    logits = Port("logits", "fp32", ("NL", spec.vocab_size))
    if deferred:
        return (logits, *new_ports(spec, kv_dtype))
    return (
        logits,
        *(Port(f"{p.name}_out", p.dtype, p.shape, updates=p.name) for p in pool_ports(spec, kv_dtype)),
    )


def _cache_ports(spec: ModelSpec, kv_dtype: KVDtype, tensors: tuple[Tensor, ...]) -> tuple[Port, ...]:
    """Ports of an operator's pools and scales, for every layer."""
    sizes: dict[str, int | str] = {"HK": spec.num_kv_heads, "D": spec.head_dim}
    dtypes = {"pool": "int8" if kv_dtype.is_quantized else kv_dtype.value, "scale": "fp16"}
    return tuple(
        Port(pool_port(layer, tensor.name), dtypes[tensor.kind], tuple(sizes.get(dim, dim) for dim in tensor.shape))
        for layer in range(spec.num_layers)
        for tensor in tensors
        if tensor.kind in dtypes
    )
