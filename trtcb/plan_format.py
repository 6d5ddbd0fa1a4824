"""The byte layout of a plan file, and the records both its reader and its writer speak of.

::

    preamble   64 bytes   magic, byte-order mark, format version, header length, file size, SHA-256 of these + header
    header     JSON       what the plan is, and its section table (name, offset from the body's start, size, SHA-256)
    body       sections   each starts on a 4 KiB boundary; everything between header and sections is zero

The layout is canonical: the sizes determine every offset, so sections can neither overlap nor leave room for anything
hidden. The same holds for the tensors inside the section ``weights``, which start on 64-byte boundaries in table order.
"""

import json
import math
import struct
from dataclasses import asdict, dataclass
from typing import Any, Final

from trtcb.spec import BuildLimits, KVDtype, ModelSpec

MAGIC: Final = b"TRTCBPLN"
BYTE_ORDER_MARK: Final = 0x0A0B0C0D
FORMAT_VERSION: Final = 1
SCHEMA_VERSION: Final = 1
SECTION_ALIGNMENT: Final = 4096
TENSOR_ALIGNMENT: Final = 64
DIGEST_BYTES: Final = 32

# magic, byte-order mark, format version, header length, file size; the SHA-256 follows
PREAMBLE: Final = struct.Struct("<8sIIQQ")
PREAMBLE_BYTES: Final = PREAMBLE.size + DIGEST_BYTES

# Far above any real plan, and low enough that a hostile one cannot make its reader allocate much.
MAX_HEADER_BYTES: Final = 1 << 20
MAX_TENSOR_TABLE_BYTES: Final = 64 << 20
MAX_SECTIONS: Final = 64
MAX_TENSORS: Final = 1 << 18
MAX_FILE_BYTES: Final = 1 << 46

TENSOR_TABLE: Final = "tensors"
WEIGHTS: Final = "weights"
ITEM_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "uint8": 1}


class FormatError(ValueError):
    """A plan breaks the format; the message names the field or section. ``Plan.open`` turns it into a ``PlanError``."""


def align(value: int, alignment: int) -> int:
    """Next multiple of ``alignment`` at or above ``value``."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """What a plan is, and what it was built from and for.

    ``fingerprint`` is what the target must find on the machine that runs the plan; ``source`` names the checkpoint and
    its digest; ``versions`` lists the tools that built it. All three hold short strings.
    """

    target: str
    fingerprint: dict[str, str]
    model: ModelSpec
    weight_dtype: str
    kv_dtype: KVDtype
    limits: BuildLimits
    source: dict[str, str]
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain values, in the order they stand in the file."""
        return {
            "target": self.target,
            "fingerprint": self.fingerprint,
            "model": self.model.to_json(),
            "weight_dtype": self.weight_dtype,
            "kv_dtype": self.kv_dtype.value,
            "limits": asdict(self.limits),
            "source": self.source,
            "versions": self.versions,
        }


@dataclass(frozen=True, slots=True)
class SectionInfo:
    """Where a section lies. ``offset`` counts bytes from the start of the file; ``sha256`` is hexadecimal."""

    name: str
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. ``offset`` counts bytes from the start of section ``weights``; elements are row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def end(self) -> int:
        """First byte after it in the section ``weights``."""
        return self.offset + self.num_bytes


def encode_json(data: Any) -> bytes:
    """JSON of fixed form: ASCII, no spaces, no NaN."""
    return json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def decode_json(raw: bytes, what: str) -> Any:
    """Parse JSON strictly: no duplicate keys, no NaN, no bombs of depth or digits. ``what`` names it in the error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("an object has the same key twice")
        return result

    def constant(text: str) -> Any:
        raise ValueError(f"{text} is not a JSON number")

    try:
        return json.loads(raw.decode("ascii"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not valid JSON ({error})") from None
