"""What the GPU kernels are compiled for: the constants of each, for whoever launches or compiles them."""

from dataclasses import dataclass
from typing import Any

from trtcb.errors import UsageError
from trtcb.plugins.schema import KV_FORMATS
from trtcb.spec import KVDtype

HEAD_DIMS = (16, 32, 64, 128, 256)
FIRST_WITH_E4M3 = 89
"""Compute capability (times ten) from which processors have the type."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and context tokens that a program treats at a time."""

    rows: int
    columns: int


DECODE, MIXED = Tile(16, 64), Tile(64, 32)
"""Tiles for steps in which every sequence has one token, and for all others."""


@dataclass(frozen=True, slots=True)
class PagedShape:
    """One model's attention over one kind of pool. ``scale`` multiplies the scores.

    Raises ``UsageError`` for heads that the kernels cannot take.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: KVDtype
    scale: float

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise UsageError(
                f"the GPU kernels take heads of {', '.join(map(str, HEAD_DIMS))} elements, and this model's have "
                f"{self.head_dim}: use --target cpu"
            )

    def write_constants(self) -> dict[str, Any]:
        """Constants of the kernel that writes keys and values."""
        constants: dict[str, Any] = {"HK": self.num_kv_heads, "D": self.head_dim}
        if self.kv_dtype.is_quantized:
            constants["FORMAT"] = KV_FORMATS[self.kv_dtype]
        return constants

    def attend_constants(self, tile: Tile, capability: int) -> dict[str, Any]:
        """Constants of the attention kernel, for processors of a compute capability (times ten)."""
        constants = {
            "SCALE": self.scale,
            "H": self.num_heads,
            "HK": self.num_kv_heads,
            "D": self.head_dim,
            "BLOCK_SIZE": self.block_size,
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
        }
        return {**constants, **self.format_constants(capability)} if self.kv_dtype.is_quantized else constants

    def format_constants(self, capability: int) -> dict[str, Any]:
        """How pools are read: their format, and whether by the processor's own e4m3."""
        is_native = self.kv_dtype is KVDtype.FP8 and capability >= FIRST_WITH_E4M3
        return {"FORMAT": KV_FORMATS.get(self.kv_dtype, "none"), "NATIVE": is_native}
