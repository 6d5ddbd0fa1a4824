"""Source of the paged attention kernels. ``specialize.py`` rewrites the constants and compiles it; not used directly.

One code path serves decode and ragged chunked prefill with any group of query heads per KV head. A work item is up to
``TOKENS_PER_ITEM`` consecutive rows of one sequence and one KV head. Its context is walked in tiles of 256 tokens at
absolute positions: scores of a tile into scratch, one maximum and one exponential pass, then the weighted sum of
values; the running sum is rescaled only when the maximum rose. What a row computes therefore depends on its own query
and its context's pool contents only, bit by bit, whatever the batch or the chunking (masked tokens add exact zeros).

Few rows read the pool's format directly; more rows first turn the tile into fp32 in scratch, which has the same bits.
"""

from collections.abc import Callable

import numpy as np
from numba import types

from trtcb.plugins.cpu.kernel_plan import ITEM_FIELDS
from trtcb.plugins.cpu.simd import (
    add,
    div,
    exp_weight,
    fetch_add,
    first_lanes,
    jit,
    load_f16,
    load_f32,
    max_lanes,
    maximum,
    mul,
    read_f32,
    read_i32,
    read_i64,
    splat,
    store_bf16,
    store_f32,
    sub,
    sum_lanes,
    write_f32,
    write_i64,
)
from trtcb.plugins.cpu.tile import TileSpec, define_tile, largest_divisor, value_shape
from trtcb.plugins.cpu.vector_ir import (
    E4M3_SCALE,
    EMIT_LOAD,
    LANES,
    define,
    f32x16,
)

# --- constants of a specialisation ---
NUM_HEADS = 9
NUM_KV_HEADS = 3
HEAD_DIM = 64
BLOCK_SIZE = 32
KV_FORMAT = "fp8"
ACTIVATION = "bf16"
ACCUMULATORS = 24
# --- end of constants ---

GROUP = NUM_HEADS // NUM_KV_HEADS
QUANTIZED = KV_FORMAT in ("int8", "fp8")
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}[KV_FORMAT]
LOAD_FORMAT, SCALE_FACTOR = ("fp8/256", np.float32(E4M3_SCALE)) if KV_FORMAT == "fp8" else (KV_FORMAT, np.float32(1))
HEAD_VECTORS = HEAD_DIM // LANES
TILE = 256  # tokens; part of the definition of a row's value
UNIT = 32  # tokens a score tile covers; divides the block size
UNIT_VECTORS = UNIT // LANES
UNITS = TILE // UNIT
TOKENS_PER_ITEM = max(8, 96 // GROUP)
DIRECT_TOKENS = 2  # up to here converting keys and values per row costs less than a pass through scratch
MAX_ROWS = TOKENS_PER_ITEM * GROUP
SCORE_VECTORS = UNIT_VECTORS if ACCUMULATORS >= 16 else 1  # of a tile: columns need registers beside accumulators
SMALL_ROWS = largest_divisor(GROUP, ACCUMULATORS // SCORE_VECTORS)
LARGE_ROWS = SMALL_ROWS * max(1, ACCUMULATORS // SCORE_VECTORS // SMALL_ROWS)

# one thread's scratch, byte offsets
QUERY = 0
CONTEXT = QUERY + MAX_ROWS * HEAD_DIM * 4
SCORES = CONTEXT + MAX_ROWS * HEAD_DIM * 4
MAXIMUM = SCORES + LARGE_ROWS * TILE * 4
TOTAL = MAXIMUM + MAX_ROWS * 4
KEY_SCALES = TOTAL + MAX_ROWS * 4
VALUE_SCALES = KEY_SCALES + TILE * 4
KEY_UNITS = VALUE_SCALES + TILE * 4
VALUE_UNITS = KEY_UNITS + UNITS * 8
NEXT_KEY_UNITS = VALUE_UNITS + UNITS * 8
KEYS = NEXT_KEY_UNITS + UNITS * 8
VALUES = KEYS + TILE * HEAD_DIM * 4
SCRATCH_BYTES = (VALUES + TILE * HEAD_DIM * 4 + 4095) // 4096 * 4096

NO_SCORE = np.float32(-np.inf)
ZERO = np.float32(0)
ONE = np.float32(1)

load_kv = define(f32x16, types.int64, types.int64)(EMIT_LOAD[LOAD_FORMAT])
store_activation = {"fp32": store_f32, "bf16": store_bf16}[ACTIVATION]


@jit
def softmax_row(scratch: int, row: int, scores: int, valid: int, units: int) -> None:
    """Turn a row's scores of one tile into probabilities times value scales, in place; update the running state."""
    if valid <= 0:
        for i in range(units * UNIT_VECTORS):
            store_f32(scores, i * LANES, splat(ZERO))
        return
    peak = splat(NO_SCORE)
    for i in range(units * UNIT_VECTORS):
        score = load_f32(scores, i * LANES)
        if QUANTIZED:
            score = mul(score, load_f32(scratch + KEY_SCALES, i * LANES))
        if valid < (i + 1) * LANES:
            score = first_lanes(score, valid - i * LANES, NO_SCORE)
        store_f32(scores, i * LANES, score)
        peak = maximum(score, peak)
    old = read_f32(scratch + MAXIMUM, row)
    new = max(old, max_lanes(peak))
    shift = splat(new)
    total = splat(ZERO)
    for i in range(units * UNIT_VECTORS):
        weight = exp_weight(sub(load_f32(scores, i * LANES), shift))
        total = add(total, weight)
        if QUANTIZED:
            weight = mul(weight, load_f32(scratch + VALUE_SCALES, i * LANES))
        store_f32(scores, i * LANES, weight)
    running = read_f32(scratch + TOTAL, row)
    if new > old:
        decay = exp_weight(splat(old - new))
        running = running * max_lanes(decay)
        write_f32(scratch + MAXIMUM, row, new)
        for i in range(row * HEAD_VECTORS, (row + 1) * HEAD_VECTORS):
            store_f32(scratch + CONTEXT, i * LANES, mul(load_f32(scratch + CONTEXT, i * LANES), decay))
    write_f32(scratch + TOTAL, row, running + sum_lanes(total))


def make_tile_pass(rows: int, *, direct: bool) -> Callable[[int, int, int, int], None]:
    """Make the pass of ``rows`` rows over one tile, reading the pool (``direct``) or the fp32 copy in scratch."""
    kv_format = LOAD_FORMAT if direct else "fp32"
    value_rows, value_vectors = value_shape(rows, HEAD_VECTORS, ACCUMULATORS)
    if direct:  # every conversion once
        value_rows, value_vectors = rows, largest_divisor(HEAD_VECTORS, min(SCORE_VECTORS, ACCUMULATORS // rows))
    unit_bytes = UNIT * HEAD_DIM * ELEMENT_BYTES
    score_tile = define_tile(
        TileSpec(
            rows,
            SCORE_VECTORS,
            kv_format,
            a_stride=HEAD_DIM,
            b_stride=BLOCK_SIZE if direct else UNIT,
            c_stride=TILE,
            prefetch_bytes=unit_bytes // HEAD_DIM * SCORE_VECTORS // UNIT_VECTORS if direct else 0,
        )
    )
    value_tile = define_tile(
        TileSpec(
            value_rows,
            value_vectors,
            kv_format,
            a_stride=TILE,
            b_stride=HEAD_DIM,
            c_stride=HEAD_DIM,
            accumulate=True,
            prefetch_bytes=unit_bytes // UNIT * value_vectors // HEAD_VECTORS if direct else 0,
        )
    )
    column_bytes = value_vectors * LANES * (ELEMENT_BYTES if direct else 4)
    prefetch_columns = unit_bytes * value_vectors // HEAD_VECTORS
    score_bytes = LANES * (ELEMENT_BYTES if direct else 4)
    prefetch_scores = unit_bytes // UNIT_VECTORS

    @jit
    def tile_pass(scratch: int, row: int, valid: int, units: int) -> None:
        # `valid`: tokens of this tile that the last row sees; row r sees (rows - 1 - r) // GROUP fewer
        scores = scratch + SCORES
        for unit in range(units):
            keys, following = read_i64(scratch + KEY_UNITS, unit), read_i64(scratch + VALUE_UNITS, unit)
            for vector in range(0, UNIT_VECTORS, SCORE_VECTORS):
                score_tile(
                    scratch + QUERY + row * HEAD_DIM * 4,
                    keys + vector * score_bytes,
                    scores + (unit * UNIT + vector * LANES) * 4,
                    HEAD_DIM,
                    following + vector * prefetch_scores,
                )
        last_token = (row + rows - 1) // GROUP
        for r in range(rows):
            hidden = last_token - (row + r) // GROUP
            softmax_row(scratch, row + r, scores + r * TILE * 4, min(valid - hidden, units * UNIT), units)
        for unit in range(units):
            values = read_i64(scratch + VALUE_UNITS, unit)
            next_keys = read_i64(scratch + NEXT_KEY_UNITS, unit)
            for r in range(0, rows, value_rows):
                for column in range(HEAD_VECTORS // value_vectors):
                    value_tile(
                        scores + (r * TILE + unit * UNIT) * 4,
                        values + column * column_bytes,
                        scratch + CONTEXT + ((row + r) * HEAD_DIM + column * value_vectors * LANES) * 4,
                        UNIT,
                        next_keys + column * prefetch_columns,
                    )

    return tile_pass  # type: ignore[no-any-return, unused-ignore]


direct_pass = make_tile_pass(SMALL_ROWS, direct=True)
small_pass = make_tile_pass(SMALL_ROWS, direct=False)
large_pass = make_tile_pass(LARGE_ROWS, direct=False)


@jit
def item_table(arguments: int, work: int) -> int:
    """Address of the block table of a work item's sequence."""
    sequence: int = read_i32(read_i64(arguments, 8), work // NUM_KV_HEADS * ITEM_FIELDS)
    tables: int = read_i64(arguments, 5)
    return tables + sequence * read_i64(arguments, 6) * 4


@jit
def item_end(arguments: int, work: int) -> int:
    """One more than the position of a work item's last row."""
    item = read_i64(arguments, 8) + work // NUM_KV_HEADS * ITEM_FIELDS * 4
    first_position: int = read_i32(read_i64(arguments, 7), read_i32(item, 1))
    return first_position + read_i32(item, 2)


@jit
def key_address(pools: int, table: int, head: int, token: int) -> int:
    """Address of a unit's keys, the unit starting at ``token``."""
    page: int = read_i32(table, token // BLOCK_SIZE) * NUM_KV_HEADS + head
    keys: int = read_i64(pools, 0)
    return keys + (page * HEAD_DIM * BLOCK_SIZE + token % BLOCK_SIZE) * ELEMENT_BYTES


@jit
def locate_tile(arguments: int, scratch: int, work: int, following: int, start: int, end: int) -> None:
    """Write the addresses of the tile's units and its scales (as fp32) into scratch.

    Also the addresses of the keys to prefetch: the next tile's, or those of the ``following`` work item.
    """
    pools, table, head = arguments + 8, item_table(arguments, work), work % NUM_KV_HEADS
    next_table, next_head, next_start, next_end = table, head, start + TILE, end
    if next_start >= end and following < read_i64(arguments, 9) * NUM_KV_HEADS:
        next_table, next_head, next_start = item_table(arguments, following), following % NUM_KV_HEADS, 0
        next_end = item_end(arguments, following)
    for unit in range((min(TILE, end - start) + UNIT - 1) // UNIT):
        token = start + unit * UNIT
        keys = key_address(pools, table, head, token)
        slot = (read_i32(table, token // BLOCK_SIZE) * NUM_KV_HEADS + head) * BLOCK_SIZE + token % BLOCK_SIZE
        write_i64(scratch + KEY_UNITS, unit, keys)
        write_i64(scratch + VALUE_UNITS, unit, read_i64(pools, 1) + slot * HEAD_DIM * ELEMENT_BYTES)
        if next_start + unit * UNIT < next_end:
            keys = key_address(pools, next_table, next_head, next_start + unit * UNIT)
        write_i64(scratch + NEXT_KEY_UNITS, unit, keys)
        if QUANTIZED:
            for i in range(UNIT_VECTORS):
                lane, factor = unit * UNIT + i * LANES, splat(SCALE_FACTOR)
                key_scales = mul(load_f16(read_i64(pools, 2), slot + i * LANES), factor)
                value_scales = mul(load_f16(read_i64(pools, 3), slot + i * LANES), factor)
                store_f32(scratch + KEY_SCALES, lane, key_scales)
                store_f32(scratch + VALUE_SCALES, lane, value_scales)


@jit
def stage_tile(scratch: int, units: int) -> None:
    """Convert the tile's units to fp32 in scratch and point the unit addresses there."""
    for unit in range(units):
        keys, values = read_i64(scratch + KEY_UNITS, unit), read_i64(scratch + VALUE_UNITS, unit)
        key_copy = scratch + KEYS + unit * UNIT * HEAD_DIM * 4
        value_copy = scratch + VALUES + unit * UNIT * HEAD_DIM * 4
        for d in range(HEAD_DIM):
            for i in range(UNIT_VECTORS):
                store_f32(key_copy, d * UNIT + i * LANES, load_kv(keys, d * BLOCK_SIZE + i * LANES))
        for i in range(UNIT * HEAD_VECTORS):
            store_f32(value_copy, i * LANES, load_kv(values, i * LANES))
        write_i64(scratch + KEY_UNITS, unit, key_copy)
        write_i64(scratch + VALUE_UNITS, unit, value_copy)


@jit
def attend_tile(scratch: int, start: int, first_position: int, num_tokens: int) -> None:
    """All rows of an item over one tile."""
    rows = num_tokens * GROUP
    direct = num_tokens <= DIRECT_TOKENS
    tile_units = (min(TILE, first_position + num_tokens - start) + UNIT - 1) // UNIT
    if not direct:
        stage_tile(scratch, tile_units)
    row = 0
    while row < rows:
        large = not direct and rows - row >= LARGE_ROWS
        step = LARGE_ROWS if large else SMALL_ROWS
        valid = first_position + (row + step - 1) // GROUP + 1 - start
        units = min(tile_units, (valid + UNIT - 1) // UNIT)
        if units > 0:
            if large:
                large_pass(scratch, row, valid, units)
            elif direct:
                direct_pass(scratch, row, valid, units)
            else:
                small_pass(scratch, row, valid, units)
        row += step


@jit
def attend(arguments: int, scratch: int, work: int, following: int) -> None:
    """One work item: some rows of a sequence and one KV head."""
    item = read_i64(arguments, 8) + work // NUM_KV_HEADS * ITEM_FIELDS * 4
    first, num_tokens, head = read_i32(item, 1), read_i32(item, 2), work % NUM_KV_HEADS
    rows = num_tokens * GROUP
    for r in range(rows):
        source = ((first + r // GROUP) * NUM_HEADS + head * GROUP + r % GROUP) * HEAD_DIM
        for i in range(HEAD_VECTORS):
            value = load_f32(read_i64(arguments, 0), source + i * LANES)
            store_f32(scratch + QUERY, r * HEAD_DIM + i * LANES, value)
            store_f32(scratch + CONTEXT, r * HEAD_DIM + i * LANES, splat(ZERO))
        write_f32(scratch + MAXIMUM, r, NO_SCORE)
        write_f32(scratch + TOTAL, r, ZERO)
    end = item_end(arguments, work)
    for start in range(0, end, TILE):
        locate_tile(arguments, scratch, work, following, start, end)
        attend_tile(scratch, start, end - num_tokens, num_tokens)
    for r in range(rows):
        target = ((first + r // GROUP) * NUM_HEADS + head * GROUP + r % GROUP) * HEAD_DIM
        total = splat(read_f32(scratch + TOTAL, r))
        for i in range(HEAD_VECTORS):
            value = div(load_f32(scratch + CONTEXT, r * HEAD_DIM + i * LANES), total)
            store_activation(read_i64(arguments, 10), target + i * LANES, value)


def paged_attention(arguments: int, part: int, parts: int) -> None:
    """Compute work items (item of the plan x KV head): the first by ``part``, then whatever is claimed next.

    Each is claimed one ahead, so that its keys can be prefetched.

    Arguments: query, keys, values, key scales, value scales, block tables, blocks per table, positions, items, number
    of items, context, scratch; the last word of the argument block is the claim counter.
    """
    scratch = read_i64(arguments, 11) + part * SCRATCH_BYTES
    num_work = read_i64(arguments, 9) * NUM_KV_HEADS
    work = part
    while work < num_work:
        following = parts + fetch_add(arguments + 15 * 8, 1)
        attend(arguments, scratch, work, following)
        work = following


KERNELS = (paged_attention,)
