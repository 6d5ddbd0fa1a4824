"""Lowering: the exported ONNX graph becomes the straight-line :class:`~trtcb.program.Program` of one step.

The pass walks the graph once, in order, and keeps for each ONNX value what it stands for ("the sum of the residual and
that projection", "columns 576..768 of the fused projection, rotated"). Fusions fall out of that: projections of one
input become one ``linear``, an ``Add`` waits for the norm that reads it, rotation and KV write become one call, and
views cost nothing. A node or pattern it does not know is an error that names the node; nothing is guessed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trtcb.errors import TrtcbError
from trtcb.plugins.cpu.grouped import GROUP
from trtcb.program import Call, Program, Rows, Value
from trtcb.spec import ModelSpec, WeightDtype

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx


Piece = Literal["whole", "int8.codes", "int8.scale", "int4.codes", "int4.scale", "int4.zero"]


class LoweringError(TrtcbError):
    """The graph holds something this compiler has no kernel for."""


@dataclass(frozen=True, slots=True)
class WeightRecipe:
    """A tensor of the plan: the ``parts`` (initialiser names) stacked along their rows, stored as ``dtype``.

    Quantised weights are several tensors: ``int8`` ones, rotated and rounded, have a scale a row; ``int4`` ones are
    packed, two a byte, and have a scale and a zero for each group of the depth.
    """

    name: str
    parts: tuple[str, ...]
    dtype: str
    piece: Piece = "whole"

    def shape(self, stacked: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor, whose stacked parts have the given one."""
        num_rows, *depth = stacked
        if self.piece in ("whole", "int8.codes"):
            return stacked
        if self.piece == "int8.scale":
            return (num_rows,)
        return (num_rows, depth[0] // (2 if self.piece == "int4.codes" else GROUP))


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program with the weights it names."""

    program: Program
    weights: tuple[WeightRecipe, ...]


# What an ONNX value stands for while the pass runs.


@dataclass(frozen=True, slots=True)
class _Ref:
    """Columns ``offset : offset + width`` of the ``version``-th write to the program value ``name``."""

    name: str
    version: int
    offset: int
    width: int


@dataclass(frozen=True, slots=True)
class _Sum:
    residual: _Ref
    delta: _Ref


@dataclass(frozen=True, slots=True)
class _Rotated:
    of: _Ref


@dataclass(frozen=True, slots=True)
class _Gate:
    """``sigmoid(of)``, or with ``multiplied`` the whole ``silu(of)``."""

    of: _Ref
    multiplied: bool


@dataclass(frozen=True, slots=True)
class _Written:
    """The pools of ``layer`` after this step's keys and values, with the query that was rotated beside them."""

    layer: int
    query: _Ref


_Meaning = _Ref | _Sum | _Rotated | _Gate | _Written | str  # str: a graph input or an initialiser, by name

_VIEWS = frozenset({"Reshape", "Transpose", "Unsqueeze", "Squeeze", "Cast", "Identity"})


def lower(model: onnx.ModelProto, spec: ModelSpec, weight_dtype: WeightDtype) -> Lowered:
    """Compile ``model`` (from :func:`trtcb.builder.export.build_graph`) for weights of a type.

    Raises :class:`LoweringError` for a graph the portable engine cannot run.
    """
    return _Lowering(model.graph, spec, weight_dtype).run()


@dataclass(slots=True)
class _Lowering:
    graph: onnx.GraphProto
    spec: ModelSpec
    weight_dtype: WeightDtype
    meaning: dict[str, _Meaning] = field(default_factory=dict)
    consumers: dict[str, list[onnx.NodeProto]] = field(default_factory=lambda: defaultdict(list))
    calls: list[Call] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    weights: dict[tuple[tuple[str, ...], str, str], WeightRecipe] = field(default_factory=dict)
    quantized: dict[_Ref, _Ref] = field(default_factory=dict)
    num_layers: int = 0

    @property
    def dtype(self) -> str:
        """Type of what passes between operators."""
        return self.weight_dtype.activation_dtype

    def run(self) -> Lowered:
        for value in (*self.graph.input, *self.graph.initializer):
            self.meaning[value.name] = value.name
        for node in self.graph.node:
            for name in node.input:
                self.consumers[name].append(node)
        handlers: dict[str, Callable[[onnx.NodeProto], None]] = {
            "Gather": self._gather,
            "RMSNormalization": self._norm,
            "Gemm": self._linear,
            "RotaryEmbedding": self._rotate,
            "KVCacheWrite": self._kv_write,
            "QuantKVCacheWrite": self._kv_write,
            "PagedAttention": self._attention,
            "QuantPagedAttention": self._attention,
            "Sigmoid": self._sigmoid,
            "Mul": self._mul,
            "Add": self._add,
            "Constant": self._constant,
        }
        for node in self.graph.node:
            if all(name in self.meaning for name in node.output):
                continue  # a projection already taken along by a fused one
            for name in node.input:
                if name not in self.meaning:
                    raise LoweringError(f"node {node.name!r} reads {name!r} before it is written")
            if node.op_type in _VIEWS:
                self.meaning[node.output[0]] = self.meaning[node.input[0]]
            elif node.op_type in handlers:
                handlers[node.op_type](node)
            else:
                raise LoweringError(f"the cpu target has no kernel for {node.op_type} (node {node.name!r})")
        self._check_output()
        return Lowered(Program(tuple(self.calls), tuple(self.values.values())), tuple(self.weights.values()))

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _constant(self, node: onnx.NodeProto) -> None:
        self.meaning[node.output[0]] = node.output[0]

    def _gather(self, node: onnx.NodeProto) -> None:
        table, index = self.meaning[node.input[0]], self.meaning[node.input[1]]
        if index == "input_ids" and isinstance(table, str):
            weight = self._weight("embedding", (table,), self.weight_dtype.table_dtype)
            out = self._emit("embedding", (), "residual", "tokens", self.spec.hidden_size, "fp32", (weight,))
            self.meaning[node.output[0]] = out
        elif index == "logit_index" and isinstance(table, _Sum):
            inputs = (table.residual, table.delta)
            out = self._emit("gather_rows", inputs, "logit_rows", "logits", self.spec.hidden_size, "fp32")
            self.meaning[node.output[0]] = out
        else:
            raise self._unknown(node)

    def _norm(self, node: onnx.NodeProto) -> None:
        source = self.meaning[node.input[0]]
        gain = self._weight(_plan_name(node.input[1]), (node.input[1],), "fp32")
        eps = {"eps": float(_attribute(node, "epsilon") or 0.0)}
        width = self.spec.hidden_size
        if isinstance(source, _Sum):
            inputs = (source.residual, source.delta)
            out = self._emit("add_rms_norm", inputs, "hidden", "tokens", width, self.dtype, (gain,), eps)
            self.meaning[node.input[0]] = source.residual  # the kernel leaves the sum in the residual
        elif isinstance(source, _Ref):
            rows = self.values[source.name].rows
            name = "hidden" if rows == "tokens" else "logit_hidden"
            out = self._emit("rms_norm", (source,), name, rows, width, self.dtype, (gain,), eps)
        else:
            raise self._unknown(node)
        self.meaning[node.output[0]] = out

    def _linear(self, node: onnx.NodeProto) -> None:
        """One call for all projections of the same input, their weights stacked in graph order."""
        source = self.meaning[node.input[0]]
        if not isinstance(source, _Ref) or _attribute(node, "transB") != 1 or len(node.input) > 2:
            raise self._unknown(node)
        group = [n for n in self.consumers[node.input[0]] if n.op_type == "Gemm"]
        parts = tuple(n.input[1] for n in group)
        widths = [self._num_rows(part) for part in parts]
        rows = self.values[source.name].rows
        role = {3: "qkv", 2: "gate_up", 1: "logits" if rows == "logits" else "delta"}.get(len(group))
        if role is None:
            raise self._unknown(node)
        name = "lm_head" if role == "logits" else _fused_name(parts)
        kind = self.weight_dtype.head_dtype if role == "logits" else self.weight_dtype
        weights = self._product_weights(name, parts, kind)
        source = self._quantize(source, kind)
        dtype = "fp32" if role == "logits" else self.dtype
        out = self._emit("linear", (source,), role, rows, sum(widths), dtype, weights)
        offset = 0
        for gemm, width in zip(group, widths, strict=True):
            self.meaning[gemm.output[0]] = _Ref(out.name, out.version, offset, width)
            offset += width

    def _product_weights(self, name: str, parts: tuple[str, ...], kind: WeightDtype) -> tuple[str, ...]:
        if kind is WeightDtype.INT8:
            recipes = [
                WeightRecipe(name, parts, "int8", "int8.codes"),
                WeightRecipe(f"{name}.scale", parts, "fp32", "int8.scale"),
            ]
        elif kind is WeightDtype.INT4:
            recipes = [
                WeightRecipe(name, parts, "uint8", "int4.codes"),
                WeightRecipe(f"{name}.scale", parts, "fp16", "int4.scale"),
                WeightRecipe(f"{name}.zero", parts, "fp16", "int4.zero"),
            ]
        else:
            recipes = [WeightRecipe(name, parts, kind.value)]
        return tuple(map(self._stored, recipes))

    def _quantize(self, source: _Ref, kind: WeightDtype) -> _Ref:
        """Rows of a value as products with a type of weights want them."""
        dtype = kind.quantized_rows
        if dtype is None:
            return source
        if source not in self.quantized:
            rows = self.values[source.name].rows
            out = self._emit("quantize", (source,), f"{source.name}_{dtype}", rows, source.width, dtype)
            self.quantized[source] = out
        return self.quantized[source]

    def _rotate(self, node: onnx.NodeProto) -> None:
        source = self.meaning[node.input[0]]
        if not isinstance(source, _Ref):
            raise self._unknown(node)
        for table in node.input[1:3]:
            self._weight(table, (table,), "fp32")
        self.meaning[node.output[0]] = _Rotated(source)

    def _kv_write(self, node: onnx.NodeProto) -> None:
        key, value = self.meaning[node.input[0]], self.meaning[node.input[1]]
        spec, layer = self.spec, self.num_layers
        if not (isinstance(key, _Rotated) and isinstance(value, _Ref)):
            raise self._unknown(node)
        places = (key.of.name, key.of.version, key.of.offset, value.name, value.version, value.offset)
        if places != (value.name, value.version, spec.q_size, value.name, value.version, spec.q_size + spec.kv_size):
            raise self._unknown(node)  # the kernel reads one row of q | k | v
        qkv = _Ref(value.name, value.version, 0, spec.q_size + 2 * spec.kv_size)
        query = self._emit(
            "rope_kv_write", (qkv,), "query", "tokens", spec.q_size, "fp32", ("rope_cos", "rope_sin"), {"layer": layer}
        )
        self.num_layers += 1
        for name in node.output:
            self.meaning[name] = _Written(layer, query)

    def _attention(self, node: onnx.NodeProto) -> None:
        query, pool = self.meaning[node.input[0]], self.meaning[node.input[1]]
        scale = _attribute(node, "scale")
        if not (isinstance(query, _Rotated) and isinstance(pool, _Written)):
            raise self._unknown(node)
        if query.of != _Ref(query.of.name, query.of.version, 0, self.spec.q_size):
            raise self._unknown(node)  # the kernel reads one row of q | k | v
        if scale is None or not math.isclose(scale, self.spec.head_dim**-0.5, rel_tol=1e-6):
            raise self._unknown(node)  # the rotation kernel folds 1/sqrt(head_dim) into the query
        width = self.spec.q_size
        out = self._emit(
            "paged_attention", (pool.query,), "context", "tokens", width, self.dtype, (), {"layer": pool.layer}
        )
        self.meaning[node.output[0]] = out

    def _sigmoid(self, node: onnx.NodeProto) -> None:
        source = self.meaning[node.input[0]]
        if not isinstance(source, _Ref):
            raise self._unknown(node)
        self.meaning[node.output[0]] = _Gate(source, multiplied=False)

    def _mul(self, node: onnx.NodeProto) -> None:
        by_kind = sorted((self.meaning[name] for name in node.input), key=lambda m: isinstance(m, _Gate))
        plain, gate = by_kind
        if not (isinstance(plain, _Ref) and isinstance(gate, _Gate)):
            raise self._unknown(node)
        if not gate.multiplied and plain == gate.of:
            self.meaning[node.output[0]] = _Gate(plain, multiplied=True)
            return
        width = self.spec.intermediate_size
        up = _Ref(gate.of.name, gate.of.version, width, width)
        if not gate.multiplied or gate.of.offset != 0 or plain != up:
            raise self._unknown(node)
        gate_up = _Ref(up.name, up.version, 0, 2 * width)
        self.meaning[node.output[0]] = self._emit("swiglu", (gate_up,), "activated", "tokens", width, self.dtype)

    def _add(self, node: onnx.NodeProto) -> None:
        left, right = (self.meaning[name] for name in node.input)
        if not (isinstance(left, _Ref) and isinstance(right, _Ref)):
            raise self._unknown(node)
        if (left.name, right.name) != ("residual", "delta"):
            raise self._unknown(node)
        self.meaning[node.output[0]] = _Sum(left, right)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _emit(
        self,
        op: str,
        inputs: tuple[_Ref, ...],
        out: str,
        rows: Rows,
        width: int,
        dtype: str,
        weights: tuple[str, ...] = (),
        attributes: dict[str, int | float] | None = None,
    ) -> _Ref:
        """Append a call. Values are named by role and overwritten layer after layer; a stale read is a compiler bug."""
        for ref in inputs:
            if self.versions[ref.name] != ref.version:
                raise LoweringError(f"{op} reads an overwritten value {ref.name!r}; this is a bug of the compiler")
        value = Value(out, rows, width, dtype)
        if self.values.setdefault(out, value) != value:
            raise LoweringError(f"value {out!r} changes shape between layers; this is a bug of the compiler")
        self.versions[out] += 1
        self.calls.append(Call(op, tuple(ref.name for ref in inputs), (out,), weights, attributes or {}))
        return _Ref(out, self.versions[out], 0, width)

    def _weight(self, name: str, parts: tuple[str, ...], dtype: str) -> str:
        return self._stored(WeightRecipe(name, parts, dtype))

    def _stored(self, recipe: WeightRecipe) -> str:
        """Ask for a tensor of the plan; equal contents are stored once, under the first name (a tied head)."""
        return self.weights.setdefault((recipe.parts, recipe.dtype, recipe.piece), recipe).name

    def _num_rows(self, initializer: str) -> int:
        for tensor in self.graph.initializer:
            if tensor.name == initializer:
                return int(tensor.dims[0])
        raise LoweringError(f"the graph has no weight {initializer!r}")

    def _check_output(self) -> None:
        logits = self.meaning.get("logits")
        if not isinstance(logits, _Ref) or logits.name != "logits" or self.num_layers != self.spec.num_layers:
            raise LoweringError("the graph does not end in logits of the model it was exported for")

    def _unknown(self, node: onnx.NodeProto) -> LoweringError:
        return LoweringError(f"the cpu target does not know this use of {node.op_type} (node {node.name!r})")


def _attribute(node: onnx.NodeProto, name: str) -> float | int | None:
    for attribute in node.attribute:
        if attribute.name == name:
            return attribute.f if attribute.type == 1 else int(attribute.i)  # 1 is AttributeProto.FLOAT
    return None


def _plan_name(initializer: str) -> str:
    """``model.layers.3.input_layernorm.weight`` -> ``layers.3.input_layernorm``."""
    return initializer.removeprefix("model.").removesuffix(".weight")


def _fused_name(parts: tuple[str, ...]) -> str:
    """Name of stacked projections: their common prefix and what differs, e.g. ``layers.0.self_attn.q_k_v_proj``."""
    names = [_plan_name(part) for part in parts]
    if len(names) == 1:
        return names[0]
    prefix, _, _ = names[0].rpartition(".")
    kinds = [name.rpartition(".")[2].removesuffix("_proj") for name in names]
    return f"{prefix}.{'_'.join(kinds)}_proj"
