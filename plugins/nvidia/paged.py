"""Launches the kernels on torch tensors: what the ``cuda`` target runs between its matrix products.

Tensors are contiguous and on one device; letters in shapes are those of :mod:`trtcb.plugins.schema`. Nothing is checked
here: wrong indices corrupt memory, so whoever builds the batch must be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton

from trtcb.errors import UsageError
from trtcb.plugins.nvidia import attention, kv_write
from trtcb.plugins.schema import KV_FORMATS
from trtcb.spec import KVDtype

if TYPE_CHECKING:
    import torch

HEAD_DIMS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and context tokens that a program treats at a time."""

    rows: int
    columns: int


DECODE, MIXED = Tile(16, 64), Tile(64, 32)
"""Tiles for steps in which every sequence has one token, and for all others."""

SPLIT = 512
"""Context tokens of a program where one token per sequence attends to more than these."""


@dataclass(frozen=True, slots=True)
class PagedShape:
    """What kernels are compiled for. ``scale`` multiplies the scores."""

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


@dataclass(frozen=True, slots=True)
class PoolTensors:
    """One layer's pools ``[SLOTS, HK, D]`` and, of quantised formats, scales fp16 ``[SLOTS, HK]``."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        """Those that there are, in the operators' order."""
        return tuple(array for array in (self.k, self.v, self.k_scale, self.v_scale) if array is not None)


@dataclass(frozen=True, slots=True)
class RaggedTensors:
    """Which rows belong to which sequence, and where their contexts lie; all int32. ``max_rows`` is S."""

    block_tables: torch.Tensor  # [B, MB]
    positions: torch.Tensor  # [T]
    cu_q: torch.Tensor  # [B + 1]
    max_rows: int


class PagedKernels:
    """The kernels for one shape. ``has_e4m3``: the processor has that type (compute capability 8.9 and later)."""

    def __init__(self, shape: PagedShape, *, has_e4m3: bool) -> None:
        self._shape = shape
        self._write: dict[str, Any] = {"HK": shape.num_kv_heads, "D": shape.head_dim}
        self._attend: dict[str, Any] = {
            **self._write,
            "SCALE": shape.scale,
            "H": shape.num_heads,
            "BLOCK_SIZE": shape.block_size,
        }
        self._format: dict[str, Any] = {"FORMAT": KV_FORMATS.get(shape.kv_dtype, "none")}
        self._codes: dict[str, Any] = {**self._format, "NATIVE": has_e4m3 and shape.kv_dtype is KVDtype.FP8}

    def write(self, k: torch.Tensor, v: torch.Tensor, pools: PoolTensors, slot_mapping: torch.Tensor) -> None:
        """Store ``k, v`` ``[T, HK, D]`` at the slots ``slot_mapping`` int32 ``[T]``, in place."""
        grid = (len(slot_mapping), self._shape.num_kv_heads)
        arguments = (k, v, *pools.arrays, slot_mapping, *pools.arrays)
        if self._shape.kv_dtype.is_quantized:
            kv_write.quant_kv_cache_write[grid](*arguments, **self._write, **self._format, num_warps=1)
        else:
            kv_write.kv_cache_write[grid](*arguments, **self._write, num_warps=1)

    def attend(self, q: torch.Tensor, pools: PoolTensors, ragged: RaggedTensors, out: torch.Tensor) -> None:
        """Write the context ``out`` ``[T, H, D]`` of queries ``q`` ``[T, H, D]``, whose keys are in the pools."""
        shape, tile = self._shape, DECODE if ragged.max_rows == 1 else MIXED
        num_sequences, max_blocks = ragged.block_tables.shape
        rows = ragged.max_rows * (shape.num_heads // shape.num_kv_heads)
        grid = (triton.cdiv(rows, tile.rows), shape.num_kv_heads, num_sequences)
        # the last two of the operator's inputs are for launch dimensions alone
        arguments = (q, *pools.arrays, ragged.block_tables, ragged.positions, ragged.cu_q, ragged.cu_q, ragged.cu_q)
        sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns}
        if shape.kv_dtype.is_quantized:
            attention.quant_paged_attention[grid](*arguments, max_blocks, out, **self._attend, **sizes, **self._codes)
        else:
            attention.paged_attention[grid](*arguments, max_blocks, out, **self._attend, **sizes)

    def attend_in_splits(
        self, q: torch.Tensor, pools: PoolTensors, ragged: RaggedTensors, out: torch.Tensor, max_context: int
    ) -> None:
        """Do the same for one row a sequence, on a program for each :data:`SPLIT` tokens of context.

        ``max_context`` is at least the tokens of the longest context. Needs memory for fp32 ``[splits, B, H, D]``.
        """
        import torch

        shape = self._shape
        num_sequences, max_blocks = ragged.block_tables.shape
        splits, heads = triton.cdiv(max_context, SPLIT), (num_sequences, shape.num_heads)
        sums = torch.empty((splits, *heads, shape.head_dim), dtype=torch.float32, device=q.device)
        peak, total = torch.empty((2, splits, *heads), dtype=torch.float32, device=q.device)
        k_scale, v_scale = (pools.k, pools.v) if pools.k_scale is None else (pools.k_scale, pools.v_scale)
        group = shape.num_heads // shape.num_kv_heads
        attention.split_attention[splits, shape.num_kv_heads, num_sequences](
            *(q, pools.k, pools.v, k_scale, v_scale, ragged.block_tables, ragged.positions, max_blocks),
            *(sums, peak, total),
            **self._attend,
            **self._codes,
            ROWS=max(DECODE.rows, triton.next_power_of_2(group)),
            COLUMNS=DECODE.columns,
            SPLIT=SPLIT,
        )
        attention.merge_splits[shape.num_heads, num_sequences](
            *(sums, peak, total, ragged.positions, out), H=shape.num_heads, D=shape.head_dim, SPLIT=SPLIT
        )
