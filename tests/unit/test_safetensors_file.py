import json
import time

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests.unit.hf_folder import safetensors_bytes
from trtcb.builder.safetensors_file import SafetensorsFile
from trtcb.errors import PlanError, UsageError


def file_of(header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


MALFORMED = [
    ("nothing", b"", "empty file"),
    ("short length", b"\x01\x00", "header length"),
    ("length beyond the file", file_of({}, length=1 << 40), "header length"),
    ("length 2^64 - 1", file_of({}, length=(1 << 64) - 1), "header length"),
    ("not JSON", file_of(b"{nope"), "header is not JSON"),
    ("nested too deep", file_of(b"[" * 100_000), "header is not JSON"),
    ("a list", file_of([]), "not a JSON object"),
    ("entry is a number", file_of({"t": 1}), "'t' lacks"),
    ("no offsets", file_of({"t": {"dtype": "F32", "shape": [2]}}, bytes(8)), "'t' lacks"),
    ("negative dimension", file_of({"t": entry(shape=(-2,))}, bytes(8)), "'t' has an impossible"),
    ("dimension of text", file_of({"t": entry(shape=("2",))}, bytes(8)), "'t' has an impossible"),
    ("dimension true", file_of({"t": entry(shape=(True,), offsets=(0, 4))}, bytes(8)), "'t' has an impossible"),
    ("too many dimensions", file_of({"t": entry(shape=(1,) * 9)}, bytes(8)), "'t' has an impossible"),
    ("offsets swapped", file_of({"t": entry(offsets=(8, 0))}, bytes(8)), "'t' has the impossible"),
    ("three offsets", file_of({"t": entry(offsets=(0, 4, 8))}, bytes(8)), "'t' has the impossible"),
    ("offsets beyond the file", file_of({"t": entry(shape=(4,), offsets=(0, 16))}, bytes(8)), "'t' ends at byte"),
    ("size lies", file_of({"t": entry(shape=(3,))}, bytes(8)), "'t' has 8 bytes"),
    ("product wraps", file_of({"t": entry(shape=(1 << 61, 8), offsets=(0, 0))}, bytes(8)), "'t' has 0 bytes"),
    ("overlap", file_of({"t": entry(), "u": entry(offsets=(4, 12))}, bytes(16)), "'u' overlaps"),
]


@pytest.mark.parametrize(("content", "named"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_a_malformed_file_is_refused_quickly_by_name(tmp_path, content, named):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    start = time.perf_counter()
    with pytest.raises(PlanError) as caught:
        SafetensorsFile(path)
    assert named in str(caught.value)
    assert time.perf_counter() - start < 0.5  # the target is 0.05 s


def test_what_the_safetensors_package_writes_is_read(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5), dtype=np.float32),
        "b": rng.standard_normal((4,)).astype(np.float16),
        "c": rng.standard_normal((2, 2)).astype(ml_dtypes.bfloat16),
        "scalar": np.array(3.0, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert file.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = file.array(name)
        assert read.dtype == tensor.dtype
        np.testing.assert_array_equal(read, tensor)


def test_arrays_are_views_unless_the_file_misaligns_them(tmp_path):
    tensors = {"a": np.arange(4, dtype=np.float32)}
    for pad in (0, 1):
        path = tmp_path / f"{pad}.safetensors"
        path.write_bytes(safetensors_bytes(tensors, pad=pad))
        read = SafetensorsFile(path).array("a")
        np.testing.assert_array_equal(read, tensors["a"])
        assert read.flags.aligned
        assert read.flags.owndata == bool(pad)


def test_an_unsupported_dtype_is_named_when_asked_for(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes({"t": np.zeros(4, np.int8)}))
    with pytest.raises(UsageError, match="I8"):
        SafetensorsFile(path).array("t")
