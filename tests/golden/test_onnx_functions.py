"""The operators' ONNX bodies, alone, in onnxruntime against the numpy reference."""

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import pytest
from onnx import helper

from trtcb.plugins import reference
from trtcb.plugins.functions import ELEMENT_TYPES, OPSET, functions_for
from trtcb.plugins.reference import KVPools
from trtcb.plugins.schema import DOMAIN, KV_FORMATS, VERSION, attention_op, write_op
from trtcb.spec import KVDtype

T, HK, D = 1200, 3, 64
NUMPY = {"fp32": np.float32, "fp16": np.float16}
SCALE = D**-0.5


def run_op(schema, dtype, kv_dtype, arrays, *, inlined=False, **attributes):
    """Run one node of ``schema`` whose body is its FunctionProto; ``arrays`` by input name. Outputs by name."""
    kinds = {
        "compute": dtype,
        "pool": "int8" if kv_dtype.is_quantized else kv_dtype.value,
        "scale": "fp16",
        "int32": "int32",
    }

    def info(tensor, name):
        return helper.make_tensor_value_info(name, ELEMENT_TYPES[kinds[tensor.kind]], [None] * len(tensor.shape))

    node = helper.make_node(schema.name, schema.input_names, schema.output_names, domain=DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        "one",
        [info(tensor, tensor.name) for tensor in schema.inputs],
        [info(tensor, tensor.name) for tensor in schema.outputs],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions_for(dtype, kv_dtype), ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    if inlined:
        model = onnx.inliner.inline_local_functions(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}  # OrtValues do not own their memory
    outputs = {tensor.name: np.empty_like(arrays[tensor.alias or "q"]) for tensor in schema.outputs}
    binding = session.io_binding()
    for tensor in schema.inputs:
        binding.bind_ortvalue_input(tensor.name, ort_value(arrays[tensor.name], kinds[tensor.kind]))
    for tensor in schema.outputs:
        binding.bind_ortvalue_output(tensor.name, ort_value(outputs[tensor.name], kinds[tensor.kind]))
    session.run_with_iobinding(binding)
    return outputs


def ort_value(array, kind):
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ELEMENT_TYPES[kind])


def awkward_rows(dtype, seed):
    """Keys or values with every case that has ever gone wrong: zeros, ties, NaN, infinities, tiny and huge rows."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, (T, HK, D)).astype(np.float32)
    x[0] = 0
    x[1, 0] = np.arange(D) - 31.5
    x[1, 0, 0] = 127.0  # int8 scale 1: every other value is a tie
    x[2, 0, 5], x[2, 1, 6], x[2, 2, 7] = np.nan, np.inf, -np.inf
    x[3] = np.nan
    x[4] *= 1e-7  # subnormal in fp16
    x[5] *= 1e4
    x[6, 0] = 448.0 * np.linspace(-1, 1, D)  # e4m3 scale 1
    x[6, 1] = np.arange(D) / 512 + 1 / 1024  # e4m3 subnormals and their ties
    x[6, 1, 0] = 448.0
    x[7, 0] = -0.0
    x[8, 0] = 1e-42  # subnormal in fp32
    x[9] = np.float32(65504.0)
    x[10, 0, ::2], x[10, 0, 1::2] = np.finfo(np.float32).max, -np.finfo(np.float32).max
    x[11:600] *= 10.0 ** rng.uniform(-6, 3, (589, 1, 1)).astype(np.float32)
    steps = np.array([2.0**e * (1 + m / 8 + 1 / 16) for e in range(-9, 8) for m in range(8)], np.float32)
    x[600:602, 0] = steps[: 2 * D].reshape(2, D)  # halfway between e4m3 codes
    x[600:602, 0, -1] = 448.0
    with np.errstate(over="ignore"):
        return x.astype(NUMPY[dtype])


def bytes_of(array):
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("kv_dtype", KVDtype)
@pytest.mark.parametrize("dtype", NUMPY)
def test_a_write_is_byte_equal_to_the_reference(dtype, kv_dtype):
    k, v = awkward_rows(dtype, 0), awkward_rows(dtype, 1)[:, ::-1]
    num_slots = 2 * T
    slots = np.random.default_rng(2).permutation(num_slots)[:T].astype(np.int32)
    pools = KVPools.zeros(kv_dtype, num_slots, HK, D)
    arrays = {"k": k, "v": v, "k_pool": pools.k.copy(), "v_pool": pools.v.copy(), "slot_mapping": slots}
    for name in ("k_pool", "v_pool"):
        arrays[name][...] = 77
    if kv_dtype.is_quantized:
        arrays |= {name: np.full((num_slots, HK), 5, np.float16) for name in ("k_scale_pool", "v_scale_pool")}
    untouched = {name: bytes_of(array.copy()) for name, array in arrays.items()}
    attributes = {"kv_format": KV_FORMATS[kv_dtype]} if kv_dtype.is_quantized else {}

    got = run_op(write_op(kv_dtype), dtype, kv_dtype, arrays, **attributes)
    inlined = run_op(write_op(kv_dtype), dtype, kv_dtype, arrays, inlined=True, **attributes)
    reference.kv_cache_write(pools, k, v, slots)

    expected = {"k_pool": pools.k, "v_pool": pools.v, "k_scale_pool": pools.k_scale, "v_scale_pool": pools.v_scale}
    rest = np.setdiff1d(np.arange(num_slots), slots)
    for name, values in got.items():
        pool = name.removesuffix("_out")
        np.testing.assert_array_equal(bytes_of(values[slots]), bytes_of(expected[pool][slots]), err_msg=pool)
        np.testing.assert_array_equal(bytes_of(values)[rest], untouched[pool][rest], err_msg=pool)
        np.testing.assert_array_equal(bytes_of(values), bytes_of(inlined[name]), err_msg=pool)


def ragged_step(block_size, seed=0):
    """A decode row, a chunk in the middle of a prompt, a whole prompt and another decode row; block tables shuffled."""
    rng = np.random.default_rng(seed)
    lengths, starts = np.array([1, 37, 20, 1]), np.array([70, 29, 0, 0])
    blocks = -(-(lengths + starts) // block_size)
    table = np.zeros((4, blocks.max() + 1), np.int32)
    free = rng.permutation(blocks.sum() + 3).astype(np.int32)
    for row, count in zip(table, blocks, strict=True):
        row[:count], free = free[:count], free[count:]
    num_slots = int(blocks.sum() + 3) * block_size
    cu_q = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths, strict=True)]).astype(np.int32)
    ragged = {
        "block_tables": table,
        "positions": positions,
        "cu_q": cu_q,
        "token_sequence": np.repeat(np.arange(4, dtype=np.int32), lengths),
        "q_range": np.arange(lengths.max(), dtype=np.int32),
    }
    return ragged, num_slots


def attend(dtype, kv_dtype, q, pools, ragged, block_size, *, inlined=False):
    """The body's result and the reference's."""
    arrays = {"q": q, "k_pool": pools.k, "v_pool": pools.v, **ragged}
    attributes = {"block_size": block_size, "scale": SCALE}
    if kv_dtype.is_quantized:
        arrays |= {"k_scale_pool": pools.k_scale, "v_scale_pool": pools.v_scale}
        attributes["kv_format"] = KV_FORMATS[kv_dtype]
    got = run_op(attention_op(kv_dtype), dtype, kv_dtype, arrays, inlined=inlined, **attributes)["context"]
    tables, positions, cu_q = (ragged[name] for name in ("block_tables", "positions", "cu_q"))
    expected = reference.paged_attention(q, pools, tables, positions, cu_q, block_size=block_size, scale=SCALE)
    return got, expected


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("kv_dtype", KVDtype)
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 2e-6), ("fp16", 2e-3)])
def test_attention_is_near_the_reference(dtype, tolerance, kv_dtype, block_size):
    ragged, num_slots = ragged_step(block_size)
    rng = np.random.default_rng(1)
    pools = KVPools.zeros(kv_dtype, num_slots, 2, D)
    k, v = (rng.normal(0, 1, (num_slots, 2, D)).astype(np.float32) for _ in "kv")
    reference.kv_cache_write(pools, k, v, np.arange(num_slots, dtype=np.int32))
    q = rng.normal(0, 1, (len(ragged["positions"]), 6, D)).astype(NUMPY[dtype])
    got, expected = attend(dtype, kv_dtype, q, pools, ragged, block_size)
    inlined, _ = attend(dtype, kv_dtype, q, pools, ragged, block_size, inlined=True)
    assert got.dtype == NUMPY[dtype]
    np.testing.assert_allclose(got.astype(np.float32), expected, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(got, inlined)


@pytest.mark.parametrize("kv_dtype", KVDtype)
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 2e-6), ("fp16", 2e-3)])
def test_what_others_left_in_the_pool_does_not_matter(dtype, tolerance, kv_dtype):
    ragged, num_slots = ragged_step(16)
    pools = KVPools.zeros(kv_dtype, num_slots, 2, D)
    for pool in (pools.k, pools.v):
        pool[...] = 127 if kv_dtype.is_quantized else np.nan
    if kv_dtype.is_quantized:
        pools.k_scale[...] = pools.v_scale[...] = np.nan
    visible = np.concatenate(
        [
            (table[:, None] * 16 + np.arange(16)).ravel()[: ragged["positions"][end - 1] + 1]
            for table, end in zip(ragged["block_tables"], ragged["cu_q"][1:], strict=True)
        ]
    )
    k, v = np.random.default_rng(3).normal(0, 1, (2, len(visible), 2, D)).astype(np.float32)
    reference.kv_cache_write(pools, k, v, visible)
    q = np.random.default_rng(4).normal(0, 1, (len(ragged["positions"]), 6, D)).astype(NUMPY[dtype])
    got, expected = attend(dtype, kv_dtype, q, pools, ragged, 16)
    np.testing.assert_allclose(got.astype(np.float32), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_the_largest_stored_value_is_finite_in_fp16(kv_dtype):
    """A scale that was rounded up, or a pool of a wider type, may stand for more than fp16 holds."""
    pools = KVPools.zeros(kv_dtype, 16, 1, D)
    largest = np.full((1, 1, D), np.inf, np.float32)
    reference.kv_cache_write(pools, np.ones_like(largest), largest, np.array([0], np.int32))
    zero = np.zeros(1, np.int32)
    ragged = {"block_tables": zero[None], "positions": zero, "cu_q": np.array([0, 1], np.int32)}
    ragged |= {"token_sequence": zero, "q_range": zero}
    got, _ = attend("fp16", kv_dtype, np.ones((1, 1, D), np.float16), pools, ragged, 16)
    np.testing.assert_array_equal(got, np.float16(65504))
