"""The lowering pass: what the graph of a small Llama becomes, and what it refuses."""

from collections import Counter

import pytest
from onnx import helper

from trtcb.builder.export import build_graph
from trtcb.builder.lower import LoweringError, lower
from trtcb.program import Program
from trtcb.spec import KVDtype, ModelSpec, WeightDtype

SPEC = ModelSpec("tiny", 64, 128, 3, 4, 2, 16, 256, 128)
TIED = ModelSpec("tied", 64, 128, 1, 4, 2, 16, 256, 128, tie_embeddings=True)


def graph(spec=SPEC, dtype="fp32", kv_dtype=KVDtype.FP32):
    return build_graph(spec, dtype=dtype, kv_dtype=kv_dtype, block_size=32, max_positions=64)


@pytest.mark.parametrize("kv_dtype", list(KVDtype))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_layer_becomes_nine_calls(dtype, kv_dtype):
    lowered = lower(graph(dtype=dtype, kv_dtype=kv_dtype), SPEC, WeightDtype(dtype))
    ops = Counter(call.op for call in lowered.program.calls)
    layers = SPEC.num_layers
    assert ops == {
        "embedding": 1,
        "rms_norm": 2,  # the first of all, and the one before the head
        "add_rms_norm": 2 * layers - 1,
        "linear": 4 * layers + 1,
        "rope_kv_write": layers,
        "paged_attention": layers,
        "swiglu": layers,
        "gather_rows": 1,
    }
    assert [c.attributes["layer"] for c in lowered.program.calls if c.op == "paged_attention"] == [0, 1, 2]
    assert lowered.program.calls[-1].outputs == ("logits",)
    assert lowered.program.value("logits").dtype == "fp32"
    assert lowered.program.value("hidden").dtype == dtype


def test_projections_of_one_input_are_stacked_in_the_order_the_kernels_read():
    recipes = {w.name: w for w in lower(graph(dtype="bf16"), SPEC, WeightDtype.BF16).weights}
    prefix = "model.layers.1."
    assert recipes["layers.1.self_attn.q_k_v_proj"].parts == tuple(
        f"{prefix}self_attn.{p}_proj.weight" for p in ("q", "k", "v")
    )
    assert recipes["layers.1.mlp.gate_up_proj"].parts == (
        f"{prefix}mlp.gate_proj.weight",
        f"{prefix}mlp.up_proj.weight",
    )
    assert recipes["layers.1.input_layernorm"].dtype == "fp32"
    assert recipes["lm_head"].dtype == "bf16"


def test_int8_products_read_rounded_rows_and_the_embedding_stays_bf16():
    lowered = lower(graph(dtype="bf16"), SPEC, WeightDtype.INT8)
    recipes = {w.name: w for w in lowered.weights}
    products = [call for call in lowered.program.calls if call.op == "linear"]
    assert len(products) == 4 * SPEC.num_layers + 1
    for call in products:
        weight, scale = (recipes[name] for name in call.weights)
        assert (weight.dtype, weight.piece) == ("int8", "int8.codes")
        assert (scale.dtype, scale.piece) == ("fp32", "int8.scale")
        assert weight.parts == scale.parts
        assert lowered.program.value(call.inputs[0]).dtype == "int8"
        assert lowered.program.value(call.outputs[0]).dtype == "fp32"
    assert recipes["embedding"].dtype == "bf16"
    rounded = [call.inputs[0] for call in lowered.program.calls if call.op == "quantize"]
    assert rounded == [*["hidden", "context", "hidden", "activated"] * SPEC.num_layers, "logit_hidden"]


def test_int4_products_read_rows_in_groups_and_have_codes_scales_and_zeros():
    lowered = lower(graph(dtype="bf16"), SPEC, WeightDtype.INT4)
    recipes = {w.name: w for w in lowered.weights}
    *layers, head = [call for call in lowered.program.calls if call.op == "linear"]
    for call in layers:
        weights = [recipes[name] for name in call.weights]
        assert [(w.dtype, w.piece) for w in weights] == [
            ("uint8", "int4.codes"),
            ("fp16", "int4.scale"),
            ("fp16", "int4.zero"),
        ]
        assert len({w.parts for w in weights}) == 1
        assert [w.shape((10, 64)) for w in weights] == [(10, 32), (10, 2), (10, 2)]
        assert lowered.program.value(call.inputs[0]).dtype == "int8_g32"
        assert lowered.program.value(call.outputs[0]).dtype == "fp32"
    assert [recipes[name].dtype for name in ("embedding", *head.weights)] == ["bf16", "int8", "fp32"]
    assert lowered.program.value(head.inputs[0]).dtype == "int8"


def test_a_tied_head_is_stored_once():
    lowered = lower(graph(TIED), TIED, WeightDtype.FP32)
    assert lowered.program.calls[-1].weights == lowered.program.calls[0].weights == ("embedding",)
    assert [w.parts for w in lowered.weights].count(("model.embed_tokens.weight",)) == 1


def test_every_value_is_written_before_it_is_read():
    written = set()
    for call in lower(graph(), SPEC, WeightDtype.FP32).program.calls:
        assert set(call.inputs) <= written
        written |= set(call.outputs)


def test_program_survives_json():
    program = lower(graph(), SPEC, WeightDtype.FP32).program
    assert Program.from_json(program.to_json()) == program
    with pytest.raises(KeyError):
        program.value("nothing")


def test_an_operator_without_a_kernel_is_named():
    model = graph()
    model.graph.node.append(helper.make_node("Erf", ["layers.0.v"], ["odd"], name="layers.0.odd"))
    with pytest.raises(LoweringError, match=r"no kernel for Erf .*layers\.0\.odd"):
        lower(model, SPEC, WeightDtype.FP32)


@pytest.mark.parametrize(
    ("node", "change"),
    [
        ("layers.0.gated", lambda n: n.input.__setitem__(1, "layers.0.gate_proj")),  # silu(gate) * gate
        ("layers.1.attention_residual", lambda n: n.input.__setitem__(1, "layers.1.context")),
        ("layers.0.q_rope", lambda n: n.input.__setitem__(0, "layers.0.k_heads")),
        ("layers.0.kv_cache_write", lambda n: n.input.__setitem__(1, "layers.0.q")),
        ("layers.0.q_proj", lambda n: n.attribute.pop()),  # transB
    ],
)
def test_a_pattern_that_is_not_a_llama_is_refused(node, change):
    model = graph()
    [found] = [n for n in model.graph.node if n.name == node]
    change(found)
    with pytest.raises(LoweringError):
        lower(model, SPEC, WeightDtype.FP32)


def test_another_attention_scale_is_refused():
    model = graph()
    [node] = [n for n in model.graph.node if n.name == "layers.0.paged_attention"]
    [scale] = [a for a in node.attribute if a.name == "scale"]
    scale.f = 0.5
    with pytest.raises(LoweringError, match="PagedAttention"):
        lower(model, SPEC, WeightDtype.FP32)
