"""Source of the paged attention kernel on the matrix unit. ``specialize.py`` rewrites the constants and compiles it.

As ``kernel_attention.py`` in what it computes and how a batch is cut, but keys and values of a tile are turned into
bf16 once per work item, exactly, and multiplied with queries as sums of two bf16 (one alone would cost more accuracy
than all the rest) and with weights rounded to bf16. Everything else is fp32. A row's result depends on its own query
and its context's pool contents only, bit by bit: a row of a product does not depend on the other rows, a token that a
row does not see has a weight of exactly zero, and tiles lie at absolute positions.
"""

import numpy as np

from trtcb.plugins.cpu import matrix_unit
from trtcb.plugins.cpu.attention_work import (
    TILE,
    TILE_BYTES,
    TILE_KEY_UNITS,
    TILE_NEXT_KEY_UNITS,
    TILE_NEXT_VALUE_UNITS,
    TILE_VALUE_UNITS,
    UNIT,
    UNITS,
    AttentionShape,
    RowState,
    item_address,
    item_end,
    make_begin_rows,
    make_end_rows,
    make_locate_tile,
    make_softmax_row,
)
from trtcb.plugins.cpu.matrix_attention_tile import (
    BF16_SCALE,
    ConvertSpec,
    define_context,
    define_convert,
    define_scores,
    exp2_weight,
    round_bf16,
    store_rounded_bf16,
)
from trtcb.plugins.cpu.simd import Vector, fetch_add, jit, mul, read_i32, read_i64, splat, sub

# --- constants of a specialisation ---
NUM_HEADS = 9
NUM_KV_HEADS = 3
HEAD_DIM = 64
BLOCK_SIZE = 32
KV_FORMAT = "fp8"
ACTIVATION = "bf16"
# --- end of constants ---

SHAPE = AttentionShape(__name__, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KV_FORMAT)
GROUP = SHAPE.group
TOKENS_PER_ITEM = SHAPE.tokens_per_item
ROWS = matrix_unit.ROWS
UNIT_POOL_BYTES = UNIT * HEAD_DIM * SHAPE.element_bytes
UNIT_BYTES = UNIT * HEAD_DIM * 2
UNITS_AT_ONCE = 2  # of a product of scores
VALUES_AT_ONCE = 4  # units of values converted before they are used

# Scores become powers of two, and half of what the stored numbers lack is made up for by queries: nothing that is
# multiplied may come near the limits of bf16.
LOG2_E = 1.4426950408889634
QUERY_SCALE = 2.0**60 if SHAPE.is_quantized else 1.0
QUERY_FACTOR = np.float32(QUERY_SCALE * LOG2_E)

# one thread's scratch, byte offsets; strides avoid that all rows fall on the same few lines of the cache
SCORE_STRIDE = (TILE + 16) * 4
WEIGHT_STRIDE = (TILE + 32) * 2
STATE = 0
QUERY_BYTES = SHAPE.max_rows * HEAD_DIM * 2
QUERY = STATE + RowState(SHAPE).num_bytes
SCORES = QUERY + 2 * QUERY_BYTES
WEIGHTS = SCORES + ROWS * SCORE_STRIDE
LOCATED = WEIGHTS + ROWS * WEIGHT_STRIDE
KEYS = (LOCATED + TILE_BYTES + 63) // 64 * 64
VALUES = KEYS + UNITS * UNIT_BYTES
SCRATCH_BYTES = (VALUES + UNITS * UNIT_BYTES + 4095) // 4096 * 4096


@jit
def store_query(address: int, index: int, x: Vector) -> None:
    """A query, scaled, as bf16 and the bf16 of what that lacks."""
    scaled = mul(x, splat(QUERY_FACTOR))
    store_rounded_bf16(address, index, scaled)
    store_rounded_bf16(address + QUERY_BYTES, index, sub(scaled, round_bf16(scaled)))


begin_rows = make_begin_rows(SHAPE, store_query)
end_rows = make_end_rows(SHAPE, ACTIVATION)
locate_tile = make_locate_tile(SHAPE, BF16_SCALE[KV_FORMAT] / QUERY_SCALE, BF16_SCALE[KV_FORMAT], invert=True)
softmax_row = make_softmax_row(
    SHAPE,
    exponential=exp2_weight,
    round_weight=round_bf16,
    store_weight=store_rounded_bf16,
)
convert_keys = define_convert(ConvertSpec(KV_FORMAT, HEAD_DIM, UNIT, BLOCK_SIZE, UNIT_POOL_BYTES // (HEAD_DIM // 2)))
convert_values = define_convert(ConvertSpec(KV_FORMAT, UNIT, HEAD_DIM, HEAD_DIM, UNIT_POOL_BYTES // (UNIT // 2)))
score_units = define_scores(HEAD_DIM, QUERY_BYTES, SCORE_STRIDE)
add_context = define_context(HEAD_DIM, WEIGHT_STRIDE)


@jit
def convert_two(scratch: int, unit: int, first: int, units: int, keys: int) -> None:
    """Convert the keys of two units, or what of them lies from ``first`` to ``units``."""
    for i in range(UNITS_AT_ONCE):
        if first <= unit + i and unit + i < units:
            following = read_i64(scratch + LOCATED + TILE_NEXT_KEY_UNITS, unit + i)
            convert_keys(read_i64(scratch + LOCATED + TILE_KEY_UNITS, unit + i), keys + i * UNIT_BYTES, following)


@jit
def convert_value_unit(scratch: int, unit: int, values: int) -> None:
    """Convert the values of a unit."""
    following = read_i64(scratch + LOCATED + TILE_NEXT_VALUE_UNITS, unit)
    convert_values(read_i64(scratch + LOCATED + TILE_VALUE_UNITS, unit), values, following)


@jit
def weigh(scratch: int, row: int, last: int, valid: int, units: int) -> None:
    """Softmax of a block of rows; ``valid`` tokens of the tile are seen by the ``last``."""
    for r in range(row, last + 1):
        row_valid = min(valid - (last // GROUP - r // GROUP), units * UNIT)
        scores = scratch + SCORES + (r - row) * SCORE_STRIDE
        weights = scratch + WEIGHTS + (r - row) * WEIGHT_STRIDE
        softmax_row(scratch + LOCATED, scratch + STATE, r, scores, weights, row_valid, units)


@jit
def attend_block(scratch: int, start: int, first_position: int, rows: int) -> None:
    """All rows of an item with one block of them over one tile.

    What is converted stays in the nearest cache: keys take turns at two places, and are used one turn later, when they
    have arrived there; values are used a few units at a time.
    """
    valid = first_position + (rows - 1) // GROUP + 1 - start
    units = min(UNITS, (valid + UNIT - 1) // UNIT)
    keys, other = scratch + KEYS, scratch + KEYS + UNITS_AT_ONCE * UNIT_BYTES
    convert_two(scratch, 0, 0, units, keys)
    for unit in range(0, units, UNITS_AT_ONCE):
        convert_two(scratch, unit + UNITS_AT_ONCE, 0, units, other)
        score_units(scratch + QUERY, keys, scratch + SCORES + unit * UNIT * 4)
        keys, other = other, keys
    weigh(scratch, 0, rows - 1, valid, units)
    for first in range(0, units, VALUES_AT_ONCE):
        count = min(VALUES_AT_ONCE, units - first)
        for i in range(count):
            convert_value_unit(scratch, first + i, scratch + VALUES + i * UNIT_BYTES)
        weights = scratch + WEIGHTS + first * UNIT * 2
        add_context(weights, scratch + VALUES, UNIT_BYTES, count, scratch + STATE)


@jit
def attend_blocks(scratch: int, start: int, first_position: int, rows: int) -> None:
    """All rows of an item over one tile, whose units are converted when a block of rows is the first to see them."""
    converted = 0
    for row in range(0, rows, ROWS):
        last = min(row + ROWS, rows) - 1
        valid = first_position + last // GROUP + 1 - start
        units = min(UNITS, (valid + UNIT - 1) // UNIT)
        if units > 0:
            for unit in range(0, units, UNITS_AT_ONCE):
                keys = scratch + KEYS + unit * UNIT_BYTES
                convert_two(scratch, unit, converted, units, keys)
                score_units(scratch + QUERY + row * HEAD_DIM * 2, keys, scratch + SCORES + unit * UNIT * 4)
            weigh(scratch, row, last, valid, units)
            for unit in range(converted, units):
                convert_value_unit(scratch, unit, scratch + VALUES + unit * UNIT_BYTES)
            context = scratch + STATE + row * HEAD_DIM * 4
            add_context(scratch + WEIGHTS, scratch + VALUES, UNIT_BYTES, units, context)
            converted = max(converted, units)


@jit
def attend(arguments: int, scratch: int, work: int, following: int) -> None:
    """One work item: some rows of a sequence and one KV head."""
    num_tokens = read_i32(item_address(arguments, work, NUM_KV_HEADS), 2)
    begin_rows(arguments, work, scratch + QUERY, scratch + STATE)
    end = item_end(arguments, work, NUM_KV_HEADS)
    for start in range(0, end, TILE):
        locate_tile(arguments, scratch + LOCATED, work, following, start, end)
        if num_tokens * GROUP <= ROWS:
            attend_block(scratch, start, end - num_tokens, num_tokens * GROUP)
        else:
            attend_blocks(scratch, start, end - num_tokens, num_tokens * GROUP)
    end_rows(arguments, work, scratch + STATE)


def paged_attention(arguments: int, part: int, parts: int) -> None:
    """As ``kernel_attention.paged_attention``, with the same arguments."""
    scratch = read_i64(arguments, 11) + part * SCRATCH_BYTES
    num_work = read_i64(arguments, 9) * NUM_KV_HEADS
    saved = matrix_unit.saved_configuration()
    configured = ROWS
    matrix_unit.enter(saved, configured)
    work = part
    while work < num_work:
        following = parts + fetch_add(arguments + 15 * 8, 1)
        rows = min(ROWS, read_i32(item_address(arguments, work, NUM_KV_HEADS), 2) * GROUP)
        if rows != configured:
            matrix_unit.configure(rows)
            configured = rows
        attend(arguments, scratch, work, following)
        work = following
    matrix_unit.leave(saved)


KERNELS = (paged_attention,)
