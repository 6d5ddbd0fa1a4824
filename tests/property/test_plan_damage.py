"""Whatever happens to the bytes of a plan: opening it gives a typed error that names a field or section."""

import hashlib
import json
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtcb.errors import PlanError
from trtcb.plan import Plan, PlanHeader, Section, TensorSource, write_plan
from trtcb.spec import BuildLimits, KVDtype, ModelSpec

PREAMBLE = struct.Struct("<8sIIQQ")
MODEL = ModelSpec(
    name="toy", hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=256, max_position=512, eos_token_ids=(2,),
)  # fmt: skip
HEADER = PlanHeader(
    "cpu", {"isa": "avx2"}, MODEL, "fp32", KVDtype.INT8, BuildLimits(), {"model": "toy"}, {"trtcb": "0"}
)
NAMES_A_PLACE = re.compile(r"field '|section '|tensor '|header|preamble|padding")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("plan") / "toy.plan"
    tensors = [
        TensorSource("a", "fp32", (7, 9), lambda: np.ones((7, 9), np.float32)),
        TensorSource("b", "int8", (100,), lambda: np.arange(100, dtype=np.int8)),
    ]
    write_plan(path, HEADER, [Section.of_bytes("graph", bytes(range(256)) * 20)], tensors)
    return path.read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "x.plan"


def refuse(scratch: Path, data: bytes, match: str | None = None, verify: str = "full") -> None:
    scratch.write_bytes(data)
    with pytest.raises(PlanError, match=match) as caught:
        Plan.open(scratch, verify=verify)  # type: ignore[arg-type]
    assert NAMES_A_PLACE.search(str(caught.value)), caught.value
    assert "trtcb build" in str(caught.value)


def header_size(data: bytes) -> int:
    return int(PREAMBLE.unpack(data[: PREAMBLE.size])[3])


def body_start(data: bytes) -> int:
    return -(-(64 + header_size(data)) // 4096) * 4096


def resigned(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The plan with a changed header, and a right hash over it: what only a hostile writer makes."""
    header = json.loads(data[64 : 64 + header_size(data)])
    change(header)
    return signed(data, json.dumps(header).encode())


def signed(data: bytes, text: bytes) -> bytes:
    body = data[body_start(data) :]
    start = -(-(64 + len(text)) // 4096) * 4096
    preamble = PREAMBLE.pack(b"TRTCBPLN", 0x0A0B0C0D, 1, len(text), start + len(body))
    head = preamble + hashlib.sha256(preamble + text).digest() + text
    return head + bytes(start - len(head)) + body


def test_resigning_alone_is_harmless(good: bytes, scratch: Path) -> None:
    scratch.write_bytes(resigned(good, lambda header: None))
    Plan.open(scratch).close()


def test_every_header_bit_flip_is_refused(good: bytes, scratch: Path) -> None:
    for byte in range(64 + header_size(good)):
        for bit in range(8):
            damaged = bytearray(good)
            damaged[byte] ^= 1 << bit
            refuse(scratch, bytes(damaged), verify="header")


def test_every_truncation_of_the_header_is_refused(good: bytes, scratch: Path) -> None:
    for size in range(body_start(good)):
        refuse(scratch, good[:size])


def test_truncations_and_extensions_of_the_body_are_refused(good: bytes, scratch: Path) -> None:
    for size in random.Random(1).sample(range(body_start(good), len(good)), 500):
        refuse(scratch, good[:size], "file_size")
    refuse(scratch, good + b"\0", "file_size")
    refuse(scratch, good + bytes(4096), "file_size")


def test_body_flips_are_refused_and_name_the_section(good: bytes, scratch: Path) -> None:
    rng = random.Random(2)
    for _ in range(2000):
        damaged = bytearray(good)
        position = rng.randrange(64 + header_size(good), len(good))
        damaged[position] ^= 1 << rng.randrange(8)
        refuse(scratch, bytes(damaged), "section '")


def test_header_verification_skips_the_bodies(good: bytes, scratch: Path) -> None:
    damaged = bytearray(good)
    damaged[-1] ^= 1
    scratch.write_bytes(damaged)
    Plan.open(scratch, verify="header").close()
    refuse(scratch, bytes(damaged), "section 'weights' does not match")


def test_versions_and_byte_order(good: bytes, scratch: Path) -> None:
    refuse(scratch, good[:12] + struct.pack("<I", 2) + good[16:], "'format_version' is 2")
    refuse(scratch, good[:8] + struct.pack(">I", 0x0A0B0C0D) + good[12:], "other byte order")
    refuse(scratch, b"GGUF" + good[4:], r"is not a plan .*: name a file")
    refuse(scratch, b"", r"is not a plan .*: name a file")
    refuse(scratch, resigned(good, lambda h: h.update(schema_version=2)), "'schema_version' is 2")


def lie(section: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["sections"][section].update(values)


LIES = {
    "offset behind": (lie(1, offset=4096 * 3), "section 'tensors' claims offset"),
    "overlap": (lie(1, offset=0), "section 'tensors' claims offset"),
    "unaligned": (lie(1, offset=8193), "section 'tensors' claims offset"),
    "negative offset": (lie(0, offset=-4096), "sections.0..offset"),
    "beyond the end": (lie(2, size=1 << 40), "section 'weights' ends"),
    "absurd size": (lie(2, size=1 << 63), "sections.2..size"),
    "float size": (lie(2, size=1e3), "sections.2..size"),
    "bool size": (lie(2, size=True), "sections.2..size"),
    "short": (lie(2, size=8), "section 'weights' ends"),
    "hash": (lie(0, sha256="0" * 64), "section 'graph' does not match"),
    "hash form": (lie(0, sha256="A" * 64), "sections.0..sha256"),
    "twice": (lie(0, name="tensors"), "repeats section 'tensors'"),
    "renamed": (lie(2, name="weight"), "section 'weights' is missing"),
    "name form": (lie(0, name="../x"), "sections.0..name"),
    "extra key": (lie(0, more=1), "unknown entry 'more'"),
    "no sections": (lambda h: h.update(sections=[]), "is missing"),
    "sections null": (lambda h: h.update(sections=None), "'sections' must be a list"),
    "many sections": (lambda h: h.update(sections=h["sections"] * 99), "at most 64"),
    "header key": (lambda h: h.update(more=1), "unknown entry 'more'"),
    "lost key": (lambda h: h.pop("kv_dtype"), "lacks 'kv_dtype'"),
    "kv": (lambda h: h.update(kv_dtype="int2"), "'kv_dtype'"),
    "kv type": (lambda h: h.update(kv_dtype=["fp8"]), "'kv_dtype'"),
    "weights": (lambda h: h.update(weight_dtype="fp4"), "'weight_dtype'"),
    "layers": (lambda h: h["model"].update(num_layers=10**9), "model.num_layers"),
    "huge": (lambda h: h["model"].update(num_layers=10**4000), "model.num_layers"),
    "zero heads": (lambda h: h["model"].update(num_kv_heads=0), "model.num_kv_heads"),
    "grouping": (lambda h: h["model"].update(num_kv_heads=3), "model.num_heads"),
    "odd head": (lambda h: h["model"].update(head_dim=15), "model.head_dim"),
    "eos": (lambda h: h["model"].update(eos_token_ids=[256]), "model.eos_token_ids"),
    "theta": (lambda h: h["model"].update(rope_theta=-1.0), "model.rope_theta"),
    "eps": (lambda h: h["model"].update(rms_norm_eps="x"), "model.rms_norm_eps"),
    "tie": (lambda h: h["model"].update(tie_embeddings=1), "model.tie_embeddings"),
    "scaling": (lambda h: h["model"].update(rope_scaling={"kind": "yarn"}), "model.rope_scaling"),
    "limits": (lambda h: h["limits"].update(block_size=0), "limits.block_size"),
    "versions": (lambda h: h.update(versions={"a": 1}), "versions.a"),
    "target": (lambda h: h.update(target=""), "'target'"),
}


@pytest.mark.parametrize("name", LIES)
def test_signed_lies_are_refused(good: bytes, scratch: Path, name: str) -> None:
    change, match = LIES[name]
    refuse(scratch, resigned(good, change), match)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":1,"a":2}', "same key twice"),
        (b'{"schema_version":NaN}', "not a JSON number"),
        (b'{"schema_version":' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "must be an object"),
        (b" " * ((1 << 20) + 1), "header_size"),
    ],
)
def test_signed_rubbish_is_refused(good: bytes, scratch: Path, text: bytes, match: str) -> None:
    refuse(scratch, signed(good, text), match)


def with_tensor_table(data: bytes, change: Callable[[list[Any]], Any]) -> bytes:
    """The plan with a changed tensor table of the same size (padded with spaces), signed throughout."""
    header = json.loads(data[64 : 64 + header_size(data)])
    entry = next(s for s in header["sections"] if s["name"] == "tensors")
    start = body_start(data) + entry["offset"]
    rows = json.loads(data[start : start + entry["size"]])
    rows = change(rows) or rows
    table = json.dumps(rows, separators=(",", ":")).encode()
    table = table.ljust(entry["size"])
    assert len(table) == entry["size"], "the lie must not be longer than the truth"
    entry["sha256"] = hashlib.sha256(table).hexdigest()
    changed = data[:start] + table + data[start + entry["size"] :]
    return signed(changed, json.dumps(header).encode())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda rows: rows[1].update(offset=0), "tensor 'b' claims offset"),
        (lambda rows: rows[0].update(offset=4), "tensor 'a' claims offset"),
        (lambda rows: rows[1].update(shape=[999]), "tensor 'b' reaches beyond section 'weights'"),
        (lambda rows: rows[1].update(shape=[9]), "section 'weights' has"),
        (lambda rows: rows[1].update(shape=[0]), r"tensors\[1\].shape"),
        (lambda rows: rows[1].update(shape=[-1]), r"tensors\[1\].shape"),
        (lambda rows: rows[1].update(name="a"), "repeats tensor 'a'"),
        (lambda rows: rows[1].update(name=""), "empty or repeats"),
        (lambda rows: rows[0].update(dtype="fp8"), r"tensors\[0\].dtype"),
        (lambda rows: rows[1].pop("dtype") and None, "lacks 'dtype'"),
        (lambda rows: rows.pop() and None, "section 'weights' has"),
        (lambda rows: {"a": 1}, "section 'tensors' must be a list"),
    ],
)
def test_lying_tensor_tables_are_refused(
    good: bytes, scratch: Path, change: Callable[[list[Any]], Any], match: str
) -> None:
    refuse(scratch, with_tensor_table(good, change), match, verify="header")


def test_too_many_tensors(good: bytes, scratch: Path) -> None:
    def many(header: dict[str, Any]) -> None:
        header["sections"][1]["size"] = 65 << 20

    refuse(scratch, resigned(good, many))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, child in children for p in _paths(child, (*path, key)))]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_value_anywhere_in_the_header(good: bytes, scratch: Path, data: st.DataObject) -> None:
    header = json.loads(good[64 : 64 + header_size(good)])
    path = data.draw(st.sampled_from(_paths(header)))
    value = data.draw(JSON)
    if path:
        parent = header
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = value
    else:
        header = value
    scratch.write_bytes(signed(good, json.dumps(header).encode()))
    try:
        Plan.open(scratch).close()  # some values are as good as the old ones
    except PlanError as error:
        message = str(error)
    else:
        return
    assert NAMES_A_PLACE.search(message), message
