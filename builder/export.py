"""The ONNX graph of one packed step of a Llama-family model: one exporter for every target.

Inputs and outputs are listed in :mod:`trtcb.plugins.ports`. Nodes of a layer carry stable names, ``layers.3.q_proj``,
``layers.3.paged_attention``, ..., and appear in this order; compilers match on it:

============================  =======================================================================================
``RMSNormalization``          ``attention_norm``
``Gemm`` x3                   ``q_proj`` ``k_proj`` ``v_proj``: ``x @ W.T``, the weight as the checkpoint stores it
``Reshape``                   ``q_heads`` ``[T, H, 1, D]``: a token is a batch entry of length 1, nothing is transposed
``RotaryEmbedding``           ``q_rope``, in fp32: other graphs have the Casts ``q_fp32`` and ``q_bf16`` around it
``Reshape``                   ``q`` ``[T, H, D]``; and the same three for k
``Reshape``                   ``v``
``[Quant]KVCacheWrite``       ``kv_cache_write``; in a deferred graph ``[Quant]FreshKV``, ``fresh_kv``
``[Quant]PagedAttention``     ``paged_attention``; in a deferred graph ``[Quant]FreshPagedAttention``
``Reshape`` ``Gemm`` ``Add``  ``context`` ``o_proj`` ``attention_residual``
``RMSNormalization``          ``mlp_norm``
``Gemm`` x2                   ``gate_proj`` ``up_proj``
``Sigmoid`` ``Mul`` ``Mul``   ``gate_sigmoid`` ``gate_silu`` ``gated``
``Gemm`` ``Add``              ``down_proj`` ``mlp_residual``
============================  =======================================================================================

Number of nodes, for L layers:

====================  =======  ======================================================================================
Gemm                  7 L + 1  the head
Reshape               6 L
RMSNormalization      2 L + 1  before the head
RotaryEmbedding       2 L
Add                   2 L
Mul                   2 L
Sigmoid               L
KV write, attention   L each
Gather                2        embedding rows, rows that want logits
Cast                  2        positions to int64, logits to fp32; and 4 L more in bf16 and fp16
Unsqueeze             1        positions
====================  =======  ======================================================================================
"""

import math
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trtcb import __version__
from trtcb.builder.onnx_file import ExternalTensor, external_tensors, write_onnx
from trtcb.errors import UsageError
from trtcb.plugins.functions import ELEMENT_TYPES, OPSET, functions_for
from trtcb.plugins.ports import GraphDtype, Port, graph_inputs, graph_outputs, pool_port
from trtcb.plugins.schema import (
    DOMAIN,
    KV_FORMATS,
    VERSION,
    OpSchema,
    attention_op,
    fresh_attention_op,
    fresh_op,
    write_op,
)
from trtcb.spec import KVDtype, ModelSpec

__all__ = ["ExternalTensor", "build_graph", "external_tensors", "write_onnx"]

IR_VERSION = 11
"""The one that came with opset 23."""

_GRAPH_DTYPES: dict[str, GraphDtype] = {name: name for name in get_args(GraphDtype)}
_ALIGNMENT = 4096  # of weights in the data file: what ONNX asks for, so that pages can be mapped


def build_graph(
    spec: ModelSpec,
    *,
    dtype: str,
    kv_dtype: KVDtype,
    block_size: int,
    max_positions: int,
    deferred: bool = False,
    data_location: str = "weights.data",
) -> onnx.ModelProto:
    """Export ``spec`` as a step graph that computes in ``dtype`` (a ``GraphDtype``) and caches in ``kv_dtype``.

    A ``deferred`` graph only reads the pools; what the step adds to them are outputs, for its executor to store.

    No weight is read: initialisers are references into the external file ``data_location``, named as in the checkpoint
    (``model.layers.0.self_attn.q_proj.weight``, shape ``[N, K]``; a tied head is the embedding), plus ``rope_cos`` and
    ``rope_sin`` ``[max_positions, head_dim / 2]`` in fp32. Raises :class:`~trtcb.errors.UsageError`.
    """
    compute = _GRAPH_DTYPES.get(dtype)
    if compute is None:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(_GRAPH_DTYPES)}")
    if block_size < 1:
        raise UsageError(f"block_size is {block_size}; it must be at least 1")
    if not 1 <= max_positions <= spec.max_position:
        raise UsageError(f"max_positions is {max_positions}; {spec.name} takes 1 to {spec.max_position}")
    graph = _StepGraph(spec, compute, kv_dtype, block_size, data_location, deferred)
    graph.emit(max_positions)
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            spec.name,
            [_value_info(port) for port in graph_inputs(spec, kv_dtype, deferred=deferred)],
            [_value_info(port) for port in graph_outputs(spec, kv_dtype, deferred=deferred)],
            graph.initializers,
        ),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)],
        functions=functions_for(compute, kv_dtype, deferred=deferred),
        ir_version=IR_VERSION,
        producer_name="trtcb",
        producer_version=__version__,
    )
    helper.set_model_props(model, {"kv_dtype": kv_dtype.value, "block_size": str(block_size)})
    return model


def _value_info(port: Port) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(port.name, ELEMENT_TYPES[port.dtype], port.shape)


@dataclass(slots=True)
class _StepGraph:
    """Nodes and initialisers while they are collected. A method that emits nodes returns the name of their result."""

    spec: ModelSpec
    dtype: GraphDtype
    kv_dtype: KVDtype
    block_size: int
    data_location: str
    deferred: bool
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)
    data_size: int = 0  # bytes of the data file so far

    def emit(self, max_positions: int) -> None:
        spec = self.spec
        embedding = self.weight("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        tables = (max_positions, spec.head_dim // 2)
        self.external("rope_cos", "fp32", tables)
        self.external("rope_sin", "fp32", tables)
        for name, shape in (
            ("q_shape", (0, spec.num_heads, spec.head_dim)),
            ("kv_shape", (0, spec.num_kv_heads, spec.head_dim)),
            ("q_rope_shape", (0, spec.num_heads, 1, spec.head_dim)),
            ("k_rope_shape", (0, spec.num_kv_heads, 1, spec.head_dim)),
            ("context_shape", (0, spec.q_size)),
            ("column", (1,)),
        ):
            self.initializers.append(numpy_helper.from_array(np.array(shape, np.int64), name))
        positions = self.node("Unsqueeze", "position_column", "positions", "column")
        self.node("Cast", "position_ids", positions, to=TensorProto.INT64)

        x = self.node("Gather", "embed_tokens", embedding, "input_ids", axis=0)
        for layer in range(spec.num_layers):
            x = self.layer(layer, x)
        x = self.node("Gather", "logit_rows", x, "logit_index", axis=0)
        x = self.norm("norm", x, "model.norm.weight")
        if not spec.tie_embeddings:
            x = self.linear("lm_head", x, "lm_head.weight", spec.vocab_size, spec.hidden_size)
        else:
            x = self.node("Gemm", "lm_head", x, embedding, transB=1)
        self.node("Cast", "logits", x, to=TensorProto.FLOAT)

    def layer(self, index: int, x: str) -> str:
        """One decoder layer on the residual stream ``x [T, hidden]``."""
        spec, name, source = self.spec, f"layers.{index}", f"model.layers.{index}"
        h = self.norm(f"{name}.attention_norm", x, f"{source}.input_layernorm.weight")
        q, k, v = (
            self.linear(f"{name}.{p}_proj", h, f"{source}.self_attn.{p}_proj.weight", size, spec.hidden_size)
            for p, size in (("q", spec.q_size), ("k", spec.kv_size), ("v", spec.kv_size))
        )
        q = self.rotate(f"{name}.q", q, "q_rope_shape", "q_shape")
        k = self.rotate(f"{name}.k", k, "k_rope_shape", "kv_shape")
        v = self.node("Reshape", f"{name}.v", v, "kv_shape")
        context = self.node("Reshape", f"{name}.context", self.attention(index, q, k, v), "context_shape")
        o = self.linear(f"{name}.o_proj", context, f"{source}.self_attn.o_proj.weight", spec.hidden_size, spec.q_size)
        x = self.node("Add", f"{name}.attention_residual", x, o)

        h = self.norm(f"{name}.mlp_norm", x, f"{source}.post_attention_layernorm.weight")
        gate, up = (
            self.linear(
                f"{name}.{p}_proj", h, f"{source}.mlp.{p}_proj.weight", spec.intermediate_size, spec.hidden_size
            )
            for p in ("gate", "up")
        )
        silu = self.node("Mul", f"{name}.gate_silu", gate, self.node("Sigmoid", f"{name}.gate_sigmoid", gate))
        gated = self.node("Mul", f"{name}.gated", silu, up)
        down_weight = f"{source}.mlp.down_proj.weight"
        down = self.linear(f"{name}.down_proj", gated, down_weight, spec.hidden_size, spec.intermediate_size)
        return self.node("Add", f"{name}.mlp_residual", x, down)

    def attention(self, layer: int, q: str, k: str, v: str) -> str:
        """Store this step's ``k, v [T, HK, D]``, or encode them for it, then attend with ``q [T, H, D]``.

        Only this method knows how the cache is written.
        """
        values = {"k": k, "v": v, "q": q}
        values |= {
            tensor.name: pool_port(layer, tensor.name)
            for tensor in write_op(self.kv_dtype).inputs
            if tensor.kind in ("pool", "scale")
        }
        if self.deferred:
            store, attend = fresh_op(self.kv_dtype), fresh_attention_op(self.kv_dtype)
            new = {tensor.name: pool_port(layer, tensor.name) for tensor in store.outputs}
            name = "fresh_kv"
        else:
            store, attend = write_op(self.kv_dtype), attention_op(self.kv_dtype)
            new = {tensor.alias or "": f"{values[tensor.alias or '']}_out" for tensor in store.outputs}
            name = "kv_cache_write"
        self.custom(store, f"layers.{layer}.{name}", values, list(new.values()))
        out = f"layers.{layer}.paged_attention"
        self.custom(attend, out, values | new, [out])
        return out

    def rotate(self, name: str, x: str, heads: str, packed: str) -> str:
        """Rotary embedding in fp32 of ``x [T, heads * D]``; ``[T, heads, D]``."""
        x = self.node("Reshape", f"{name}_heads", x, heads)
        if self.dtype != "fp32":
            x = self.node("Cast", f"{name}_fp32", x, to=TensorProto.FLOAT)
        x = self.node("RotaryEmbedding", f"{name}_rope", x, "rope_cos", "rope_sin", "position_ids")
        if self.dtype != "fp32":
            x = self.node("Cast", f"{name}_{self.dtype}", x, to=ELEMENT_TYPES[self.dtype])
        return self.node("Reshape", name, x, packed)

    def norm(self, name: str, x: str, weight: str) -> str:
        gain = self.weight(weight, self.spec.hidden_size)
        return self.node("RMSNormalization", name, x, gain, axis=-1, epsilon=self.spec.rms_norm_eps)

    def linear(self, name: str, x: str, weight: str, num_out: int, num_in: int) -> str:
        return self.node("Gemm", name, x, self.weight(weight, num_out, num_in), transB=1)

    def node(self, op: str, name: str, *inputs: str, **attributes: Any) -> str:
        """Append a node whose only output has the node's name."""
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def custom(self, op: OpSchema, name: str, values: dict[str, str], outputs: list[str]) -> None:
        """Append a ``trtcb`` operator; inputs not in ``values`` are graph inputs of the same name."""
        known: dict[str, Any] = {
            "block_size": self.block_size,
            "scale": 1.0 / math.sqrt(self.spec.head_dim),
            "kv_format": KV_FORMATS.get(self.kv_dtype, ""),
        }
        attributes = {attribute: known[attribute] for attribute in op.attribute_names}
        inputs = [values.get(tensor, tensor) for tensor in op.input_names]
        self.nodes.append(helper.make_node(op.name, inputs, outputs, name=name, domain=DOMAIN, **attributes))

    def weight(self, name: str, *shape: int) -> str:
        return self.external(name, self.dtype, shape)

    def external(self, name: str, dtype: str, shape: tuple[int, ...]) -> str:
        """Declare an initialiser that lives in the data file."""
        offset = -(-self.data_size // _ALIGNMENT) * _ALIGNMENT
        tensor = ExternalTensor(name, dtype, shape, offset)
        self.initializers.append(tensor.to_proto(self.data_location))
        self.data_size = offset + tensor.num_bytes
        return name
