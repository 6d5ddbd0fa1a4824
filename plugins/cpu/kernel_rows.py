"""Source of the kernels that treat rows alone. ``specialize.py`` rewrites the constants; not used directly.

Sums run in one fixed order (vector by vector, then the lanes), so a row's result never depends on its neighbours.
"""

import numpy as np

from trtcb.plugins.cpu.simd import (
    Real,
    Vector,
    add,
    as_float,
    div,
    exp,
    fma,
    jit,
    load_bf16,
    load_f32,
    mul,
    read_i32,
    read_i64,
    splat,
    store_bf16,
    store_f32,
    sub,
    sum_lanes,
)
from trtcb.plugins.cpu.vector_ir import (
    LANES,
)

# --- constants of a specialisation ---
HIDDEN_SIZE = 576
INTERMEDIATE_SIZE = 1536
ACTIVATION = "bf16"
RESULTS = "bf16"
# --- end of constants ---

HIDDEN_VECTORS = HIDDEN_SIZE // LANES
INTERMEDIATE_VECTORS = INTERMEDIATE_SIZE // LANES
ZERO = np.float32(0)
ONE = np.float32(1)

load_result = {"fp32": load_f32, "bf16": load_bf16}[RESULTS]
store_activation = {"fp32": store_f32, "bf16": store_bf16}[ACTIVATION]


@jit
def normalize_row(residual: int, gain: int, eps: Real, hidden: int, row: int, squares: Vector) -> None:
    """``squares`` holds the row's sum of squares, lane by lane."""
    mean = sum_lanes(squares) / np.float32(HIDDEN_SIZE)
    inverse = splat(ONE / np.sqrt(mean + np.float32(eps)))
    base = row * HIDDEN_SIZE
    for i in range(HIDDEN_VECTORS):
        value = mul(mul(load_f32(residual, base + i * LANES), inverse), load_f32(gain, i * LANES))
        store_activation(hidden, base + i * LANES, value)


def rms_norm(arguments: int, part: int, parts: int) -> None:
    """Arguments: residual, gain, bits of eps (float64), hidden, number of rows."""
    residual, gain, hidden = read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 3)
    eps, num_rows = as_float(read_i64(arguments, 2)), read_i64(arguments, 4)
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        squares = splat(ZERO)
        for i in range(HIDDEN_VECTORS):
            value = load_f32(residual, row * HIDDEN_SIZE + i * LANES)
            squares = fma(value, value, squares)
        normalize_row(residual, gain, eps, hidden, row, squares)


@jit
def load_delta(delta: int, index: int, is_bf16: int) -> Vector:
    """16 elements of a delta of either type."""
    if is_bf16:
        return load_bf16(delta, index)
    return load_f32(delta, index)


def add_rms_norm(arguments: int, part: int, parts: int) -> None:
    """Arguments: residual (updated in place), delta, whether delta is bf16, gain, bits of eps, hidden, rows."""
    residual, delta, is_bf16 = read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 2)
    gain, eps, hidden = read_i64(arguments, 3), as_float(read_i64(arguments, 4)), read_i64(arguments, 5)
    num_rows = read_i64(arguments, 6)
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        base = row * HIDDEN_SIZE
        squares = splat(ZERO)
        for i in range(HIDDEN_VECTORS):
            value = add(load_f32(residual, base + i * LANES), load_delta(delta, base + i * LANES, is_bf16))
            store_f32(residual, base + i * LANES, value)
            squares = fma(value, value, squares)
        normalize_row(residual, gain, eps, hidden, row, squares)


def swiglu(arguments: int, part: int, parts: int) -> None:
    """Arguments: gate and up side by side, hidden, number of rows."""
    gate_up, hidden, num_rows = read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 2)
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        base = row * 2 * INTERMEDIATE_SIZE
        for i in range(INTERMEDIATE_VECTORS):
            gate = load_result(gate_up, base + i * LANES)
            up = load_result(gate_up, base + INTERMEDIATE_SIZE + i * LANES)
            sigmoid = div(gate, add(splat(ONE), exp(sub(splat(ZERO), gate))))
            store_activation(hidden, row * INTERMEDIATE_SIZE + i * LANES, mul(sigmoid, up))


def embedding(arguments: int, part: int, parts: int) -> None:
    """Arguments: ids (int32), table, whether the table is bf16, residual, number of rows."""
    ids, table, is_bf16 = read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 2)
    residual, num_rows = read_i64(arguments, 3), read_i64(arguments, 4)
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        source = read_i32(ids, row) * HIDDEN_SIZE
        for i in range(HIDDEN_VECTORS):
            store_f32(residual, row * HIDDEN_SIZE + i * LANES, load_delta(table, source + i * LANES, is_bf16))


def gather_rows(arguments: int, part: int, parts: int) -> None:
    """Arguments: residual, delta, whether delta is bf16, row numbers (int32), gathered rows, how many."""
    residual, delta, is_bf16 = read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 2)
    index, out, num_rows = read_i64(arguments, 3), read_i64(arguments, 4), read_i64(arguments, 5)
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        source = read_i32(index, row) * HIDDEN_SIZE
        for i in range(HIDDEN_VECTORS):
            value = add(load_f32(residual, source + i * LANES), load_delta(delta, source + i * LANES, is_bf16))
            store_f32(out, row * HIDDEN_SIZE + i * LANES, value)


KERNELS = (embedding, rms_norm, add_rms_norm, swiglu, gather_rows)
