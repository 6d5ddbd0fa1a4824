"""Source of the kernel that rounds rows of activations in groups, see ``grouped.py``; not used directly."""

import numpy as np

from trtcb.plugins.cpu.grouped import GROUP, row_bytes
from trtcb.plugins.cpu.simd import (
    absolute,
    add,
    finite,
    jit,
    load_f32,
    load_i8,
    max_lanes,
    maximum,
    mul,
    read_i64,
    splat,
    store_i8,
    sub,
    sum_lanes,
    write_f32,
)
from trtcb.plugins.cpu.vector_ir import LANES

# --- constants of a specialisation ---
WIDTH = 576
# --- end of constants ---

ZERO = np.float32(0)
STEPS = np.float32(127)
NUM_GROUPS = WIDTH // GROUP
ROW_BYTES = row_bytes(WIDTH)


@jit
def quantize_group(x: int, codes: int, factors: int, group: int) -> None:
    """One group. One that is not finite gets zeros, and a scale that is not a number."""
    first, second = group * GROUP, group * GROUP + LANES
    low, high = load_f32(x, first), load_f32(x, second)
    largest = max_lanes(maximum(absolute(high), maximum(absolute(low), splat(ZERO))))
    check = sum_lanes(add(sub(low, low), sub(high, high)))
    inverse = splat(STEPS / largest if largest > ZERO else ZERO)
    store_i8(codes, first, finite(mul(low, inverse), STEPS))
    store_i8(codes, second, finite(mul(high, inverse), STEPS))
    scale = largest / STEPS + check
    write_f32(factors, group, scale)
    write_f32(factors, NUM_GROUPS + group, scale * sum_lanes(add(load_i8(codes, first), load_i8(codes, second))))


def quantize(arguments: int, part: int, parts: int) -> None:
    """Arguments: rows (fp32), codes with their scales and sums, number of rows."""
    x, codes, num_rows = read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 2)
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        to = codes + row * ROW_BYTES
        for group in range(NUM_GROUPS):
            quantize_group(x + row * WIDTH * 4, to, to + WIDTH, group)


KERNELS = (quantize,)
