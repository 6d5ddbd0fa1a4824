"""The operator schemas: one signature per operator, obeyed by bodies and graphs alike."""

import pytest

from trtcb.plugins.functions import functions_for
from trtcb.plugins.ports import graph_inputs, graph_outputs, pool_ports
from trtcb.plugins.schema import OPS, attention_op, write_op
from trtcb.spec import KVDtype, ModelSpec

SPEC = ModelSpec("s", 64, 96, 2, 4, 2, 16, 100, 128)


def test_there_are_four_operators():
    assert set(OPS) == {"KVCacheWrite", "PagedAttention", "QuantKVCacheWrite", "QuantPagedAttention"}


@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_bodies_have_the_signatures_of_their_schemas(kv_dtype):
    for function, schema in zip(
        functions_for("fp32", kv_dtype), (write_op(kv_dtype), attention_op(kv_dtype)), strict=True
    ):
        assert function.name == schema.name
        assert tuple(function.input) == schema.input_names
        assert tuple(function.output) == schema.output_names
        assert tuple(function.attribute) == schema.attribute_names


@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_no_two_values_of_a_body_share_a_name(kv_dtype):
    for function in functions_for("bf16", kv_dtype):
        names = [name for node in function.node for name in node.output] + list(function.input)
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", OPS)
def test_an_output_aliases_an_input_of_its_kind_and_shape(name):
    inputs = {tensor.name: tensor for tensor in OPS[name].inputs}
    for output in OPS[name].outputs:
        if output.alias is not None:
            assert (inputs[output.alias].kind, inputs[output.alias].shape) == (output.kind, output.shape)
    writes = "Write" in name
    assert all((output.alias is not None) == writes for output in OPS[name].outputs)


def test_ports_of_a_quantised_cache():
    ports = {port.name: port for port in pool_ports(SPEC, KVDtype.FP8)}
    assert len(ports) == 2 * 4
    assert (ports["layers.1.k_pool"].dtype, ports["layers.1.k_pool"].shape) == ("int8", ("SLOTS", 2, 16))
    assert (ports["layers.0.v_scale_pool"].dtype, ports["layers.0.v_scale_pool"].shape) == ("fp16", ("SLOTS", 2))


@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_every_pool_that_goes_in_comes_out(kv_dtype):
    inputs = {port.name for port in graph_inputs(SPEC, kv_dtype)}
    logits, *pools = graph_outputs(SPEC, kv_dtype)
    assert logits.name == "logits"
    assert {port.updates for port in pools} == {name for name in inputs if name.startswith("layers.")}


@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_pools_cost_what_the_spec_says(kv_dtype):
    sizes = {"int8": 1, "fp16": 2, "bf16": 2, "fp32": 4}
    per_token = 0
    for port in pool_ports(SPEC, kv_dtype):
        count = sizes[port.dtype]
        for dim in port.shape[1:]:
            count *= dim
        per_token += count
    assert per_token == SPEC.kv_bytes_per_token(kv_dtype)
