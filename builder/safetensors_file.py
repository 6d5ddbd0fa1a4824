"""The safetensors container, mapped read-only; sizes, offsets and shapes are checked before anything is allocated.

Format: https://github.com/huggingface/safetensors#format
"""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import numpy.typing as npt
import orjson

from trtcb.errors import PlanError, UsageError

DTYPES: dict[str, tuple[str, Any]] = {
    "F32": ("fp32", np.float32),
    "F16": ("fp16", np.float16),
    "BF16": ("bf16", ml_dtypes.bfloat16),
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """Where a tensor lies in its file. ``dtype`` is the format's name, e.g. ``BF16``; it may be an unsupported one."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFile:
    """One shard. Raises :class:`PlanError` naming the field if it is malformed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise PlanError(f"{path} is not a usable safetensors file ({error}): fetch it again.") from error
        size = len(self._map)
        length = int.from_bytes(self._map[:8], "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            self._fail("the header length", f"is {length} in a file of {size} bytes")
        self.header_bytes = 8 + length
        try:
            header = orjson.loads(self._map[8 : self.header_bytes])
        except orjson.JSONDecodeError as error:
            self._fail("the header", f"is not JSON ({error})")
        if not isinstance(header, dict):
            self._fail("the header", "is not a JSON object")
        header.pop("__metadata__", None)
        self.entries = {name: self._entry(name, value) for name, value in header.items()}
        self._check_overlap()

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a view of a tensor, copied only if the file does not align it; :class:`UsageError` for odd dtypes."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise UsageError(
                f"{self.path}: tensor {name!r} is stored as {entry.dtype}; choose a model in F32, F16 or BF16."
            )
        dtype = np.dtype(DTYPES[entry.dtype][1])
        flat = np.frombuffer(self._map, dtype=dtype, count=entry.num_bytes // dtype.itemsize, offset=entry.offset)
        array = flat.reshape(entry.shape)
        return array if array.flags.aligned else array.copy()

    def _fail(self, field: str, reason: str) -> NoReturn:
        raise PlanError(f"{self.path} is not a usable safetensors file: {field} {reason}; fetch it again.")

    def _entry(self, name: str, value: Any) -> SafetensorsEntry:
        field = f"tensor {name!r}"
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            self._fail(field, "lacks dtype, shape or data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or not _are_sizes(shape) or len(shape) > _MAX_DIMS:
            self._fail(field, "has an impossible dtype or shape")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._fail(field, f"has the impossible data_offsets {offsets}")
        start, end = offsets
        if self.header_bytes + end > len(self._map):
            self._fail(field, f"ends at byte {self.header_bytes + end} of a file of {len(self._map)}")
        if dtype in DTYPES:
            expected = np.dtype(DTYPES[dtype][1]).itemsize
            for dim in shape:
                expected *= dim
            if expected != end - start:
                self._fail(field, f"has {end - start} bytes where its shape {shape} takes {expected}")
        return SafetensorsEntry(dtype, tuple(shape), self.header_bytes + start, end - start)

    def _check_overlap(self) -> None:
        end = self.header_bytes
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
            if entry.offset < end:
                self._fail(f"tensor {name!r}", "overlaps another one")
            end = entry.offset + entry.num_bytes


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
