"""Source of the rotary-embedding + KV-write kernel. ``specialize.py`` rewrites the constants; not used directly.

A row of fused projections is split into heads; queries and keys are rotated (products rounded before they are summed,
as in ``plugins.reference.rope``), queries are scaled by ``1 / sqrt(head_dim)``, keys and values are encoded and stored.
What is stored for a token depends on that token's own row alone, so a recomputed block is bit-equal to a cached one.
"""

import math

import numpy as np

from trtcb.plugins.cpu.simd import (
    Real,
    absolute,
    add,
    div,
    finite,
    jit,
    load_bf16,
    load_f32,
    max_lanes,
    maximum,
    mul,
    read_f16,
    read_i32,
    read_i64,
    read_u8,
    read_u16,
    read_u32,
    splat,
    stack,
    store_bf16,
    store_e4m3,
    store_f16,
    store_f32,
    store_i8,
    sub,
    write_f16,
    write_i32,
    write_u8,
    write_u16,
)
from trtcb.plugins.cpu.vector_ir import (
    LANES,
)

# --- constants of a specialisation ---
NUM_HEADS = 9
NUM_KV_HEADS = 3
HEAD_DIM = 64
BLOCK_SIZE = 32
KV_FORMAT = "fp8"
RESULTS = "bf16"
# --- end of constants ---

QUANTIZED = KV_FORMAT in ("int8", "fp8")
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}[KV_FORMAT]
HEAD_VECTORS = HEAD_DIM // LANES
HALF = HEAD_DIM // 2
HALF_VECTORS = (HALF + LANES - 1) // LANES  # the last one overlaps its neighbour when HALF is no multiple of 16
ROW = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM

QUERY_SCALE = np.float32(1 / math.sqrt(HEAD_DIM))
ZERO = np.float32(0)
# as plugins.reference.FINITE_LIMIT, QUANT_MAX and SCALE_FLOOR
LIMIT = np.float32({"fp32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38}.get(KV_FORMAT, 65504.0))
QUANT_MAX = np.float32(127.0 if KV_FORMAT == "int8" else 448.0)
SCALE_FLOOR = np.float32(2.0**-14)

load_result = {"fp32": load_f32, "bf16": load_bf16}[RESULTS]
store_kv = {"fp32": store_f32, "bf16": store_bf16, "fp16": store_f16, "int8": store_i8, "fp8": store_e4m3}[KV_FORMAT]
read_kv = {4: read_u32, 2: read_u16, 1: read_u8}[ELEMENT_BYTES]
write_kv = {4: write_i32, 2: write_u16, 1: write_u8}[ELEMENT_BYTES]
row_buffer = stack(HEAD_DIM * 4)
code_buffer = stack(HEAD_DIM * ELEMENT_BYTES)


@jit
def rotate(source: int, head: int, cos: int, sin: int, position: int, scale: Real, out: int, out_index: int) -> None:
    """Rotate head ``head`` of a projected row into ``out`` (fp32, from element ``out_index``), times ``scale``."""
    for i in range(HALF_VECTORS):
        at = min(i * LANES, HALF - LANES)
        first = load_result(source, head * HEAD_DIM + at)
        second = load_result(source, head * HEAD_DIM + HALF + at)
        c, s = load_f32(cos, position * HALF + at), load_f32(sin, position * HALF + at)
        factor = splat(scale)
        store_f32(out, out_index + at, mul(sub(mul(first, c), mul(second, s)), factor))
        store_f32(out, out_index + HALF + at, mul(add(mul(second, c), mul(first, s)), factor))


@jit
def encode(row: int, scales: int, scale_index: int, out: int, out_index: int) -> None:
    """Encode ``row`` (fp32 ``[HEAD_DIM]``) into the pool's format, and its scale into ``scales``."""
    if not QUANTIZED:
        for i in range(HEAD_VECTORS):
            store_kv(out, out_index + i * LANES, finite(load_f32(row, i * LANES), LIMIT))
        return
    peak = splat(ZERO)
    for i in range(HEAD_VECTORS):
        peak = maximum(absolute(finite(load_f32(row, i * LANES), LIMIT)), peak)
    write_f16(scales, scale_index, max(max_lanes(peak) / QUANT_MAX, SCALE_FLOOR))
    scale = splat(read_f16(scales, scale_index))  # what will be read back
    for i in range(HEAD_VECTORS):
        quotient = div(finite(load_f32(row, i * LANES), LIMIT), scale)
        store_kv(out, out_index + i * LANES, add(quotient, splat(ZERO)))  # -0 to +0


@jit
def write_row(qkv: int, cos: int, sin: int, position: int, slot: int, query: int, pools: int) -> None:
    """One token: all its heads. ``qkv`` and ``query`` are the addresses of its rows."""
    for head in range(NUM_HEADS):
        rotate(qkv, head, cos, sin, position, QUERY_SCALE, query, head * HEAD_DIM)
    row, codes = row_buffer(), code_buffer()
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    for head in range(NUM_KV_HEADS):
        page = block * NUM_KV_HEADS + head
        rotate(qkv, NUM_HEADS + head, cos, sin, position, np.float32(1), row, 0)
        encode(row, read_i64(pools, 2), page * BLOCK_SIZE + offset, codes, 0)
        for d in range(HEAD_DIM):
            write_kv(read_i64(pools, 0), (page * HEAD_DIM + d) * BLOCK_SIZE + offset, read_kv(codes, d))
        for i in range(HEAD_VECTORS):
            value = load_result(qkv, (NUM_HEADS + NUM_KV_HEADS + head) * HEAD_DIM + i * LANES)
            store_f32(row, i * LANES, value)
        slot_index = page * BLOCK_SIZE + offset
        encode(row, read_i64(pools, 3), slot_index, read_i64(pools, 1), slot_index * HEAD_DIM)


def rope_kv_write(arguments: int, part: int, parts: int) -> None:
    """Treat a contiguous share of the rows.

    Arguments: qkv, keys, values, key scales, value scales, cos, sin, positions, slot mapping, query, number of rows.
    """
    qkv, pools = read_i64(arguments, 0), arguments + 8
    cos, sin = read_i64(arguments, 5), read_i64(arguments, 6)
    positions, slots, query = read_i64(arguments, 7), read_i64(arguments, 8), read_i64(arguments, 9)
    num_rows = read_i64(arguments, 10)
    row_bytes = ROW * (2 if RESULTS == "bf16" else 4)
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        write_row(
            qkv + row * row_bytes,
            cos,
            sin,
            read_i32(positions, row),
            read_i32(slots, row),
            query + row * NUM_HEADS * HEAD_DIM * 4,
            pools,
        )


KERNELS = (rope_kv_write,)
