import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest

from tests.unit.tiny_gguf import SPEC, metadata_of, write_gguf, write_tiny
from trtcb.builder.gguf import BLOCK_TYPES, GgufFile
from trtcb.errors import ModelNotFoundError, PlanError


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*, magic=b"GGUF", version=3, num_tensors=0, num_keys=0) -> bytes:
    return struct.pack("<4sIQQ", magic, version, num_tensors, num_keys)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ONE_KEY = header(num_keys=1)
ONE_TENSOR = header(num_tensors=1)
DATA = bytes(4096)
# what is wrong with it, the bytes, what the message must name
MALFORMED = [
    ("nothing", b"", "empty file"),
    ("cut magic", b"GG", "magic number"),
    ("other magic", header(magic=b"GGML") + DATA, "magic number"),
    ("version 1", header(version=1) + DATA, "version is 1"),
    ("version 4", header(version=4) + DATA, "version is 4"),
    ("big-endian", header(version=3 << 24) + DATA, "big-endian"),
    ("no counts", header()[:12], "tensor count"),
    ("tensor count beyond the file", header(num_tensors=1 << 40) + DATA, "tensor count"),
    ("key count beyond the file", header(num_keys=1 << 63) + DATA, "metadata count"),
    ("name beyond the file", ONE_KEY + struct.pack("<Q", 1 << 15) + DATA, "metadata key 0"),
    ("name of no bytes", ONE_KEY + key(b"", 4, bytes(4)) + DATA, "metadata key 0"),
    ("name of 2^63 bytes", ONE_KEY + struct.pack("<Q", 1 << 63) + DATA, "metadata key 0"),
    ("name not UTF-8", ONE_KEY + key(b"\xff\xfe", 4, bytes(4)) + DATA, "not UTF-8"),
    ("unknown value type", ONE_KEY + key(b"k", 13, bytes(4)) + DATA, "'k' has the unknown value type 13"),
    ("value cut off", ONE_KEY + key(b"padding-key", 10, b""), "'padding-key'"),
    ("boolean of 2", ONE_KEY + key(b"k", 7, b"\x02") + DATA, "'k' is a boolean"),
    ("string beyond the file", ONE_KEY + key(b"k", 8, struct.pack("<Q", 1 << 40)) + DATA, "'k'"),
    ("array of arrays", ONE_KEY + key(b"k", 9, struct.pack("<IQ", 9, 1)) + DATA, "'k' is an array"),
    ("array of 2^60 bytes", ONE_KEY + key(b"k", 9, struct.pack("<IQ", 0, 1 << 60)) + DATA, "'k' announces"),
    ("array of 2^60 strings", ONE_KEY + key(b"k", 9, struct.pack("<IQ", 8, 1 << 60)) + DATA, "'k' announces"),
    ("array of doubles cut off", ONE_KEY + key(b"k", 9, struct.pack("<IQ", 12, 600)) + DATA, "'k' announces"),
    (
        "string array cut off",
        ONE_KEY + key(b"k", 9, struct.pack("<IQ", 8, 3) + text(b"a" * 30) + struct.pack("<Q", 3)),
        "'k'",
    ),
    ("twice the same key", header(num_keys=2) + key(b"k", 4, bytes(4)) * 2 + DATA, "'k' appears twice"),
    ("alignment 0", ONE_KEY + key(b"general.alignment", 4, struct.pack("<I", 0)) + DATA, "general.alignment"),
    ("alignment 48", ONE_KEY + key(b"general.alignment", 4, struct.pack("<I", 48)) + DATA, "general.alignment"),
    ("alignment a string", ONE_KEY + key(b"general.alignment", 8, text(b"32")) + DATA, "general.alignment"),
    ("no dimensions", ONE_TENSOR + tensor(b"t", (), 0, 0) + DATA, "'t' has 0 dimensions"),
    ("five dimensions", ONE_TENSOR + tensor(b"t", (1,) * 5, 0, 0) + DATA, "'t' has 5 dimensions"),
    ("a dimension of 0", ONE_TENSOR + tensor(b"t", (0, 4), 0, 0) + DATA, "'t' has the impossible shape"),
    ("a product that wraps", ONE_TENSOR + tensor(b"t", (1 << 32, 1 << 32), 0, 0) + DATA, "'t' ends at byte"),
    ("unknown type", ONE_TENSOR + tensor(b"t", (4,), 99, 0) + DATA, "'t' has the unknown type 99"),
    ("removed type", ONE_TENSOR + tensor(b"t", (4,), 4, 0) + DATA, "'t' has the unknown type 4"),
    ("half a block", ONE_TENSOR + tensor(b"t", (48,), 2, 0) + DATA, "'t' has rows of 48 elements"),
    ("offset not aligned", ONE_TENSOR + tensor(b"t", (4,), 0, 4) + DATA, "'t' has the offset 4"),
    ("offset beyond the file", ONE_TENSOR + tensor(b"t", (4,), 0, 1 << 20) + DATA, "'t' ends at byte"),
    ("offset of 2^64 - 32", ONE_TENSOR + tensor(b"t", (4,), 0, (1 << 64) - 32) + DATA, "'t' ends at byte"),
    ("larger than the file", ONE_TENSOR + tensor(b"t", (2048,), 0, 0) + DATA, "'t' ends at byte"),
    (
        "overlap",
        header(num_tensors=2) + tensor(b"t", (64,), 0, 0) + tensor(b"u", (4,), 0, 64) + DATA,
        "'u' overlaps",
    ),
    (
        "twice the same tensor",
        header(num_tensors=2) + tensor(b"t", (4,), 0, 0) + tensor(b"t", (4,), 0, 32) + DATA,
        "'t' appears twice",
    ),
]


@pytest.mark.parametrize(("content", "named"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_a_malformed_file_is_refused_quickly_by_name(tmp_path, content, named):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(PlanError) as caught:
        GgufFile(path)
    elapsed = time.perf_counter() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert named in str(caught.value)
    assert peak < 1 << 20
    assert elapsed < 0.5  # the target is 0.05 s; the rest is a busy machine


def test_every_value_type_is_read_back(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "values.gguf", "llama")
    values = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 1e300, "bool": True, "string": "größe",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_array("test.strings", ["a", "", "日本"])
    writer.add_array("test.ints", [1, -2, 3])
    writer.add_array("test.floats", [0.25, -1.5])
    writer.add_array("test.bools", [True, False])
    writer.add_custom_alignment(64)
    writer.add_tensor("t", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GgufFile(tmp_path / "values.gguf")
    for kind, value in values.items():
        read = file.metadata[f"test.{kind}"]
        assert (read, type(read)) == (value, type(value))
    assert file.metadata["test.strings"] == ["a", "", "日本"]
    assert file.metadata["test.ints"].tolist() == [1, -2, 3]
    assert file.metadata["test.floats"].tolist() == [0.25, -1.5]
    assert file.metadata["test.bools"].tolist() == [True, False]
    placed = file.tensors["t"]
    assert (placed.kind, placed.shape, placed.offset % 64) == ("F32", (3, 4), 0)
    assert file.blocks(placed).view(np.float32).tolist() == np.arange(12).reshape(3, 4).tolist()


def test_version_2_is_read(tmp_path):
    content = bytearray(write_tiny(tmp_path / "v3.gguf").read_bytes())
    content[4] = 2
    (tmp_path / "v2.gguf").write_bytes(content)
    assert GgufFile(tmp_path / "v2.gguf").tensors == GgufFile(tmp_path / "v3.gguf").tensors


def test_block_sizes_are_those_of_the_gguf_package():
    for type_id, (name, block, num_bytes) in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block, num_bytes))


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no file"):
        GgufFile(tmp_path / "none.gguf")
    with pytest.raises(PlanError, match="not a usable GGUF file"):
        GgufFile(tmp_path)


def test_the_largest_vocabularies_open_quickly(tmp_path):
    # Llama 3's sizes: 128k tokens, 280k merges.
    keys = {
        **metadata_of(SPEC),
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(128_000)],
        "tokenizer.ggml.merges": [f"to ken{i}" for i in range(280_000)],
    }
    path = write_gguf(tmp_path / "big.gguf", {"t": np.zeros(4, np.float32)}, keys)
    fastest = min(_open_seconds(path) for _ in range(3))
    assert fastest < 1.0  # about 0.1 s on an idle core


def _open_seconds(path):
    start = time.perf_counter()
    GgufFile(path)
    return time.perf_counter() - start
