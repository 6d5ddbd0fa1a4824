"""ONNX bodies of the ``trtcb`` operators: their portable meaning, which any ONNX runtime can execute.

A body is written for the element types of one graph and for one KV format; ``block_size`` and ``scale`` stay
attributes. ``kv_format`` is declared for the kernels' sake and equals the format the body was written for. The rules
that bodies follow are stated in :mod:`trtcb.plugins.schema`.
"""

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from trtcb.plugins.ports import GraphDtype
from trtcb.plugins.reference import FINITE_LIMIT, QUANT_MAX, SCALE_FLOOR
from trtcb.plugins.schema import (
    BLOCK_SIZE,
    DOMAIN,
    SCALE,
    Attribute,
    OpSchema,
    attention_op,
    fresh_attention_op,
    fresh_op,
    write_op,
)
from trtcb.spec import KVDtype

OPSET = 23
"""The first with RMSNormalization, RotaryEmbedding and Attention."""

ELEMENT_TYPES = {
    "fp32": TensorProto.FLOAT,
    "bf16": TensorProto.BFLOAT16,
    "fp16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}
"""ONNX element type of each dtype name."""

_ATTRIBUTE_TYPES = {"int": AttributeProto.INT, "float": AttributeProto.FLOAT, "str": AttributeProto.STRING}


def functions_for(
    dtype: GraphDtype, kv_dtype: KVDtype, *, deferred: bool = False
) -> tuple[onnx.FunctionProto, onnx.FunctionProto]:
    """Return the bodies of a graph that computes in ``dtype`` and caches in ``kv_dtype``: storing, and attending."""
    if deferred:
        return _fresh_function(kv_dtype), _fresh_attention_function(dtype, kv_dtype)
    return _write_function(kv_dtype), _attention_function(dtype, kv_dtype)


class _Body:
    """Collects the nodes of one function. No two values share a name, which TensorRT's inliner needs."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []

    def op(self, kind: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        out = out or f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [out], **attributes))
        return out

    def op_with(self, refs: Mapping[str, Attribute], kind: str, *inputs: str, **attributes: Any) -> str:
        """Append a node whose attributes named in ``refs`` take the values of the function's own attributes."""
        out = self.op(kind, *inputs, **attributes)
        for name, source in refs.items():
            reference = AttributeProto(name=name, type=_ATTRIBUTE_TYPES[source.kind], ref_attr_name=source.name)
            self._nodes[-1].attribute.append(reference)
        return out

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike) -> str:
        tensor = numpy_helper.from_array(np.asarray(value, dtype))
        return self.op("Constant", value=tensor)

    def f32(self, value: npt.ArrayLike) -> str:
        return self.constant(value, np.float32)

    def i64(self, value: npt.ArrayLike) -> str:
        return self.constant(value, np.int64)

    def cast(self, x: str, dtype: str, out: str | None = None) -> str:
        return self.op("Cast", x, out=out, to=ELEMENT_TYPES[dtype])

    def int32(self, x: str) -> str:
        return self.cast(x, "int32")

    def clip(self, x: str, limit: float) -> str:
        """Saturate fp32 ``x`` at ``+-limit``."""
        return self.op("Min", self.op("Max", x, self.f32(-limit)), self.f32(limit))

    def unsqueeze(self, x: str, axis: int) -> str:
        return self.op("Unsqueeze", x, self.i64([axis]))

    def size(self, x: str, axis: int) -> str:
        """Return the scalar length of an axis."""
        return self.op("Squeeze", self.op("Shape", x, start=axis, end=axis + 1), self.i64([0]))

    def arange(self, length: str) -> str:
        return self.int32(self.op("Range", self.i64(0), length, self.i64(1)))

    def function(self, schema: OpSchema) -> onnx.FunctionProto:
        return helper.make_function(
            DOMAIN,
            schema.name,
            schema.input_names,
            schema.output_names,
            self._nodes,
            [helper.make_opsetid("", OPSET)],
            attributes=schema.attribute_names,
        )


# -- writing -----------------------------------------------------------------------------------------------------------


def _write_function(kv_dtype: KVDtype) -> onnx.FunctionProto:
    b = _Body()
    slots = b.cast(b.unsqueeze("slot_mapping", -1), "int64")
    for x in ("k", "v"):
        values, scales = _encode(b, x, kv_dtype)
        if scales is not None:
            b.op("ScatterND", f"{x}_scale_pool", slots, scales, out=f"{x}_scale_pool_out")
        b.op("ScatterND", f"{x}_pool", slots, values, out=f"{x}_pool_out")
    return b.function(write_op(kv_dtype))


def _fresh_function(kv_dtype: KVDtype) -> onnx.FunctionProto:
    b = _Body()
    for x in ("k", "v"):
        values, scales = _encode(b, x, kv_dtype)
        b.op("Identity", values, out=f"{x}_new")
        if scales is not None:
            b.op("Identity", scales, out=f"{x}_scale_new")
    return b.function(fresh_op(kv_dtype))


def _encode(b: _Body, x: str, kv_dtype: KVDtype) -> tuple[str, str | None]:
    """``x [T, HK, D]`` as a pool holds it, and its scales ``[T, HK]`` if that has any."""
    if kv_dtype.is_quantized:
        return _quantise(b, x, kv_dtype)
    return b.cast(_finite(b, x, FINITE_LIMIT[kv_dtype]), kv_dtype.value), None


def _finite(b: _Body, x: str, limit: float) -> str:
    """Any float tensor as fp32, NaN replaced by 0, saturated at ``+-limit``."""
    x = b.cast(x, "fp32")
    return b.clip(b.op("Where", b.op("IsNaN", x), b.f32(0.0), x), limit)


def _quantise(b: _Body, x: str, kv_dtype: KVDtype) -> tuple[str, str]:
    """``x [T, HK, D]`` -> raw bytes ``[T, HK, D]`` and fp16 scales ``[T, HK]``."""
    x = _finite(b, x, FINITE_LIMIT[kv_dtype])
    amax = b.op("ReduceMax", b.op("Abs", x), b.i64([-1]), keepdims=0)
    scale = b.op("Max", b.op("Div", amax, b.f32(QUANT_MAX[kv_dtype])), b.f32(SCALE_FLOOR))
    stored = b.cast(scale, "fp16")
    y = b.op("Div", x, b.unsqueeze(b.cast(stored, "fp32"), -1))
    encode = {KVDtype.INT8: _encode_int8, KVDtype.FP8: _encode_e4m3}[kv_dtype]
    return b.cast(encode(b, y), "int8"), stored


def _encode_int8(b: _Body, y: str) -> str:
    return b.clip(b.op("Round", y), QUANT_MAX[KVDtype.INT8])  # Round is half to even


def _encode_e4m3(b: _Body, y: str) -> str:
    """Form the e4m3fn code of fp32 ``y`` as a signed byte, by arithmetic: float8 tensors have few kernels anywhere.

    With exponent ``e >= -6`` and ``m = round(|y| * 2**(3 - e))`` the code is ``(e + 6) * 8 + m``. It is continuous
    where the exponent changes, so a logarithm that errs by one ulp there, and a mantissa that rounds up to 16, do no
    harm.
    """
    magnitude = b.op("Min", b.op("Abs", y), b.f32(QUANT_MAX[KVDtype.FP8]))
    log2 = b.op("Mul", b.op("Log", b.op("Max", magnitude, b.f32(2.0**-9))), b.f32(1.0 / math.log(2.0)))
    exponent = b.op("Max", b.op("Floor", log2), b.f32(-6.0))
    mantissa = b.op("Round", b.op("Mul", magnitude, b.op("Pow", b.f32(2.0), b.op("Sub", b.f32(3.0), exponent))))
    code = b.op("Add", b.op("Mul", b.op("Add", exponent, b.f32(6.0)), b.f32(8.0)), mantissa)
    negative = b.op("Less", y, b.f32(0.0))  # -0.0 stores +0.0
    return b.op("Where", negative, b.op("Sub", code, b.f32(128.0)), code)


# -- attending ---------------------------------------------------------------------------------------------------------


def _attention_function(dtype: GraphDtype, kv_dtype: KVDtype) -> onnx.FunctionProto:
    """Gather each sequence's pages, pad its queries to ``S``, attend densely under a mask, pack the result again."""
    b = _Body()
    first, rows = _padded_rows(b)
    end = b.op("Slice", "cu_q", b.i64([1]), b.i64([np.iinfo(np.int64).max]), b.i64([0]))
    last = b.op("Gather", "positions", b.op("Sub", end, b.constant(1, np.int32)), axis=0)
    slots, column = _slots_of_pages(b, last)
    position = b.op("Gather", "positions", rows, axis=0)
    mask = b.op("LessOrEqual", column, b.unsqueeze(position, -1))  # [B, S, L]
    keys, values = (_read(b, f"{x}_pool", f"{x}_scale_pool", slots, dtype, kv_dtype) for x in ("k", "v"))
    _attend(b, rows, first, keys, values, mask)
    return b.function(attention_op(kv_dtype))


def _fresh_attention_function(dtype: GraphDtype, kv_dtype: KVDtype) -> onnx.FunctionProto:
    """Do the same where a sequence's rows of this step are not in its pages yet: they follow them, padded to ``S``."""
    b = _Body()
    first, rows = _padded_rows(b)
    past = b.op("Gather", "positions", first, axis=0)  # tokens of each sequence in the pools, [B]
    slots, column = _slots_of_pages(b, b.op("Sub", past, b.constant(1, np.int32)))
    is_past = b.op("Less", column, b.unsqueeze(past, -1))  # [B, L]
    is_earlier = b.op("LessOrEqual", "q_range", b.unsqueeze("q_range", -1))  # [S, S]
    shape = b.op("Shape", rows)
    mask = b.op(
        "Concat",
        b.op("Expand", b.unsqueeze(is_past, 1), b.op("Concat", shape, b.op("Shape", column), axis=0)),
        b.op("Expand", is_earlier, b.op("Concat", shape, b.op("Shape", "q_range"), axis=0)),
        axis=2,
    )
    keys, values = (_past_and_new(b, x, slots, is_past, rows, dtype, kv_dtype) for x in ("k", "v"))
    _attend(b, rows, first, keys, values, mask)
    return b.function(fresh_attention_op(kv_dtype))


def _past_and_new(b: _Body, x: str, slots: str, is_past: str, rows: str, dtype: GraphDtype, kv_dtype: KVDtype) -> str:
    """Keys or values of the pages, zero where nothing of the sequence is, then of the step: ``[B, L + S, HK, D]``.

    A sequence without a past has no slot of its own to read in the place of what others left.
    """
    past = _read(b, f"{x}_pool", f"{x}_scale_pool", slots, dtype, kv_dtype)
    is_past = b.unsqueeze(b.unsqueeze(is_past, -1), -1)
    past = b.op("Where", is_past, past, b.cast(b.f32(0.0), dtype))
    return b.op("Concat", past, _read(b, f"{x}_new", f"{x}_scale_new", rows, dtype, kv_dtype), axis=1)


def _attend(b: _Body, rows: str, first: str, keys: str, values: str, mask: str) -> None:
    """Attend densely with the padded ``rows`` of ``q``, and pack the result into ``context``."""
    out = b.op_with(
        {"scale": SCALE},
        "Attention",
        _heads_first(b, b.op("Gather", "q", rows, axis=0)),
        _heads_first(b, keys),
        _heads_first(b, values),
        b.unsqueeze(mask, 1),
    )
    offset = b.op("Sub", b.arange(b.size("q", 0)), b.op("Gather", first, "token_sequence", axis=0))
    place = b.op("Concat", b.unsqueeze("token_sequence", -1), b.unsqueeze(offset, -1), axis=1)
    b.op("GatherND", _heads_first(b, out), b.cast(place, "int64"), out="context")


def _heads_first(b: _Body, x: str) -> str:
    """``[B, S, H, D]`` <-> ``[B, H, S, D]``."""
    return b.op("Transpose", x, perm=[0, 2, 1, 3])


def _slots_of_pages(b: _Body, last: str) -> tuple[str, str]:
    """Slots of all pages of all sequences ``[B, L]`` with ``L = MB * block_size``, and the positions they hold ``[L]``.

    Places behind a sequence's ``last [B]`` position repeat its first slot. They are masked, but what others left there
    may be so large that the scores overflow to NaN, which no mask hides.
    """
    block_size = b.op_with({"value_int": BLOCK_SIZE}, "Constant")
    start = b.op("Mul", "block_tables", b.int32(block_size))
    slots = b.op("Add", b.unsqueeze(start, -1), b.arange(block_size))
    slots = b.op("Reshape", slots, b.i64([0, -1]))
    column = b.arange(b.size(slots, 1))
    used = b.op("LessOrEqual", column, b.unsqueeze(last, -1))
    own = b.op("Slice", slots, b.i64([0]), b.i64([1]), b.i64([1]))
    return b.op("Where", used, slots, own), column


def _padded_rows(b: _Body) -> tuple[str, str]:
    """First row of each sequence ``[B]``, and the row of every query padded to ``[B, S]``.

    Padding runs into the next sequence's rows, or repeats the last one: what it computes is finite and never read.
    """
    first = b.op("Slice", "cu_q", b.i64([0]), b.i64([-1]), b.i64([0]))
    last = b.int32(b.op("Sub", b.op("Shape", "q", start=0, end=1), b.i64([1])))
    return first, b.op("Min", b.op("Add", b.unsqueeze(first, -1), "q_range"), last)


def _read(b: _Body, stored: str, scale: str, places: str, dtype: GraphDtype, kv_dtype: KVDtype) -> str:
    """Keys or values at ``places [B, N]`` of ``stored`` in the graph's type, ``[B, N, HK, D]``."""
    raw = b.op("Gather", stored, places, axis=0)
    if kv_dtype.is_quantized:
        scales = b.cast(b.op("Gather", scale, places, axis=0), "fp32")
        value = b.op("Mul", _decode(b, raw, kv_dtype), b.unsqueeze(scales, -1))
    elif kv_dtype.value == dtype:
        return raw
    else:
        value = b.cast(raw, "fp32")
    # The largest stored numbers may exceed the graph's type, if only by a scale's rounding: no infinity may arise.
    return b.cast(value if dtype == "fp32" else b.clip(value, FINITE_LIMIT[KVDtype(dtype)]), dtype)


def _decode(b: _Body, raw: str, kv_dtype: KVDtype) -> str:
    """Raw bytes as fp32, before their scale."""
    if kv_dtype is KVDtype.INT8:
        return b.cast(raw, "fp32")
    codes = np.arange(-128, 128, dtype=np.int8).view(ml_dtypes.float8_e4m3fn)
    table = np.nan_to_num(codes.astype(np.float32))  # the two NaN codes are never written
    return b.op("Gather", b.f32(table), b.op("Add", b.int32(raw), b.constant(128, np.int32)))
