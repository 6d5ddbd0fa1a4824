"""Writing a graph with its weights: what is on disk afterwards, and what is not when something goes wrong."""

import dataclasses
import os

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.golden.array_checkpoint import TINY, ArrayCheckpoint, random_checkpoint
from trtcb.builder import onnx_file
from trtcb.builder.export import build_graph, external_tensors, write_onnx
from trtcb.errors import PlanError, UsageError
from trtcb.spec import KVDtype

NUMPY = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


@pytest.fixture(scope="module")
def checkpoint():
    return random_checkpoint(TINY)


def tiny_graph(dtype="fp32"):
    return build_graph(TINY, dtype=dtype, kv_dtype=KVDtype.INT8, block_size=16, max_positions=32)


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("chunk_bytes", [1000, 32 << 20])
def test_weights_come_back_as_the_checkpoint_has_them(tmp_path, monkeypatch, checkpoint, dtype, chunk_bytes):
    monkeypatch.setattr(onnx_file, "_CHUNK_BYTES", chunk_bytes)
    model = tiny_graph(dtype)
    heard = []
    write_onnx(model, checkpoint, tmp_path / "m.onnx", heard.append)
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
    assert sum(heard) == sum(tensor.num_bytes for tensor in external_tensors(model))

    loaded = onnx.load(tmp_path / "m.onnx")
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in loaded.graph.initializer}
    for name, values in checkpoint.tensors.items():
        np.testing.assert_array_equal(arrays[name], values.astype(NUMPY[dtype]))
    for name, table in zip(("rope_cos", "rope_sin"), TINY.rope_tables(32), strict=True):
        np.testing.assert_array_equal(arrays[name], table)


def test_the_given_model_is_left_alone(tmp_path, checkpoint):
    model = tiny_graph()
    before = model.SerializeToString(deterministic=True)
    write_onnx(model, checkpoint, tmp_path / "m.onnx")
    assert model.SerializeToString(deterministic=True) == before


def test_bf16_checkpoints_are_read_as_they_are(tmp_path, checkpoint):
    halves = {name: values.astype(ml_dtypes.bfloat16) for name, values in checkpoint.tensors.items()}
    write_onnx(tiny_graph("fp32"), ArrayCheckpoint(TINY, halves), tmp_path / "m.onnx")
    loaded = onnx.load(tmp_path / "m.onnx")
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in loaded.graph.initializer}
    for name, values in halves.items():
        np.testing.assert_array_equal(arrays[name], values.astype(np.float32))


def test_weights_are_aligned_and_apart():
    end = 0
    for tensor in external_tensors(tiny_graph("bf16")):
        assert tensor.offset % 4096 == 0
        assert tensor.offset >= end
        end = tensor.offset + tensor.num_bytes


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_export_leaves_what_was_there(tmp_path, checkpoint, error):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old graph")
    (tmp_path / "m.onnx.data").write_bytes(b"old weights")
    calls = 0

    def interrupt(_):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise error

    with pytest.raises(error):
        write_onnx(tiny_graph(), checkpoint, path, interrupt)
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
    assert path.read_bytes() == b"old graph"
    assert (tmp_path / "m.onnx.data").read_bytes() == b"old weights"


def test_an_older_export_is_replaced(tmp_path, checkpoint):
    for dtype in ("fp32", "bf16"):
        write_onnx(tiny_graph(dtype), checkpoint, tmp_path / "m.onnx")
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
    kinds = {tensor.dtype for tensor in external_tensors(onnx.load(tmp_path / "m.onnx", load_external_data=False))}
    assert kinds == {"bf16", "fp32"}  # fp32: the rotary tables


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path, checkpoint):
    rest = {name: values for name, values in checkpoint.tensors.items() if "layers.1.mlp.up" not in name}
    with pytest.raises(PlanError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        write_onnx(tiny_graph(), ArrayCheckpoint(TINY, rest), tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_of_another_shape_is_refused(tmp_path, checkpoint):
    wider = dataclasses.replace(TINY, intermediate_size=128)
    with pytest.raises(PlanError, match=r"shape \[128, 64\].*\[96, 64\]"):
        write_onnx(tiny_graph(), random_checkpoint(wider), tmp_path / "m.onnx")


def test_weights_beyond_fp16_are_refused_by_name(tmp_path, checkpoint):
    huge = dict(checkpoint.tensors)
    huge["model.norm.weight"] = huge["model.norm.weight"] * np.float32(1e6)
    with pytest.raises(PlanError, match=r"model\.norm\.weight .* bf16"):
        write_onnx(tiny_graph("fp16"), ArrayCheckpoint(TINY, huge), tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []
    write_onnx(tiny_graph("bf16"), ArrayCheckpoint(TINY, huge), tmp_path / "m.onnx")


def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path, checkpoint):
    with pytest.raises(UsageError, match="create the directory"):
        write_onnx(tiny_graph(), checkpoint, tmp_path / "missing" / "m.onnx")
    with pytest.raises(UsageError, match="not a regular file"):
        write_onnx(tiny_graph(), checkpoint, tmp_path)
    with pytest.raises(UsageError, match="cannot be written"):
        write_onnx(tiny_graph(), checkpoint, tmp_path / ("m" * 300))
