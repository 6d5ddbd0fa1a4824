"""Launches the kernels on torch tensors: what the ``cuda`` target runs between its matrix products.

Tensors are contiguous and on one device; letters in shapes are those of :mod:`trtcb.plugins.schema`. Nothing is checked
here: wrong indices corrupt memory, so whoever builds the batch must be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton

from trtcb.plugins.nvidia import attention, kv_write
from trtcb.plugins.nvidia.shape import DECODE, MIXED, PagedShape, Tile

if TYPE_CHECKING:
    import torch

SPLIT = 512
"""Context tokens of a program where one token per sequence attends to more than these."""


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
    """The kernels for one shape, on a processor of ``capability`` (compute capability times ten)."""

    def __init__(self, shape: PagedShape, *, capability: int) -> None:
        self._shape = shape
        self._group = shape.num_heads // shape.num_kv_heads
        self._write = shape.write_constants()
        self._decode, self._mixed = (shape.attend_constants(tile, capability) for tile in (DECODE, MIXED))
        rows = max(DECODE.rows, triton.next_power_of_2(self._group))
        self._split = {
            **shape.attend_constants(Tile(rows, DECODE.columns), capability),
            **shape.format_constants(capability),
            "SPLIT": SPLIT,
        }
        is_quantized = shape.kv_dtype.is_quantized
        self._write_kernel = kv_write.quant_kv_cache_write if is_quantized else kv_write.kv_cache_write
        self._attention = attention.quant_paged_attention if is_quantized else attention.paged_attention

    def write(self, k: torch.Tensor, v: torch.Tensor, pools: PoolTensors, slot_mapping: torch.Tensor) -> None:
        """Store ``k, v`` ``[T, HK, D]`` at the slots ``slot_mapping`` int32 ``[T]``, in place."""
        grid = (len(slot_mapping), self._shape.num_kv_heads)
        self._write_kernel[grid](k, v, *pools.arrays, slot_mapping, *pools.arrays, **self._write, num_warps=1)

    def attend(self, q: torch.Tensor, pools: PoolTensors, ragged: RaggedTensors, out: torch.Tensor) -> None:
        """Write the context ``out`` ``[T, H, D]`` of queries ``q`` ``[T, H, D]``, whose keys are in the pools."""
        constants = self._decode if ragged.max_rows == 1 else self._mixed
        num_sequences, max_blocks = ragged.block_tables.shape
        tiles = triton.cdiv(ragged.max_rows * self._group, constants["ROWS"])
        # the operator's last two inputs are for launch dimensions alone
        inputs = (q, *pools.arrays, ragged.block_tables, ragged.positions, ragged.cu_q, ragged.cu_q, ragged.cu_q)
        grid = (tiles, self._shape.num_kv_heads, num_sequences)
        self._attention[grid](*inputs, max_blocks, out, **constants)

    def attend_in_splits(
        self, q: torch.Tensor, pools: PoolTensors, ragged: RaggedTensors, out: torch.Tensor, max_context: int
    ) -> None:
        """Do the same for one row a sequence, on a program for each :data:`SPLIT` tokens of context.

        ``max_context`` is at least the tokens of the longest context. Takes memory for fp32 ``[splits, B, H, D]``.
        """
        import torch

        shape = self._shape
        num_sequences, max_blocks = ragged.block_tables.shape
        splits, heads = triton.cdiv(max_context, SPLIT), (num_sequences, shape.num_heads)
        sums = torch.empty((splits, *heads, shape.head_dim), dtype=torch.float32, device=q.device)
        peak, total = torch.empty((2, splits, *heads), dtype=torch.float32, device=q.device)
        scales = pools.arrays[2:] or pools.arrays  # not read where there are none
        attention.split_attention[splits, shape.num_kv_heads, num_sequences](
            *(q, pools.k, pools.v, *scales, ragged.block_tables, ragged.positions, max_blocks, sums, peak, total),
            **self._split,
        )
        attention.merge_splits[shape.num_heads, num_sequences](
            *(sums, peak, total, ragged.positions, out), H=shape.num_heads, D=shape.head_dim, SPLIT=SPLIT
        )
