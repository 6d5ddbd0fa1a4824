"""The exported graph: valid ONNX in every format, made of the nodes its documentation lists, and cheap to build."""

import dataclasses
from collections import Counter

import onnx
import onnx.inliner
import pytest

from tests.golden.array_checkpoint import TINY, random_checkpoint
from trtcb.builder.export import build_graph, external_tensors, write_onnx
from trtcb.errors import UsageError
from trtcb.plugins.ports import graph_inputs, graph_outputs
from trtcb.spec import KVDtype, ModelSpec

LLAMA_7B = ModelSpec("llama-2-7b", 4096, 11008, 32, 32, 32, 128, 32000, 4096)
DTYPES = ("fp32", "bf16", "fp16")


def tiny_graph(dtype="fp32", kv_dtype=KVDtype.FP32, spec=TINY, **changes):
    return build_graph(
        spec, **{"dtype": dtype, "kv_dtype": kv_dtype, "block_size": 16, "max_positions": 128, **changes}
    )


@pytest.fixture(scope="module")
def checkpoint():
    return random_checkpoint(TINY)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("kv_dtype", KVDtype)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_checker_accepts_graph_and_functions(tmp_path, checkpoint, dtype, kv_dtype, deferred):
    path = tmp_path / "m.onnx"
    write_onnx(tiny_graph(dtype, kv_dtype, deferred=deferred), checkpoint, path)
    onnx.checker.check_model(path, full_check=True)
    inlined = onnx.inliner.inline_local_functions(onnx.load(path))
    assert not {node.domain for node in inlined.graph.node} - {""}
    onnx.checker.check_model(inlined, full_check=True)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("kv_dtype", KVDtype)
@pytest.mark.parametrize("dtype", DTYPES)
def test_types_and_shapes_follow_through_the_functions(dtype, kv_dtype, deferred):
    inferred = onnx.shape_inference.infer_shapes(
        tiny_graph(dtype, kv_dtype, deferred=deferred), check_type=True, strict_mode=True, data_prop=True
    )
    compute = {"fp32": onnx.TensorProto.FLOAT, "bf16": onnx.TensorProto.BFLOAT16, "fp16": onnx.TensorProto.FLOAT16}[
        dtype
    ]
    found = {value.name: value.type.tensor_type for value in inferred.graph.value_info}
    attended = found["layers.1.paged_attention"]
    assert attended.elem_type == compute
    assert [dim.dim_value or dim.dim_param for dim in attended.shape.dim] == ["T", 4, 16]
    assert found["layers.0.q_rope"].elem_type == onnx.TensorProto.FLOAT
    for node in inferred.graph.node:  # what is not an output of the graph has a known leading dimension
        if node.output[0] in found:
            lead = found[node.output[0]].shape.dim[0].dim_param
            assert lead in ("T", "NL"), node.name


@pytest.mark.parametrize(("dtype", "num_casts"), [("fp32", 2), ("bf16", 10)])
@pytest.mark.parametrize(("kv_dtype", "prefix"), [(KVDtype.BF16, ""), (KVDtype.FP8, "Quant")])
def test_nodes_of_two_layers(dtype, num_casts, kv_dtype, prefix):
    model = tiny_graph(dtype, kv_dtype)
    assert Counter(node.op_type for node in model.graph.node) == {
        "Gemm": 15,
        "Reshape": 12,
        "RMSNormalization": 5,
        "RotaryEmbedding": 4,
        "Add": 4,
        "Mul": 4,
        "Sigmoid": 2,
        f"{prefix}KVCacheWrite": 2,
        f"{prefix}PagedAttention": 2,
        "Gather": 2,
        "Cast": num_casts,
        "Unsqueeze": 1,
    }


def test_names_and_order_of_a_layer():
    names = [node.name for node in tiny_graph().graph.node]
    assert len(set(names)) == len(names)
    layer = [name.removeprefix("layers.1.") for name in names if name.startswith("layers.1.")]
    assert " ".join(layer) == (
        "attention_norm q_proj k_proj v_proj q_heads q_rope q k_heads k_rope k v kv_cache_write paged_attention "
        "context o_proj attention_residual mlp_norm gate_proj up_proj gate_sigmoid gate_silu gated down_proj "
        "mlp_residual"
    )
    assert [name for name in names if not name.startswith("layers.")] == [
        "position_column",
        "position_ids",
        "embed_tokens",
        "logit_rows",
        "norm",
        "lm_head",
        "logits",
    ]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_inputs_and_outputs_are_the_declared_ports(kv_dtype, deferred):
    model = tiny_graph(kv_dtype=kv_dtype, deferred=deferred)
    inputs, outputs = (ports(TINY, kv_dtype, deferred=deferred) for ports in (graph_inputs, graph_outputs))
    assert [value.name for value in model.graph.input] == [port.name for port in inputs]
    assert [value.name for value in model.graph.output] == [port.name for port in outputs]


def test_what_describes_a_step():
    model = tiny_graph()
    batch = "input_ids positions slot_mapping token_sequence cu_q block_tables q_range logit_index"
    assert " ".join(value.name for value in model.graph.input[:8]) == batch


def test_attributes_carry_block_size_scale_and_format():
    model = tiny_graph(kv_dtype=KVDtype.FP8, block_size=32)
    node = next(node for node in model.graph.node if node.op_type == "QuantPagedAttention")
    values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert values == {"block_size": 32, "scale": pytest.approx(0.25), "kv_format": b"e4m3"}


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_named_as_in_the_checkpoint(tied):
    model = tiny_graph(spec=dataclasses.replace(TINY, tie_embeddings=tied))
    tensors = {tensor.name: tensor for tensor in external_tensors(model)}
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (64, 96)
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    assert ("lm_head.weight" in tensors) is not tied
    assert len(tensors) == 2 * 9 + 2 + (not tied) + 2
    head = next(node for node in model.graph.node if node.name == "lm_head")
    assert head.input[1] == ("model.embed_tokens.weight" if tied else "lm_head.weight")


def test_the_graph_of_a_7b_model_costs_kilobytes():
    model = tiny_graph("bf16", KVDtype.FP8, spec=LLAMA_7B, max_positions=4096)
    weights = [tensor for tensor in external_tensors(model) if not tensor.name.startswith("rope_")]
    assert sum(tensor.num_bytes for tensor in weights) == 2 * LLAMA_7B.num_params
    assert model.ByteSize() < 1 << 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int4"}, "fp32, bf16, fp16"),
        ({"block_size": 0}, "at least 1"),
        ({"max_positions": 129}, "1 to 128"),
        ({"max_positions": 0}, "1 to 128"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        tiny_graph(**changes)
