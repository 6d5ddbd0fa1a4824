"""Source of the paged attention kernels. ``specialize.py`` rewrites the constants and compiles it; not used directly.

One code path serves decode and ragged chunked prefill with any group of query heads per KV head. A work item is up to
``TOKENS_PER_ITEM`` consecutive rows of one sequence and one KV head. Its context is walked in tiles of 256 tokens at
absolute positions: scores of a tile into scratch, one maximum and one exponential pass, then the weighted sum of
values; the running sum is rescaled only when the maximum rose. What a row computes therefore depends on its own query
and its context's pool contents only, bit by bit, whatever the batch or the chunking (masked tokens add exact zeros).

Few rows read the pool's format directly; more rows first turn the tile into fp32 in scratch, which has the same bits.
"""

from collections.abc import Callable

from numba import types

from trtcb.plugins.cpu.attention_work import (
    TILE,
    TILE_BYTES,
    TILE_KEY_UNITS,
    TILE_NEXT_KEY_UNITS,
    TILE_VALUE_UNITS,
    UNIT,
    UNIT_VECTORS,
    AttentionShape,
    RowState,
    item_address,
    item_end,
    make_begin_rows,
    make_end_rows,
    make_locate_tile,
    make_softmax_row,
)
from trtcb.plugins.cpu.simd import fetch_add, jit, read_i32, read_i64, store_f32, write_i64
from trtcb.plugins.cpu.tile import TileSpec, define_tile, largest_divisor, value_shape
from trtcb.plugins.cpu.vector_ir import E4M3_SCALE, EMIT_LOAD, LANES, define, f32x16

# --- constants of a specialisation ---
NUM_HEADS = 9
NUM_KV_HEADS = 3
HEAD_DIM = 64
BLOCK_SIZE = 32
KV_FORMAT = "fp8"
ACTIVATION = "bf16"
ACCUMULATORS = 24
# --- end of constants ---

SHAPE = AttentionShape(__name__, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KV_FORMAT)
GROUP = SHAPE.group
ELEMENT_BYTES = SHAPE.element_bytes
TOKENS_PER_ITEM = SHAPE.tokens_per_item
LOAD_FORMAT, SCALE_FACTOR = ("fp8/256", E4M3_SCALE) if KV_FORMAT == "fp8" else (KV_FORMAT, 1.0)
HEAD_VECTORS = HEAD_DIM // LANES
DIRECT_TOKENS = 2  # up to here converting keys and values per row costs less than a pass through scratch
SCORE_VECTORS = UNIT_VECTORS if ACCUMULATORS >= 16 else 1  # of a tile: columns need registers beside accumulators
SMALL_ROWS = largest_divisor(GROUP, ACCUMULATORS // SCORE_VECTORS)
LARGE_ROWS = SMALL_ROWS * max(1, ACCUMULATORS // SCORE_VECTORS // SMALL_ROWS)

# one thread's scratch, byte offsets
STATE = 0
QUERY = STATE + RowState(SHAPE).num_bytes
SCORES = QUERY + SHAPE.max_rows * HEAD_DIM * 4
LOCATED = SCORES + LARGE_ROWS * TILE * 4
KEY_UNITS, VALUE_UNITS, NEXT_KEY_UNITS = (
    LOCATED + place for place in (TILE_KEY_UNITS, TILE_VALUE_UNITS, TILE_NEXT_KEY_UNITS)
)
KEYS = LOCATED + TILE_BYTES
VALUES = KEYS + TILE * HEAD_DIM * 4
SCRATCH_BYTES = (VALUES + TILE * HEAD_DIM * 4 + 4095) // 4096 * 4096

load_kv = define(f32x16, types.int64, types.int64)(EMIT_LOAD[LOAD_FORMAT])
begin_rows = make_begin_rows(SHAPE, store_f32)
end_rows = make_end_rows(SHAPE, ACTIVATION)
locate_tile = make_locate_tile(SHAPE, SCALE_FACTOR, SCALE_FACTOR)
softmax_row = make_softmax_row(SHAPE)


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
            row_scores, row_valid = scores + r * TILE * 4, min(valid - hidden, units * UNIT)
            softmax_row(scratch + LOCATED, scratch + STATE, row + r, row_scores, row_scores, row_valid, units)
        for unit in range(units):
            values = read_i64(scratch + VALUE_UNITS, unit)
            next_keys = read_i64(scratch + NEXT_KEY_UNITS, unit)
            for r in range(0, rows, value_rows):
                for column in range(HEAD_VECTORS // value_vectors):
                    value_tile(
                        scores + (r * TILE + unit * UNIT) * 4,
                        values + column * column_bytes,
                        scratch + STATE + ((row + r) * HEAD_DIM + column * value_vectors * LANES) * 4,
                        UNIT,
                        next_keys + column * prefetch_columns,
                    )

    return tile_pass  # type: ignore[no-any-return, unused-ignore]


direct_pass = make_tile_pass(SMALL_ROWS, direct=True)
small_pass = make_tile_pass(SMALL_ROWS, direct=False)
large_pass = make_tile_pass(LARGE_ROWS, direct=False)


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
    num_tokens = read_i32(item_address(arguments, work, NUM_KV_HEADS), 2)
    begin_rows(arguments, work, scratch + QUERY, scratch + STATE)
    end = item_end(arguments, work, NUM_KV_HEADS)
    for start in range(0, end, TILE):
        locate_tile(arguments, scratch + LOCATED, work, following, start, end)
        attend_tile(scratch, start, end - num_tokens, num_tokens)
    end_rows(arguments, work, scratch + STATE)


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
