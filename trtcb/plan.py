"""Reads a plan: one file that is all an engine needs, mapped read-only, believed only after it is checked."""

import hashlib
import mmap
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from trtcb.errors import ModelNotFoundError, PlanError
from trtcb.plan_format import (
    BYTE_ORDER_MARK,
    FORMAT_VERSION,
    MAGIC,
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    MAX_TENSOR_TABLE_BYTES,
    PREAMBLE,
    PREAMBLE_BYTES,
    SECTION_ALIGNMENT,
    TENSOR_TABLE,
    WEIGHTS,
    FormatError,
    PlanHeader,
    SectionInfo,
    TensorInfo,
    align,
    decode_json,
)
from trtcb.plan_header import parse_header, parse_sections, parse_tensors
from trtcb.plan_writer import Section, TensorSource, numpy_dtype, plan_size, write_plan

__all__ = [
    "Plan",
    "PlanHeader",
    "Section",
    "SectionInfo",
    "TensorInfo",
    "TensorSource",
    "plan_size",
    "write_plan",
]

Verify = Literal["full", "header"]

_CHUNK_BYTES = 4 << 20


class _NoPlanError(FormatError):
    """A file of another kind: no damage, and nothing to rebuild."""


class Plan:
    """An open plan. Views into it (sections, tensors) are read-only and keep the mapping alive after :meth:`close`.

    ``size`` is the file's, in bytes. A plan that is replaced while open (``trtcb build`` renames) is not disturbed.
    """

    __slots__ = ("_infos", "_map", "_view", "header", "path", "sections", "size", "tensors")

    header: PlanHeader
    sections: tuple[SectionInfo, ...]
    tensors: Mapping[str, TensorInfo]
    path: Path
    size: int

    def __init__(
        self,
        path: Path,
        mapping: mmap.mmap,
        header: PlanHeader,
        sections: tuple[SectionInfo, ...],
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self.path = path
        self.size = len(mapping)
        self.header = header
        self.sections = sections
        self.tensors = MappingProxyType(dict(tensors))
        self._map = mapping
        self._view = memoryview(mapping)
        self._infos = {section.name: section for section in sections}

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: Verify = "full") -> "Plan":
        """Check and map a plan. ``verify="header"`` trusts the bodies, but still checks header, tables and padding.

        Raises ``PlanError``, which names the field or section at fault, or ``ModelNotFoundError`` if there is no file.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                return cls._read(path, file, verify)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise ModelNotFoundError(_missing(path)) from None
        except _NoPlanError:
            raise PlanError(
                f"{path} is not a plan (its header is none): name a file that `trtcb build` wrote."
            ) from None
        except FormatError as error:
            raise PlanError(
                f"{path} cannot be used: {error}; rebuild it with `trtcb build --model MODEL --output {path}`."
            ) from None
        except OSError as error:
            raise PlanError(f"{path} cannot be read: {error.strerror or error}.") from error

    @classmethod
    def _read(cls, path: Path, file: BinaryIO, verify: Verify) -> "Plan":
        size = os.fstat(file.fileno()).st_size
        data, head_end = _read_head(file, size)
        header = parse_header(data)
        body_start = align(head_end, SECTION_ALIGNMENT)
        sections = parse_sections(data["sections"], body_start=body_start, file_size=size)
        _check_padding(file, head_end, sections)
        by_name = {section.name: section for section in sections}
        table = by_name[TENSOR_TABLE]
        if table.size > MAX_TENSOR_TABLE_BYTES:
            raise FormatError(
                f"section '{TENSOR_TABLE}' has {table.size} bytes, at most {MAX_TENSOR_TABLE_BYTES} are allowed"
            )
        _check_hash(file, table)
        rows = decode_json(
            _read_at(file, table.offset, table.size, f"section '{TENSOR_TABLE}'"), f"section '{TENSOR_TABLE}'"
        )
        tensors = parse_tensors(rows, weights_size=by_name[WEIGHTS].size)
        if verify == "full":
            for section in sections:
                _check_hash(file, section)
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        return cls(path, mapping, header, sections, tensors)

    def has_section(self, name: str) -> bool:
        """Whether the plan has a section of this name."""
        return name in self._infos

    def section(self, name: str) -> memoryview:
        """Return the bytes of a section, not copied; raises ``PlanError`` if there is none such."""
        info = self._infos.get(name)
        if info is None:
            raise PlanError(f"{self.path} has no section '{name}'; it has {', '.join(self._infos)}.")
        return self._view[info.offset : info.offset + info.size]

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a read-only view of a tensor, aligned to 64 bytes; raises ``PlanError`` if there is none such."""
        info = self._tensor_info(name)
        count = info.num_bytes // numpy_dtype(info.dtype).itemsize
        offset = self._infos[WEIGHTS].offset + info.offset
        return np.frombuffer(self._map, numpy_dtype(info.dtype), count, offset).reshape(info.shape)

    def release(self, name: str) -> None:
        """Let a tensor's pages leave the process; they come back from the page cache or the disk if touched again."""
        info = self._tensor_info(name)
        first = self._infos[WEIGHTS].offset + info.offset
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, first + info.num_bytes - start)

    def close(self) -> None:
        """Drop the mapping, or leave it to the last view that is still alive. Idempotent."""
        self._view.release()
        try:
            self._map.close()
        except BufferError:  # arrays of tensor() or views of section() are still in use
            return

    def __enter__(self) -> "Plan":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tensor_info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            close = get_close_matches(name, self.tensors, 1)
            hint = f"; did you mean '{close[0]}'?" if close else "."
            raise PlanError(f"{self.path} has no tensor '{name}'{hint}")
        return info


def _read_head(file: BinaryIO, size: int) -> tuple[Any, int]:
    """Return the header's JSON, once its hash is right, and the offset of its end."""
    raw = file.read(PREAMBLE_BYTES)
    if raw[: len(MAGIC)] != MAGIC[: len(raw)] or not raw:
        raise _NoPlanError
    if len(raw) < PREAMBLE_BYTES:
        raise FormatError("the file is cut off in its preamble")
    preamble, digest = raw[: PREAMBLE.size], raw[PREAMBLE.size :]
    _, order, version, length, declared = PREAMBLE.unpack(preamble)
    if order == int.from_bytes(BYTE_ORDER_MARK.to_bytes(4, "little"), "big"):
        raise FormatError("field 'byte_order' says that it was written on a machine of the other byte order")
    if order != BYTE_ORDER_MARK:
        raise FormatError("field 'byte_order' is not a plan's")
    if version != FORMAT_VERSION:
        raise FormatError(f"field 'format_version' is {version}, this trtcb reads {FORMAT_VERSION}")
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"field 'header_size' is {length}, at most {MAX_HEADER_BYTES} are allowed")
    if declared > MAX_FILE_BYTES or declared != size:
        raise FormatError(
            f"field 'file_size' is {declared}, but the file has {size} bytes: it is cut off or was changed"
        )
    text = _read_at(file, PREAMBLE_BYTES, length, "header")
    if hashlib.sha256(preamble + text).digest() != digest:
        raise FormatError("field 'header_sha256' does not match the header: it was changed or damaged")
    return decode_json(text, "header"), PREAMBLE_BYTES + length


def _check_padding(file: BinaryIO, head_end: int, sections: tuple[SectionInfo, ...]) -> None:
    end = head_end
    for section in sections:
        if any(_read_at(file, end, section.offset - end, f"padding before section '{section.name}'")):
            raise FormatError(f"the padding before section '{section.name}' is not zero")
        end = section.offset + section.size


def _check_hash(file: BinaryIO, section: SectionInfo) -> None:
    # Read, not mapped: pages of the map would count as this process's memory, and a file that shrinks meanwhile is an
    # error here but a SIGBUS there.
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, section.size)))
    file.seek(section.offset)
    left = section.size
    while left:
        count = file.readinto(buffer[: min(left, len(buffer))])  # type: ignore[attr-defined]
        if not count:
            raise FormatError(f"section '{section.name}' is cut off")
        digest.update(buffer[:count])
        left -= count
    if digest.hexdigest() != section.sha256:
        raise FormatError(f"section '{section.name}' does not match its SHA-256: it was changed or damaged")


def _read_at(file: BinaryIO, offset: int, size: int, what: str) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise FormatError(f"the {what} is cut off")
    return data


def _missing(path: Path) -> str:
    if path.is_dir():
        plans = sorted(p.name for p in path.glob("*.plan"))
        found = f": it holds {', '.join(plans[:5])}" if plans else ""
        return f"{path} is a folder, not a plan file{found}."
    plans = sorted(p.name for p in path.parent.glob("*.plan")) if path.parent.is_dir() else []
    close = get_close_matches(path.name, [*plans, *(p.removesuffix(".plan") for p in plans)], 1, 0.5)
    if close:
        name = close[0] if close[0].endswith(".plan") else f"{close[0]}.plan"
        return f"There is no plan {path}; did you mean {path.parent / name}?"
    others = f"; {path.parent} holds {', '.join(plans[:5])}" if plans else ""
    return f"There is no plan {path}{others}; build one with `trtcb build --model MODEL --output {path}`."
