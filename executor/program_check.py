"""Checks a plan's program before it is bound: the kernels trust every width and index they are given.

A plan's hashes only say that it is what was written. Whether its call list fits its model, its weights and the kernels
of this version is decided here, call by call, against the table of operators in :mod:`trtcb.program`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtcb.errors import PlanError
from trtcb.plan_format import PlanHeader, TensorInfo
from trtcb.plugins.cpu.grouped import GROUP
from trtcb.program import Call, Program, Value
from trtcb.spec import WeightDtype

if TYPE_CHECKING:
    from trtcb.plan import Plan

MAX_VALUES = 64
MAX_CALLS_PER_LAYER = 16
MAX_ATTRIBUTE = 4096  # a layer's number; an epsilon is far below

Kind = tuple[int, str]  # width and type of a value
Weight = tuple[tuple[int, ...], str]  # shape and type of a tensor

_ROWS = frozenset({"rms_norm", "add_rms_norm", "paged_attention", "swiglu"})
_SOURCES: Mapping[str, tuple[frozenset[str], ...]] = {
    "rms_norm": (frozenset({"embedding", "gather_rows"}),),
    "add_rms_norm": (frozenset({"embedding"}), frozenset({"linear"})),
    "quantize": (_ROWS,),
    "linear": (_ROWS | {"quantize"},),
    "rope_kv_write": (frozenset({"linear"}),),
    "paged_attention": (frozenset({"rope_kv_write"}),),
    "swiglu": (frozenset({"linear"}),),
    "gather_rows": (frozenset({"embedding"}), frozenset({"linear"})),
}
"""What may have written an operator's inputs: an engine may keep products elsewhere than all other values."""


@dataclass(frozen=True, slots=True)
class _Signature:
    """What an operator takes and gives. ``rows`` is what its output has, None if the same as its first input."""

    inputs: tuple[Kind, ...]
    output: Kind
    weights: tuple[Weight, ...] = ()
    rows: str | None = None
    attribute: str | None = None


def checked_program(plan: Plan) -> Program:
    """Read a plan's program; raises :class:`PlanError` unless it is one that :func:`check_program` lets pass."""
    try:
        program = Program.from_json(json.loads(bytes(plan.section("program"))))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlanError(f"section 'program' of {plan.path} is not a call list ({error}); rebuild the plan") from error
    check_program(program, plan.header, plan.tensors)
    return program


def check_program(program: Program, header: PlanHeader, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise :class:`PlanError`, naming the call, unless the program is safe to run and ends in the model's logits."""
    signatures = _signatures(header)
    if len(program.values) > MAX_VALUES or len(program.calls) > MAX_CALLS_PER_LAYER * (header.model.num_layers + 1):
        raise _fault("it is longer than any model needs")
    values = {value.name: value for value in program.values}
    if len(values) != len(program.values):
        raise _fault("two values have the same name")
    writers: dict[str, str] = {}
    layers: dict[str, list[int]] = {"rope_kv_write": [], "paged_attention": []}
    for index, call in enumerate(program.calls):
        where = f"call {index} ({call.op!r})"
        if not {*call.inputs, *call.outputs} <= values.keys() or len(call.outputs) != 1:
            raise _fault(f"{where} names a value that the program does not have")
        if not writers.keys() >= set(call.inputs):
            raise _fault(f"{where} reads a value before it is written")
        signature = _sized(call, values, header) if call.op in ("linear", "quantize") else signatures.get(call.op)
        if signature is None:
            raise _fault(f"{where} is not an operator of this version, or not of these widths")
        _check_call(where, call, signature, values, tensors)
        _check_writers(where, call, writers)
        writers[call.outputs[0]] = call.op
        if call.op in layers:
            layers[call.op].append(int(call.attributes["layer"]))
    if any(found != list(range(header.model.num_layers)) for found in layers.values()):
        raise _fault("the layers are not each written and attended to once, in order")
    if writers.keys() != values.keys():
        raise _fault("it has a value that no call writes")
    last = values.get("logits")
    if last != Value("logits", "logits", header.model.vocab_size, "fp32") or program.calls[-1].outputs != ("logits",):
        raise _fault("it does not end in the logits of the model")


def _signatures(header: PlanHeader) -> dict[str, _Signature]:
    model, weights = header.model, WeightDtype(header.weight_dtype)
    act = weights.activation_dtype
    residual, hidden = (model.hidden_size, "fp32"), (model.hidden_size, act)
    query, inner = (model.q_size, "fp32"), model.intermediate_size
    gain = (((model.hidden_size,), "fp32"),)
    table = (((header.limits.max_seq_len, model.head_dim // 2), "fp32"),)
    vocabulary = (((model.vocab_size, model.hidden_size), weights.table_dtype),)
    return {
        "embedding": _Signature((), residual, vocabulary, rows="tokens"),
        "rms_norm": _Signature((residual,), hidden, gain, attribute="eps"),
        "add_rms_norm": _Signature((residual, hidden), hidden, gain, rows="tokens", attribute="eps"),
        "rope_kv_write": _Signature(
            ((model.q_size + 2 * model.kv_size, act),), query, table * 2, rows="tokens", attribute="layer"
        ),
        "paged_attention": _Signature((query,), (model.q_size, act), rows="tokens", attribute="layer"),
        "swiglu": _Signature(((2 * inner, act),), (inner, act), rows="tokens"),
        "gather_rows": _Signature((residual, hidden), residual, rows="logits"),
    }


def _sized(call: Call, values: Mapping[str, Value], header: PlanHeader) -> _Signature | None:
    """The operators of several widths; None for widths that no layer of the model has."""
    model, weights = header.model, WeightDtype(header.weight_dtype)
    width = values[call.inputs[0]].width if call.inputs else 0
    out = values[call.outputs[0]]
    is_head = out.name == "logits"
    kind = weights.head_dtype if out.rows == "logits" else weights
    rounded = kind.quantized_rows
    if kind is WeightDtype.INT4 and width % GROUP:
        return None
    if call.op == "quantize":
        if rounded is None or width not in (model.hidden_size, model.q_size, model.intermediate_size):
            return None
        return _Signature(((width, "fp32"),), (width, rounded))
    if (out.width, width) not in (((model.vocab_size, model.hidden_size),) if is_head else model.layer_shapes):
        return None
    act = weights.activation_dtype
    return _Signature(
        ((width, rounded or act),),
        (out.width, "fp32" if is_head else act),
        _product_weights(out.width, width, kind),
        rows="logits" if is_head else "tokens",
    )


def _product_weights(width: int, depth: int, weights: WeightDtype) -> tuple[Weight, ...]:
    """What a product multiplies with."""
    if weights is WeightDtype.INT8:
        return (((width, depth), "int8"), ((width,), "fp32"))
    if weights is WeightDtype.INT4:
        factors: Weight = ((width, depth // GROUP), "fp16")
        return (((width, depth // 2), "uint8"), factors, factors)
    return (((width, depth), weights.value),)


def _check_call(
    where: str, call: Call, signature: _Signature, values: Mapping[str, Value], tensors: Mapping[str, TensorInfo]
) -> None:
    inputs = [values[name] for name in call.inputs]
    out = values[call.outputs[0]]
    if tuple((value.width, value.dtype) for value in inputs) != signature.inputs:
        raise _fault(f"{where} reads values of another width or type than the model has")
    if (out.width, out.dtype) != signature.output or out.name in call.inputs:
        raise _fault(f"{where} writes a value of another width or type than the model has")
    rows = signature.rows or (inputs[0].rows if inputs else "tokens")
    source = "tokens" if call.op == "gather_rows" else rows
    if out.rows != rows or any(value.rows != source for value in inputs):
        raise _fault(f"{where} mixes values of tokens and of logits")
    if any(name not in tensors for name in call.weights):
        raise _fault(f"{where} names a weight that the plan does not have")
    weights = tuple((tensors[name].shape, tensors[name].dtype) for name in call.weights)
    if weights != signature.weights:
        raise _fault(f"{where} has weights of another shape or type than the model's")
    if set(call.attributes) != ({signature.attribute} if signature.attribute else set()):
        raise _fault(f"{where} lacks an attribute, or has one too many")
    for number in call.attributes.values():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < MAX_ATTRIBUTE:
            raise _fault(f"{where} has an attribute that is not a number from 0 to {MAX_ATTRIBUTE}")


def _check_writers(where: str, call: Call, writers: Mapping[str, str]) -> None:
    sources = _SOURCES.get(call.op, ())
    if any(writers[name] not in source for name, source in zip(call.inputs, sources, strict=True)):
        raise _fault(f"{where} reads what another operator wrote than in the model")
    out = call.outputs[0]
    if out in writers and (writers[out] == "linear") != (call.op == "linear"):
        raise _fault(f"{where} shares its output with an operator of another kind")


def _fault(what: str) -> PlanError:
    return PlanError(f"section 'program' of the plan does not fit this trtcb: {what}; rebuild it with `trtcb build`")
