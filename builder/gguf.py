"""The GGUF container: a strict reader that checks every count, length and offset against the file's size first.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from trtcb.errors import ModelNotFoundError, PlanError

# type id -> (name, elements per block, bytes per block); those this project dequantises
BLOCK_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
# Types of the format that are not in BLOCK_TYPES, so that a user learns what the file holds.
_OTHER_TYPES: Mapping[int, str] = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
_SCALARS: Mapping[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_ENTRIES = 1 << 16  # metadata keys, and tensors
_MAX_STRINGS = 1 << 22  # entries of one string array; a short one costs 8 bytes in the file but 60 in memory
_MAX_NAME_BYTES = 1 << 16
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
_LENGTH = struct.Struct("<Q")
_T = TypeVar("_T")
_D = TypeVar("_D")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. ``shape`` is in numpy order (rows first); ``offset`` and ``num_bytes`` are within the file.

    ``kind`` is the block type's name; for one that is not in ``BLOCK_TYPES`` the size is unknown and ``num_bytes`` is
    0.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufFile:
    """A GGUF file, mapped read-only. ``metadata`` values are scalars, strings, lists of strings, or numpy arrays.

    Raises :class:`PlanError` naming the offending field if the file is malformed, before allocating what it asks for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map(path)
        cursor = _Cursor(path, self._map)
        self.version, num_tensors, num_keys = _read_preamble(cursor)
        self.metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = cursor.name(f"the name of metadata key {index}")
            if key in self.metadata:
                cursor.fail(f"metadata key {key!r}", "appears twice")
            self.metadata[key] = _read_value(cursor, f"metadata key {key!r}")
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            cursor.fail("metadata key 'general.alignment'", f"is {alignment!r}, not a power of two of at least 8")
        entries = [_read_tensor_entry(cursor, index) for index in range(num_tensors)]
        self.header_bytes = -(-cursor.position // alignment) * alignment
        self.tensors = _place_tensors(cursor, entries, self.header_bytes, alignment)

    def get(self, key: str, kind: type[_T], default: _D) -> _T | _D:
        """Look a metadata value up; raises :class:`PlanError` if it is there with another type than ``kind``."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise PlanError(
                f"{self.path} is not a usable GGUF file: metadata key {key!r} is no {kind.__name__}; "
                "fetch or convert it again."
            )
        return value

    def blocks(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes ``[rows, bytes per row]``, a view of the map."""
        data = np.frombuffer(self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return data.reshape(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"There is no file {path}: check the path.") from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise PlanError(f"{path} is not a usable GGUF file ({error}): fetch or convert it again.") from error


class _Cursor:
    """Reads forward through the header; every read is checked against the end of the file first."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.position = 0
        self.size = len(data)

    def fail(self, field: str, reason: str) -> NoReturn:
        raise PlanError(f"{self._path} is not a usable GGUF file: {field} {reason}; fetch or convert it again.")

    @property
    def remaining(self) -> int:
        return self.size - self.position

    def skip(self, num_bytes: int, field: str) -> int:
        """Move over ``num_bytes`` and return where they start."""
        if num_bytes > self.remaining:
            self.fail(field, f"needs {num_bytes} bytes where the file has {self.remaining} left")
        start = self.position
        self.position += num_bytes
        return start

    def scalar(self, fmt: str, field: str) -> Any:
        return struct.unpack_from(fmt, self._data, self.skip(struct.calcsize(fmt), field))[0]

    def count(self, limit: int, min_bytes: int, field: str) -> int:
        """Read a u64 that announces items of at least ``min_bytes`` each."""
        value: int = self.scalar("<Q", field)
        if value > limit or value * min_bytes > self.remaining:
            self.fail(field, f"announces {value} items, more than the file can hold or this reader accepts")
        return value

    def name(self, field: str) -> str:
        """Read a key or tensor name: a short string."""
        (length,) = struct.unpack_from("<Q", self._data, self.skip(8, field))
        if not 0 < length <= _MAX_NAME_BYTES:
            self.fail(field, f"has a length of {length} bytes")
        self.position -= 8
        return self.strings(1, field)[0]

    def strings(self, count: int, field: str) -> list[str]:
        """Read ``count`` length-prefixed UTF-8 strings. Inlined: vocabularies have hundreds of thousands."""
        data, position, end, unpack = self._data, self.position, self.size, _LENGTH.unpack_from
        result: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > end:
                    self.fail(field, f"holds a string of {position - start} bytes that runs past the end of the file")
                result.append(data[start:position].decode())
        except struct.error:
            self.fail(field, "runs past the end of the file")
        except UnicodeDecodeError as error:
            self.fail(field, f"holds a string that is not UTF-8 ({error.reason})")
        self.position = position
        return result

    def array(self, fmt: str, count: int, field: str) -> npt.NDArray[Any]:
        dtype = np.dtype(fmt)
        start = self.skip(count * dtype.itemsize, field)
        return np.frombuffer(self._data, dtype=dtype, count=count, offset=start)


def _read_preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of metadata keys."""
    if cursor.scalar("4s", "the magic number") != b"GGUF":
        cursor.fail("the magic number", "is not 'GGUF'")
    version = cursor.scalar("<I", "the version")
    if version not in (2, 3):
        big_endian = " (big-endian files are not supported)" if version >> 24 in (2, 3) else ""
        cursor.fail("the version", f"is {version}, not 2 or 3{big_endian}")
    num_tensors = cursor.count(_MAX_ENTRIES, 1, "the tensor count")
    num_keys = cursor.count(_MAX_ENTRIES, 13, "the metadata count")
    return version, num_tensors, num_keys


def _read_value(cursor: _Cursor, field: str) -> Any:
    kind = cursor.scalar("<I", field)
    if kind == _STRING:
        return cursor.strings(1, field)[0]
    if kind == _ARRAY:
        return _read_array(cursor, field)
    if kind not in _SCALARS:
        cursor.fail(field, f"has the unknown value type {kind}")
    value = cursor.scalar(_SCALARS[kind], field)
    if kind != _BOOL:
        return value
    if value not in (0, 1):
        cursor.fail(field, f"is a boolean of value {value}")
    return bool(value)


def _read_array(cursor: _Cursor, field: str) -> Any:
    kind = cursor.scalar("<I", field)
    if kind == _STRING:
        return cursor.strings(cursor.count(_MAX_STRINGS, 8, field), field)
    if kind not in _SCALARS:
        cursor.fail(field, f"is an array of the unsupported value type {kind}")
    fmt = "?" if kind == _BOOL else _SCALARS[kind]
    return cursor.array(fmt, cursor.count(cursor.size, np.dtype(fmt).itemsize, field), field)


def _read_tensor_entry(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (numpy order), type id, offset within the data part."""
    name = cursor.name(f"the name of tensor {index}")
    field = f"tensor {name!r}"
    num_dims = cursor.scalar("<I", field)
    if not 1 <= num_dims <= _MAX_DIMS:
        cursor.fail(field, f"has {num_dims} dimensions")
    dims = tuple(cursor.scalar("<Q", field) for _ in range(num_dims))
    if any(not 0 < dim <= 1 << 40 for dim in dims):
        cursor.fail(field, f"has the impossible shape {list(dims)}")
    return name, dims[::-1], cursor.scalar("<I", field), cursor.scalar("<Q", field)


def _place_tensors(
    cursor: _Cursor, entries: list[tuple[str, tuple[int, ...], int, int]], data_start: int, alignment: int
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_id, offset in entries:
        field = f"tensor {name!r}"
        if name in tensors:
            cursor.fail(field, "appears twice")
        if offset % alignment:
            cursor.fail(field, f"has the offset {offset}, which is not a multiple of the alignment {alignment}")
        if type_id in BLOCK_TYPES:
            kind, block, block_bytes = BLOCK_TYPES[type_id]
            if shape[-1] % block:
                cursor.fail(field, f"has rows of {shape[-1]} elements, not a multiple of {kind}'s block of {block}")
            num_bytes = block_bytes * (shape[-1] // block)
            for dim in shape[:-1]:
                num_bytes *= dim
        elif type_id in _OTHER_TYPES:
            kind, num_bytes = _OTHER_TYPES[type_id], 0
        else:
            cursor.fail(field, f"has the unknown type {type_id}")
        start = data_start + offset
        if start + num_bytes > cursor.size:
            cursor.fail(field, f"ends at byte {start + num_bytes} of a file of {cursor.size}")
        tensors[name] = GgufTensor(name, kind, shape, start, num_bytes)
    _check_overlap(cursor, tensors)
    return tensors


def _check_overlap(cursor: _Cursor, tensors: Mapping[str, GgufTensor]) -> None:
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset < end:
            cursor.fail(f"tensor {tensor.name!r}", "overlaps another one")
        end = tensor.offset + tensor.num_bytes
