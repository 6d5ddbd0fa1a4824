"""Writes a plan in one pass: sections and weights are streamed, hashed as they go, and the header is filled in last."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trtcb.atomic_file import atomic_file
from trtcb.errors import OutOfMemoryError
from trtcb.plan_format import (
    BYTE_ORDER_MARK,
    FORMAT_VERSION,
    MAGIC,
    PREAMBLE,
    PREAMBLE_BYTES,
    SCHEMA_VERSION,
    SECTION_ALIGNMENT,
    TENSOR_ALIGNMENT,
    TENSOR_TABLE,
    WEIGHTS,
    PlanHeader,
    TensorInfo,
    align,
    encode_json,
)
from trtcb.plan_header import parse_header, parse_sections, parse_tensors

_CHUNK_BYTES = 4 << 20
_NO_HASH = "0" * 64

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Section:
    """One section to write: exactly ``size`` bytes, produced by ``chunks()`` when its turn comes."""

    name: str
    size: int
    chunks: Callable[[], Iterable[Buffer]]

    @staticmethod
    def of_bytes(name: str, data: bytes) -> "Section":
        """Make a section whose bytes are already in memory."""
        return Section(name, len(data), lambda: (data,))

    @staticmethod
    def of_json(name: str, data: Any) -> "Section":
        """Make a section that holds JSON."""
        return Section.of_bytes(name, encode_json(data))


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor to write. ``load`` is called once, when its turn comes; its array is dropped before the next one's.

    ``dtype`` is ``fp32``, ``bf16`` (``ml_dtypes.bfloat16``), ``fp16``, ``int8`` or ``uint8``; the array must have that
    type and ``shape``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], npt.NDArray[Any]]


def numpy_dtype(name: str) -> "np.dtype[Any]":
    """Return the little-endian numpy type of a tensor type of a plan."""
    if name == "bf16":
        import ml_dtypes  # only plans that hold bf16 pay for it

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype({"fp32": "<f4", "fp16": "<f2", "int8": "i1", "uint8": "u1"}[name])


def plan_size(header: PlanHeader, sections: Sequence[Section], tensors: Sequence[TensorSource]) -> int:
    """Bytes the plan file will have."""
    layout = _Layout.of(header, (*sections, *_weight_sections(tensors)))
    return layout.file_size


def write_plan(
    path: str | os.PathLike[str],
    header: PlanHeader,
    sections: Sequence[Section],
    tensors: Sequence[TensorSource],
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write a plan to ``path``, atomically: on any exception, Ctrl-C included, the folder is as it was before.

    ``on_bytes`` is told the size of each piece written. Raises ``OutOfMemoryError`` if the disk has no room,
    ``ValueError`` if a section or tensor is not what it was declared to be, and whatever ``chunks`` and ``load`` raise.
    """
    path = Path(path)
    everything = (*sections, *_weight_sections(tensors))
    layout = _Layout.of(header, everything)
    layout.check_readable(tensors)
    with atomic_file(path) as file:
        free = shutil.disk_usage(path.parent).free
        if layout.file_size > free:
            raise OutOfMemoryError(
                f"The plan needs {layout.file_size:,} bytes of disk, but {path.parent} has {free:,} free: "
                "make room or choose another place with --output."
            )
        hashes = []
        for section, offset in zip(everything, layout.offsets, strict=True):
            file.seek(layout.body_start + offset)  # what is skipped reads as zeros
            hashes.append(_write_section(file, section, on_bytes))
        file.truncate(layout.file_size)  # an empty last section writes nothing
        file.seek(0)
        file.write(layout.head(hashes))


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where everything goes. The header's length does not depend on the hashes, which are of fixed width."""

    header: PlanHeader
    sections: tuple[Section, ...]
    offsets: tuple[int, ...]
    body_start: int
    file_size: int

    @staticmethod
    def of(header: PlanHeader, sections: tuple[Section, ...]) -> "_Layout":
        offsets = []
        end = 0
        for section in sections:
            offsets.append(align(end, SECTION_ALIGNMENT))
            end = offsets[-1] + section.size
        draft = _Layout(header, sections, tuple(offsets), 0, 0)
        length = len(encode_json(draft.header_json([_NO_HASH] * len(sections))))
        body_start = align(PREAMBLE_BYTES + length, SECTION_ALIGNMENT)
        return _Layout(header, sections, tuple(offsets), body_start, body_start + end)

    def header_json(self, hashes: Sequence[str]) -> dict[str, Any]:
        table = [
            {"name": s.name, "offset": offset, "size": s.size, "sha256": sha256}
            for s, offset, sha256 in zip(self.sections, self.offsets, hashes, strict=True)
        ]
        return {"schema_version": SCHEMA_VERSION, **self.header.to_json(), "sections": table}

    def head(self, hashes: Sequence[str]) -> bytes:
        """Preamble and header."""
        text = encode_json(self.header_json(hashes))
        preamble = PREAMBLE.pack(MAGIC, BYTE_ORDER_MARK, FORMAT_VERSION, len(text), self.file_size)
        return preamble + hashlib.sha256(preamble + text).digest() + text

    def check_readable(self, tensors: Sequence[TensorSource]) -> None:
        """Refuse, before any work, to write what the reader would refuse."""
        data = self.header_json([_NO_HASH] * len(self.sections))
        table = _table_json(_place(tensors))
        # A round trip through JSON turns tuples into lists, as the reader will see them.
        parse_header(_plain(data))
        parse_sections(_plain(data["sections"]), body_start=self.body_start, file_size=self.file_size)
        parse_tensors(_plain(table), weights_size=self.sections[-1].size)


def _plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    return data


def _place(tensors: Sequence[TensorSource]) -> list[TensorInfo]:
    placed: list[TensorInfo] = []
    for tensor in tensors:
        offset = align(placed[-1].end, TENSOR_ALIGNMENT) if placed else 0
        placed.append(TensorInfo(tensor.name, tensor.dtype, tensor.shape, offset))
    return placed


def _table_json(placed: Sequence[TensorInfo]) -> list[dict[str, Any]]:
    return [{"name": t.name, "dtype": t.dtype, "shape": t.shape, "offset": t.offset} for t in placed]


def _weight_sections(tensors: Sequence[TensorSource]) -> tuple[Section, Section]:
    placed = _place(tensors)

    def chunks() -> Iterator[Buffer]:
        end = 0
        for source, info in zip(tensors, placed, strict=True):
            yield bytes(info.offset - end)
            yield from _pieces(_raw(source))
            end = info.end

    size = placed[-1].end if placed else 0
    return Section.of_json(TENSOR_TABLE, _table_json(placed)), Section(WEIGHTS, size, chunks)


def _raw(source: TensorSource) -> memoryview:
    array = source.load()
    if array.dtype != numpy_dtype(source.dtype) or array.shape != source.shape:
        raise ValueError(
            f"tensor '{source.name}' was declared {source.dtype}{list(source.shape)}, "
            f"but is {array.dtype}{list(array.shape)}"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _pieces(data: Buffer) -> Iterator[memoryview]:
    view = memoryview(data).cast("B")
    for start in range(0, len(view), _CHUNK_BYTES):
        yield view[start : start + _CHUNK_BYTES]


def _write_section(file: BinaryIO, section: Section, on_bytes: Callable[[int], None] | None) -> str:
    digest = hashlib.sha256()
    written = 0
    for chunk in section.chunks():
        for piece in _pieces(chunk):
            digest.update(piece)
            file.write(piece)
            written += len(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    if written != section.size:
        raise ValueError(f"section '{section.name}' was declared {section.size} bytes, but has {written}")
    return digest.hexdigest()
