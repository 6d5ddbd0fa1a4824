"""The operator schemas: one signature per operator, obeyed by bodies and graphs alike."""

import pytest

from trtcb.plugins.functions import functions_for
from trtcb.plugins.ports import graph_inputs, graph_outputs, pool_ports
from trtcb.plugins.schema import OPS, attention_op, fresh_attention_op, fresh_op, write_op
from trtcb.spec import KVDtype, ModelSpec

SPEC = ModelSpec("s", 64, 96, 2, 4, 2, 16, 100, 128)


def test_there_are_two_operators_in_two_kinds_for_two_kinds_of_pools():
    plain = {"KVCacheWrite", "PagedAttention", "FreshKV", "FreshPagedAttention"}
    assert set(OPS) == plain | {f"Quant{name}" for name in plain}


@pytest.mark.parametrize("kv_dtype", KVDtype)
@pytest.mark.parametrize("deferred", [False, True])
def test_bodies_have_the_signatures_of_their_schemas(kv_dtype, deferred):
    schemas = (fresh_op, fresh_attention_op) if deferred else (write_op, attention_op)
    bodies = functions_for("fp32", kv_dtype, deferred=deferred)
    for function, schema in zip(bodies, [schema(kv_dtype) for schema in schemas], strict=True):
        assert function.name == schema.name
        assert tuple(function.input) == schema.input_names
        assert tuple(function.output) == schema.output_names
        assert tuple(function.attribute) == schema.attribute_names


@pytest.mark.parametrize("kv_dtype", KVDtype)
@pytest.mark.parametrize("deferred", [False, True])
def test_no_two_values_of_a_body_share_a_name(kv_dtype, deferred):
    for function in functions_for("bf16", kv_dtype, deferred=deferred):
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
def test_a_deferred_graph_gives_a_row_a_token_of_every_pool(kv_dtype):
    pools = {port.name: port for port in pool_ports(SPEC, kv_dtype)}
    assert "slot_mapping" not in {port.name for port in graph_inputs(SPEC, kv_dtype, deferred=True)}
    _, *new = graph_outputs(SPEC, kv_dtype, deferred=True)
    assert [port.name.replace("_new", "_pool") for port in new] == list(pools)
    for port in new:
        pool = pools[port.name.replace("_new", "_pool")]
        assert (port.dtype, port.shape, port.updates) == (pool.dtype, ("T", *pool.shape[1:]), None)


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
