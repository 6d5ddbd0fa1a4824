"""Int4 weights and the int8 rows they are multiplied with: both in groups of 32 along the depth, each with a scale.

A weight is ``scale * code + zero`` with a code of 0 to 15 and an fp16 scale and zero, so blocks of GGUF's Q4_0 and Q4_1
are taken over as they are. Of the 16 bytes of a group's codes, byte ``i`` holds code ``i`` in its low half and code
``16 + i`` in its high one: GGUF's own order. A row of activations has codes ``rint(x * (127 / max|x|))`` of 8 bits; its
sum of codes meets the zeros, as in GGUF's Q8_1.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtcb.plugins.cpu.arena import Arena
from trtcb.plugins.cpu.quantized import quantize as quantize_signed

GROUP = 32
CODE_BYTES = GROUP // 2  # of a group of weights
WEIGHT_BYTES = CODE_BYTES + 4  # with scale and zero

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """Weights ``[N, K]``: packed codes uint8 ``[N, K / 2]``, scales and zeros fp16 ``[N, K / 32]``."""

    codes: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float16]
    zero: npt.NDArray[np.float16]


def row_bytes(width: int) -> int:
    """Bytes of one row of activations: int8 codes, then a group's scales, then its scales times the sums of codes.

    Both are fp32.
    """
    return width + 8 * (width // GROUP)


def quantize(rows: npt.NDArray[Any]) -> Int4Weight:
    """Round rows ``[N, K]``: a group's smallest number is its zero, its largest has code 15.

    Codes are chosen for the scale and zero as they are stored. A group that is not finite, or beyond fp16, gets a scale
    or a zero that is not finite either.
    """
    groups = rows.astype(np.float32).reshape(len(rows), -1, GROUP)
    with np.errstate(over="ignore", invalid="ignore"):
        low = groups.min(axis=-1)
        scale, zero = ((groups.max(axis=-1) - low) / np.float32(15)).astype(np.float16), low.astype(np.float16)
        wide = scale.astype(np.float32)[..., None]
        steps = np.divide(groups - zero.astype(np.float32)[..., None], wide, out=np.zeros_like(groups), where=wide > 0)
        codes = np.nan_to_num(np.clip(np.rint(steps), 0, 15)).astype(np.uint8)
    return Int4Weight(pack_codes(codes.reshape(rows.shape)), scale, zero)


def dequantize(weight: Int4Weight) -> Float32:
    """The numbers ``[N, K]`` that are stored."""
    codes = unpack_codes(weight.codes)
    groups = codes.reshape(*weight.scale.shape, GROUP).astype(np.float32)
    numbers = groups * weight.scale.astype(np.float32)[..., None] + weight.zero.astype(np.float32)[..., None]
    return numbers.reshape(codes.shape)


def pack_codes(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes ``[N, K]`` -> ``[N, K / 2]``, two a byte."""
    halves = codes.reshape(len(codes), -1, 2, CODE_BYTES)
    return (halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).reshape(len(codes), -1)


def unpack_codes(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Inverse of :func:`pack_codes`."""
    halves = packed.reshape(len(packed), -1, 1, CODE_BYTES)
    return np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(packed), -1)


def quantize_rows(x: Float32) -> tuple[npt.NDArray[np.int8], Float32, Float32]:
    """Round activations ``[M, K]``: codes, and fp32 ``[M, K / 32]`` scales, and scales times the sums of codes.

    A group that is not finite gets a scale that is not either.
    """
    codes, scale = quantize_signed(x.reshape(len(x), -1, GROUP))
    return codes.reshape(x.shape), scale, scale * codes.sum(axis=-1, dtype=np.float32)


def pack_groups(weight: Int4Weight, columns: int, memory: Arena) -> npt.NDArray[np.uint8]:
    """Panels ``[panels, K / 32, 20 * columns]`` bytes in ``memory``: of each group ``[4, columns, 4]`` bytes of codes.

    Then fp16 scales and fp16 zeros ``[columns]``. Missing columns are zero.
    """
    width, num_groups = weight.scale.shape
    num_panels = -(-width // columns)
    panels = memory.take(num_panels * num_groups * WEIGHT_BYTES * columns).reshape(num_panels, num_groups, -1)
    split = CODE_BYTES * columns
    _fill(panels[..., :split].view("<u4"), weight.codes.view("<u4"))
    _fill(panels[..., split : split + 2 * columns].view("<f2"), weight.scale)
    _fill(panels[..., split + 2 * columns :].view("<f2"), weight.zero)
    return panels


def _fill(panels: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
    """Write rows ``[N, items]`` as columns of panels ``[panels, groups, items of a group * columns]``."""
    num_panels, num_groups, _ = panels.shape
    columns = panels[0].size // rows.shape[1]
    padded = np.zeros((num_panels * columns, rows.shape[1]), rows.dtype)
    padded[: len(rows)] = rows
    panels[...] = padded.reshape(num_panels, columns, -1).swapaxes(1, 2).reshape(num_panels, num_groups, -1)
