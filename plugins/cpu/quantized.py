"""Int8 weights and the rows they multiply: how rows are stored, and the rotation that makes both fit for few bits.

A row is rotated in blocks by the Hadamard matrix before it is rounded, the weights along their depth likewise, so the
product stays what it was. That spreads outliers over a block (QuaRot, arXiv 2404.00456, section 3). Codes are
``rint(limit * x / max|x|)``, one scale a row, with 127 for weights. Rows of activations have up to 12 bits: exact sums
leave room for them.

Their codes are stored as the processor's products want them. Products of 16 bits take *pairs*: 16 bits a code, of each
four in the order 0, 2, 1, 3. Products of bytes take *planes* of the codes plus 32,768: all high bytes, then all low
ones, both without a sign. What 32,768 adds to a column's sum is known before; it is taken off again, modulo 2**32.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_ROTATION = 64
MAX_DEPTH = (1 << 31) // 127**2  # of a product whose sum of codes fits 32 bits
MAX_ACTIVATION = (1 << 11) - 1
PLANE_BITS = 15
PLANE_OFFSET = 1 << PLANE_BITS
SCALE_BYTES = 64  # behind a row's codes: an fp32 scale, and room for a matrix unit to read whole tiles
DEPTH_UNIT = 64  # depths of packed weights are filled up to a multiple of this with zeros

Float32 = npt.NDArray[np.float32]


def row_bytes(width: int) -> int:
    """Bytes of one row of activations: two for each code, then the scale."""
    return 2 * width + SCALE_BYTES


def panel_weights(depth: int, columns: int) -> int:
    """Bytes of the weights of a panel. Behind them are the columns' scales and sums, see :func:`panel_bytes`."""
    return -(-depth // DEPTH_UNIT) * DEPTH_UNIT * columns


def panel_bytes(depth: int, columns: int) -> int:
    """Bytes of a panel ``[depth / 4, columns, 4]``, then fp32 scales, then int32 ``PLANE_OFFSET`` times column sums."""
    return panel_weights(depth, columns) + 8 * columns


def activation_limit(depth: int) -> int:
    """Largest code of a row of activations: as many as leave a sum of ``depth`` products in 32 bits."""
    return min(MAX_ACTIVATION, ((1 << 31) - 1) // (127 * depth))


def rotation(width: int) -> int:
    """Size of the blocks in which ``width`` elements are rotated: a power of two that divides it, 64 at most."""
    return min(MAX_ROTATION, width & -width)


def hadamard(size: int) -> Float32:
    """The orthonormal Hadamard matrix of a power of two; symmetric, and its own inverse."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / math.sqrt(size)).astype(np.float32)


def rotate(rows: npt.NDArray[Any]) -> Float32:
    """Rotate each row ``[..., width]`` block by block."""
    width = rows.shape[-1]
    size = rotation(width)
    blocks = rows.astype(np.float32).reshape(*rows.shape[:-1], width // size, size)
    return (blocks @ hadamard(size)).reshape(rows.shape)


def quantize(rows: Float32) -> tuple[npt.NDArray[np.int8], Float32]:
    """Codes ``[N, K]`` and scales ``[N]`` of rows that are rotated already.

    A row that is not finite gets a scale that is not either.
    """
    peak = np.abs(rows).max(axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):  # the peak is below 1e-36, or no number
        inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
        codes = np.nan_to_num(np.clip(np.rint(rows * inverse[..., None]), -127, 127)).astype(np.int8)
    return codes, (peak / np.float32(127)).astype(np.float32)
