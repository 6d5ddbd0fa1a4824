"""Source of the kernel that rotates and rounds rows of activations, see ``quantized.py``; not used directly."""

import numpy as np

from trtcb.plugins.cpu.rotation import define_rotation, store_pairs, store_planes
from trtcb.plugins.cpu.simd import (
    absolute,
    fma,
    jit,
    load_f32,
    max_lanes,
    maximum,
    minimum,
    mul,
    read_i64,
    splat,
    stack,
    sum_lanes,
    write_f32,
)
from trtcb.plugins.cpu.vector_ir import LANES

# --- constants of a specialisation ---
WIDTH = 576
ROTATION = 64
ROW_BYTES = 1184
LIMIT = 2047
PLANES = True
# --- end of constants ---

ZERO = np.float32(0)
STEPS = np.float32(LIMIT)

rotate_block = define_rotation(ROTATION)
rotated_row = stack(WIDTH * 4)


@jit
def quantize_row(x: int, codes: int, rotated: int) -> None:
    """One row. A row that is not finite gets a scale that is not a number."""
    peak, check = splat(ZERO), splat(ZERO)
    for block in range(WIDTH // ROTATION):
        rotate_block(x + block * ROTATION * 4, rotated + block * ROTATION * 4)
    for i in range(WIDTH // LANES):
        value = load_f32(rotated, i * LANES)
        peak = maximum(absolute(value), peak)
        check = fma(value, splat(ZERO), check)
    largest = max_lanes(peak)
    inverse = STEPS / largest if largest > ZERO else ZERO
    for i in range(WIDTH // LANES):
        value = minimum(mul(load_f32(rotated, i * LANES), splat(inverse)), splat(STEPS))  # not a number: the limit
        value = maximum(value, splat(-STEPS))
        if PLANES:
            store_planes(codes, codes + WIDTH, i * LANES, value)
        else:
            store_pairs(codes, i * LANES, value)
    write_f32(codes + 2 * WIDTH, 0, largest / STEPS + sum_lanes(check))


def quantize(arguments: int, part: int, parts: int) -> None:
    """Arguments: rows (fp32), codes with their scales, number of rows."""
    x, codes, num_rows = read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 2)
    rotated = rotated_row()
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        quantize_row(x + row * WIDTH * 4, codes + row * ROW_BYTES, rotated)


KERNELS = (quantize,)
