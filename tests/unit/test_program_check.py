"""A call list that lies is refused before a kernel can follow it out of bounds."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from trtcb.builder.export import build_graph
from trtcb.builder.lower import lower
from trtcb.errors import PlanError
from trtcb.executor.program_check import check_program
from trtcb.plan_format import PlanHeader, TensorInfo
from trtcb.program import Call, Program, Value
from trtcb.spec import BuildLimits, KVDtype, ModelSpec, WeightDtype

SPEC = ModelSpec("tiny", 64, 128, 2, 4, 2, 16, 256, 128)
HEADER = PlanHeader("cpu", {}, SPEC, "bf16", KVDtype.FP8, BuildLimits(max_seq_len=128), {}, {})


def compiled(weight_dtype: WeightDtype) -> tuple[Program, dict[str, TensorInfo]]:
    graph = build_graph(SPEC, dtype=weight_dtype.table_dtype, kv_dtype=KVDtype.FP8, block_size=32, max_positions=128)
    shapes = {t.name: tuple(t.dims) for t in graph.graph.initializer}
    lowered = lower(graph, SPEC, weight_dtype)
    tensors = {}
    for recipe in lowered.weights:
        parts = [shapes[part] for part in recipe.parts]
        num_rows = sum(part[0] for part in parts)
        shape = recipe.shape((num_rows, *parts[0][1:]))
        tensors[recipe.name] = TensorInfo(recipe.name, recipe.dtype, shape, 0)
    return lowered.program, tensors


PROGRAM, TENSORS = compiled(WeightDtype.BF16)


def index_of(op: str) -> int:
    return next(i for i, call in enumerate(PROGRAM.calls) if call.op == op)


def with_call(which: str, **changes: Any) -> Program:
    calls = list(PROGRAM.calls)
    calls[index_of(which)] = replace(calls[index_of(which)], **changes)
    return replace(PROGRAM, calls=tuple(calls))


def with_value(name: str, **changes: Any) -> Program:
    return replace(PROGRAM, values=tuple(replace(v, **changes) if v.name == name else v for v in PROGRAM.values))


@pytest.mark.parametrize("weight_dtype", WeightDtype)
def test_what_the_compiler_makes_is_accepted(weight_dtype):
    program, tensors = compiled(weight_dtype)
    check_program(program, replace(HEADER, weight_dtype=weight_dtype.value), tensors)


@pytest.mark.parametrize(
    "program",
    [
        with_call("swiglu", op="erf"),
        with_call("swiglu", inputs=("nothing",)),
        with_call("swiglu", inputs=()),
        with_call("swiglu", inputs=("qkv",)),
        with_call("swiglu", outputs=("hidden",)),
        with_call("swiglu", outputs=()),
        with_call("swiglu", outputs=("activated", "hidden")),
        with_call("linear", weights=("nothing",)),
        with_call("linear", weights=()),
        with_call("linear", weights=("lm_head",)),
        with_call("linear", outputs=("gate_up",)),
        with_call("linear", inputs=()),
        with_call("embedding", weights=("rope_cos",)),
        with_call("rms_norm", attributes={}),
        with_call("rms_norm", attributes={"eps": float("nan")}),
        with_call("rms_norm", attributes={"eps": 10**400}),
        replace(PROGRAM, values=(*PROGRAM.values, *(Value(f"v{i}", "tokens", 1, "fp32") for i in range(64)))),
        replace(PROGRAM, calls=PROGRAM.calls * 5),
        with_call("rms_norm", attributes={"eps": "1"}),
        with_call("rms_norm", attributes={"eps": 1e-5, "layer": 0}),
        with_call("rope_kv_write", attributes={"layer": 2}),
        with_call("rope_kv_write", attributes={"layer": -1}),
        with_call("paged_attention", attributes={"layer": 1}),
        with_call("paged_attention", outputs=("query",)),
        with_call("gather_rows", inputs=("residual", "hidden", "delta")),
        with_call("gather_rows", outputs=("residual",)),
        with_value("qkv", width=1 << 40),
        with_value("logits", width=SPEC.vocab_size + 1),
        with_value("logits", rows="tokens"),
        with_value("logit_rows", rows="tokens"),
        with_value("hidden", dtype="fp32"),
        replace(PROGRAM, calls=PROGRAM.calls[:-1]),
        replace(PROGRAM, calls=()),
        replace(PROGRAM, calls=PROGRAM.calls[1:]),
        replace(PROGRAM, values=(*PROGRAM.values, Value("logits", "logits", 1, "fp32"))),
        replace(PROGRAM, values=(*PROGRAM.values, Value("unused", "tokens", 1 << 50, "bf16"))),
        replace(PROGRAM, values=(*PROGRAM.values, Value("unused", "tokens", 1, "fp99"))),
        replace(PROGRAM, calls=(*PROGRAM.calls, Call("swiglu", ("gate_up",), ("activated",)))),
    ],
)
def test_a_lie_is_refused(program):
    with pytest.raises(PlanError, match="rebuild"):
        check_program(program, HEADER, TENSORS)


def added(program: Program, after: str, calls: Sequence[Call], values: Sequence[Value]) -> Program:
    """``program`` with calls behind the first one that writes ``after``."""
    at = 1 + next(i for i, call in enumerate(program.calls) if call.outputs == (after,))
    return Program((*program.calls[:at], *calls, *program.calls[at:]), (*program.values, *values))


INT8_LIES = [
    pytest.param(
        [Call("quantize", ("logit_rows",), ("new",))], [Value("new", "logits", 64, "int8")], id="logits' rows"
    ),
    pytest.param([Call("quantize", ("logit_rows",), ("new",))], [Value("new", "tokens", 64, "int8")], id="mixed rows"),
    pytest.param([Call("quantize", ("context",), ("new",))], [Value("new", "tokens", 64, "fp32")], id="not int8"),
    pytest.param([Call("quantize", ("context",), ("new",))], [Value("new", "tokens", 32, "int8")], id="narrower"),
    pytest.param([Call("quantize", ("delta",), ("new",))], [Value("new", "tokens", 64, "int8")], id="of a product"),
    pytest.param([Call("quantize", ("hidden_int8",), ("new",))], [Value("new", "tokens", 64, "int8")], id="twice"),
    pytest.param([Call("quantize", ("hidden",), ("hidden",))], [], id="in place"),
    pytest.param([Call("quantize", (), ("new",))], [Value("new", "tokens", 64, "int8")], id="of nothing"),
    pytest.param(
        [Call("quantize", ("hidden",), ("new",), ("norm",))], [Value("new", "tokens", 64, "int8")], id="with a weight"
    ),
    pytest.param(
        [Call("linear", ("hidden_int8",), ("new",), ("odd", "odd.scale")), Call("quantize", ("new",), ("codes",))],
        [Value("new", "tokens", 3, "fp32"), Value("codes", "tokens", 3, "int8")],
        id="odd width",
    ),
    pytest.param(
        [Call("linear", ("hidden_int8",), ("delta",), ("layers.0.self_attn.o_proj",))], [], id="without its scale"
    ),
    pytest.param(
        [Call("linear", ("hidden",), ("delta",), ("layers.0.self_attn.o_proj", "layers.0.self_attn.o_proj.scale"))],
        [],
        id="of fp32 rows",
    ),
    pytest.param(
        [
            Call(
                *("linear", ("hidden_int8",), ("delta",)),
                weights=("layers.0.self_attn.o_proj", "layers.0.self_attn.q_k_v_proj.scale"),
            )
        ],
        [],
        id="a scale of another shape",
    ),
    pytest.param([Call("swiglu", ("activated_int8",), ("activated",))], [], id="codes as numbers"),
    pytest.param([Call("linear", ("logit_hidden",), ("new",), ("lm_head",))], [Value("new", "logits", 256, "fp32")]),
]


@pytest.mark.parametrize(("calls", "values"), INT8_LIES)
def test_a_lie_about_int8_is_refused(calls, values):
    program, tensors = compiled(WeightDtype.INT8)
    tensors["odd"] = TensorInfo("odd", "int8", (3, 64), 0)
    tensors["odd.scale"] = TensorInfo("odd.scale", "fp32", (3,), 0)
    with pytest.raises(PlanError, match="rebuild"):
        check_program(added(program, "logit_hidden", calls, values), replace(HEADER, weight_dtype="int8"), tensors)


@pytest.mark.parametrize("change", [{"shape": (127,)}, {"shape": (128, 1)}, {"dtype": "bf16"}])
def test_scales_are_fp32_and_one_a_row(change):
    program, tensors = compiled(WeightDtype.INT8)
    name = "layers.1.self_attn.q_k_v_proj.scale"
    tensors[name] = replace(tensors[name], **change)
    with pytest.raises(PlanError, match="weights of another shape"):
        check_program(program, replace(HEADER, weight_dtype="int8"), tensors)


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        ("", {"shape": (128, 64)}),  # a code a byte
        ("", {"shape": (127, 32)}),
        ("", {"dtype": "int8"}),
        (".scale", {"shape": (128, 1)}),
        (".scale", {"shape": (128,)}),
        (".scale", {"dtype": "fp32"}),
        (".zero", {"shape": (2, 128)}),
        (".zero", {"dtype": "bf16"}),
    ],
)
def test_int4_weights_have_a_scale_and_a_zero_a_group(tensor, change):
    program, tensors = compiled(WeightDtype.INT4)
    name = f"layers.1.self_attn.q_k_v_proj{tensor}"
    tensors[name] = replace(tensors[name], **change)
    with pytest.raises(PlanError, match="weights of another shape"):
        check_program(program, replace(HEADER, weight_dtype="int4"), tensors)


O_PROJ = "layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("calls", "values"),
    [
        ([Call("linear", ("hidden_int8_g32",), ("delta",), (O_PROJ, f"{O_PROJ}.scale"))], []),  # without its zeros
        ([Call("linear", ("hidden",), ("delta",), (O_PROJ, f"{O_PROJ}.scale", f"{O_PROJ}.zero"))], []),
        ([Call("quantize", ("context",), ("new",))], [Value("new", "tokens", 64, "int8")]),  # rows of another format
        ([Call("quantize", ("hidden_int8_g32",), ("new",))], [Value("new", "tokens", 64, "int8_g32")]),  # twice
        ([Call("swiglu", ("activated_int8_g32",), ("activated",))], []),
    ],
)
def test_a_lie_about_int4_is_refused(calls, values):
    program, tensors = compiled(WeightDtype.INT4)
    with pytest.raises(PlanError, match="rebuild"):
        check_program(added(program, "logit_hidden", calls, values), replace(HEADER, weight_dtype="int4"), tensors)


def test_int4_needs_a_depth_of_whole_groups():
    """A header that claims another width, and tensors that would go with it."""
    program, tensors = compiled(WeightDtype.INT4)
    narrow = replace(SPEC, intermediate_size=120)
    values = tuple(
        replace(v, width=v.width * 120 // 128) if v.name.startswith(("activated", "gate_up")) else v
        for v in program.values
    )
    shapes = {"gate_up_proj": (240, 64), "down_proj": (64, 120)}
    for info in list(tensors.values()):
        for name, (rows, depth) in shapes.items():
            if name in info.name:
                width = depth // (32 if info.name.endswith((".scale", ".zero")) else 2)
                tensors[info.name] = replace(info, shape=(rows, width))
    with pytest.raises(PlanError, match=r"\('quantize'\) is not an operator of this version, or not of these widths"):
        check_program(replace(program, values=values), replace(HEADER, model=narrow, weight_dtype="int4"), tensors)


@pytest.mark.parametrize(
    ("after", "call"),
    [
        ("delta", Call("linear", ("hidden",), ("residual",), ("layers.0.self_attn.o_proj",))),
        ("delta", Call("linear", ("hidden",), ("query",), ("layers.0.self_attn.o_proj",))),
        ("delta", Call("linear", ("delta",), ("delta2",), ("layers.0.self_attn.o_proj",))),
        ("delta", Call("add_rms_norm", ("delta", "residual"), ("hidden",), ("norm",), {"eps": 1e-5})),
        ("delta", Call("paged_attention", ("delta",), ("context",), (), {"layer": 0})),
        ("query", Call("swiglu", ("query",), ("activated",))),
    ],
)
def test_a_product_is_read_and_written_as_in_the_model(after, call):
    """An engine may keep products apart from other values, so an address of one is not one of the other."""
    program, tensors = compiled(WeightDtype.FP32)
    values = [Value("delta2", "tokens", 64, "fp32")] if call.outputs == ("delta2",) else []
    with pytest.raises(PlanError, match="rebuild"):
        check_program(added(program, after, [call], values), replace(HEADER, weight_dtype="fp32"), tensors)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("embedding", {"shape": (255, 64)}),
        ("lm_head", {"dtype": "fp32"}),
        ("norm", {"shape": (63,)}),
        ("rope_sin", {"shape": (127, 8)}),
        ("layers.1.self_attn.q_k_v_proj", {"shape": (128, 32)}),
    ],
)
def test_weights_must_have_the_model_s_shapes(name, change):
    tensors = {**TENSORS, name: replace(TENSORS[name], **change)}
    with pytest.raises(PlanError, match="weights of another shape"):
        check_program(PROGRAM, HEADER, tensors)


@pytest.mark.parametrize("change", [{"num_layers": 3}, {"head_dim": 32}, {"vocab_size": 512}, {"num_kv_heads": 4}])
def test_the_header_must_be_of_the_same_model(change):
    spec: Callable[..., ModelSpec] = replace
    with pytest.raises(PlanError):
        check_program(PROGRAM, replace(HEADER, model=spec(SPEC, **change)), TENSORS)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["calls"][0].update(op=["embedding"]),
        lambda data: data["calls"][0].update(op=None),
        lambda data: data["calls"][1].update(inputs="residual"),
        lambda data: data["calls"][1].update(weights=[7]),
        lambda data: data["calls"][1].update(attributes=[]),
        lambda data: data["calls"][1].update(attributes={"eps": True}),
        lambda data: data["calls"][1].pop("outputs"),
        lambda data: data["values"].append(["x", "rows", 4, "fp32"]),
        lambda data: data["values"].append(["x", "tokens", 4.0, "fp32"]),
        lambda data: data["values"].append(["x", "tokens", -4, "fp32"]),
        lambda data: data["values"].append(["x", "tokens", 4, ["fp32"]]),
        lambda data: data["values"].append(["x", ["tokens"], 4, "fp32"]),
        lambda data: data["values"].append(["x"]),
        lambda data: data["values"].append(None),
        lambda data: data.pop("calls"),
        lambda data: data.update(calls=7),
    ],
)
def test_json_that_is_no_program_is_refused(change):
    data = json.loads(json.dumps(PROGRAM.to_json()))
    change(data)
    with pytest.raises((TypeError, ValueError, KeyError)):
        Program.from_json(data)
