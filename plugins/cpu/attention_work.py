"""What the attention kernels have in common: a work item's rows, where its context lies, and the softmax over a tile.

A work item is up to ``tokens_per_item`` consecutive rows of one sequence and one KV head. Its context is walked in
tiles of 256 tokens at absolute positions, each in units of 32 tokens that lie in one block. The functions made here are
parts of a kernel source: they find a tile's units and scales in one region of scratch (``TILE_*``, relative to
``located``) and keep the rows' running sums in another (:class:`RowState`, relative to ``state``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trtcb.plugins.cpu.kernel_plan import ITEM_FIELDS
from trtcb.plugins.cpu.simd import (
    Vector,
    add,
    div,
    exp_weight,
    first_lanes,
    fma,
    jit,
    jit_for,
    load_f16,
    load_f32,
    max_lanes,
    maximum,
    mul,
    read_f32,
    read_i32,
    read_i64,
    reciprocal,
    splat,
    store_bf16,
    store_f32,
    sub,
    sum_lanes,
    write_f32,
    write_i64,
)
from trtcb.plugins.cpu.vector_ir import LANES

TILE = 256  # tokens; part of the definition of a row's value
UNIT = 32  # tokens; divides the block size
UNIT_VECTORS = UNIT // LANES
UNITS = TILE // UNIT

# what is known of the tile at hand, byte offsets
TILE_KEY_SCALES = 0
TILE_VALUE_SCALES = TILE_KEY_SCALES + TILE * 4
TILE_INVERSE_SCALES = TILE_VALUE_SCALES + TILE * 4
TILE_KEY_UNITS = TILE_INVERSE_SCALES + TILE * 4
TILE_VALUE_UNITS = TILE_KEY_UNITS + UNITS * 8
TILE_NEXT_KEY_UNITS = TILE_VALUE_UNITS + UNITS * 8
TILE_NEXT_VALUE_UNITS = TILE_NEXT_KEY_UNITS + UNITS * 8
TILE_BYTES = TILE_NEXT_VALUE_UNITS + UNITS * 8

SHORT = 2 * TILE  # a context that is fetched one work item ahead; longer ones are, tile by tile

NO_SCORE = np.float32(-np.inf)
ZERO = np.float32(0)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The constants of a specialisation that the parts depend on, and its name (see ``simd.jit_for``)."""

    owner: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_format: str

    @property
    def group(self) -> int:
        """Query heads per KV head: rows per token."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values have scales."""
        return self.kv_format in ("int8", "fp8")

    @property
    def element_bytes(self) -> int:
        """Size of a key's or value's element in the pool."""
        return {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}[self.kv_format]

    @property
    def tokens_per_item(self) -> int:
        """Most tokens of a work item."""
        return max(8, 96 // self.group)

    @property
    def max_rows(self) -> int:
        """Rows that fit into scratch: a work item's, rounded up to whole tiles of the matrix unit."""
        return -(-self.tokens_per_item * self.group // 16) * 16


@dataclass(frozen=True, slots=True)
class RowState:
    """Byte offsets of the rows' running sums: unnormalised context ``[max_rows, head_dim]``, maximum, total weight."""

    shape: AttentionShape

    context = 0

    @property
    def maximum(self) -> int:
        """Largest score so far, fp32 per row."""
        return self.shape.max_rows * self.shape.head_dim * 4

    @property
    def total(self) -> int:
        """Sum of weights so far, fp32 per row."""
        return self.maximum + self.shape.max_rows * 4

    @property
    def num_bytes(self) -> int:
        """Size of the region."""
        return self.total + self.shape.max_rows * 4


@jit
def item_address(arguments: int, work: int, num_kv_heads: int) -> int:
    """Address of a work item in the plan."""
    items: int = read_i64(arguments, 8)
    return items + work // num_kv_heads * ITEM_FIELDS * 4


@jit
def item_end(arguments: int, work: int, num_kv_heads: int) -> int:
    """One more than the position of a work item's last row."""
    item = item_address(arguments, work, num_kv_heads)
    first_position: int = read_i32(read_i64(arguments, 7), read_i32(item, 1))
    return first_position + read_i32(item, 2)


@jit
def item_table(arguments: int, work: int, num_kv_heads: int) -> int:
    """Address of the block table of a work item's sequence."""
    sequence: int = read_i32(item_address(arguments, work, num_kv_heads), 0)
    tables: int = read_i64(arguments, 5)
    return tables + sequence * read_i64(arguments, 6) * 4


def make_locate_tile(
    shape: AttentionShape, key_factor: float, value_factor: float, *, invert: bool = False
) -> Callable[[int, int, int, int, int, int], None]:
    """Make ``locate_tile(arguments, located, work, following, start, end)``.

    It writes the addresses of the tile's units and its scales, as fp32 and times a factor. Also the addresses of keys
    and values to prefetch: of the next tile or, where the context is short or ends, of the ``following`` work item, the
    same tile of a short one: contexts of a batch are often alike, and a tile fetches as many units as it has.
    ``invert`` asks for the reciprocals of value scales, 0 for that of 0.
    """
    num_kv_heads, head_dim, block_size = shape.num_kv_heads, shape.head_dim, shape.block_size
    element_bytes, quantized = shape.element_bytes, shape.is_quantized
    key_scale, value_scale = np.float32(key_factor), np.float32(value_factor)

    @jit_for(shape.owner)
    def key_address(pools: int, table: int, head: int, token: int) -> int:
        page: int = read_i32(table, token // block_size) * num_kv_heads + head
        keys: int = read_i64(pools, 0)
        return keys + (page * head_dim * block_size + token % block_size) * element_bytes

    @jit_for(shape.owner)
    def value_address(pools: int, table: int, head: int, token: int) -> int:
        page: int = read_i32(table, token // block_size) * num_kv_heads + head
        values: int = read_i64(pools, 1)
        return values + (page * block_size + token % block_size) * head_dim * element_bytes

    @jit_for(shape.owner)
    def locate_tile(arguments: int, located: int, work: int, following: int, start: int, end: int) -> None:
        pools, table, head = arguments + 8, item_table(arguments, work, num_kv_heads), work % num_kv_heads
        next_table, next_head, next_start, next_end = table, head, start + TILE, end
        is_short = end <= SHORT
        if (is_short or next_start >= end) and following < read_i64(arguments, 9) * num_kv_heads:
            next_table, next_head = item_table(arguments, following, num_kv_heads), following % num_kv_heads
            next_start, next_end = start if is_short else 0, item_end(arguments, following, num_kv_heads)
        for unit in range((min(TILE, end - start) + UNIT - 1) // UNIT):
            token = start + unit * UNIT
            keys = key_address(pools, table, head, token)
            slot = (read_i32(table, token // block_size) * num_kv_heads + head) * block_size + token % block_size
            write_i64(located + TILE_KEY_UNITS, unit, keys)
            write_i64(located + TILE_VALUE_UNITS, unit, read_i64(pools, 1) + slot * head_dim * element_bytes)
            values = value_address(pools, table, head, token)
            if next_start + unit * UNIT < next_end:
                keys = key_address(pools, next_table, next_head, next_start + unit * UNIT)
                values = value_address(pools, next_table, next_head, next_start + unit * UNIT)
            write_i64(located + TILE_NEXT_KEY_UNITS, unit, keys)
            write_i64(located + TILE_NEXT_VALUE_UNITS, unit, values)
            if quantized:
                for i in range(UNIT_VECTORS):
                    lane = unit * UNIT + i * LANES
                    key_scales = mul(load_f16(read_i64(pools, 2), slot + i * LANES), splat(key_scale))
                    value_scales = mul(load_f16(read_i64(pools, 3), slot + i * LANES), splat(value_scale))
                    store_f32(located + TILE_KEY_SCALES, lane, key_scales)
                    store_f32(located + TILE_VALUE_SCALES, lane, value_scales)
                    if invert:
                        store_f32(located + TILE_INVERSE_SCALES, lane, reciprocal(value_scales))

    return locate_tile  # type: ignore[no-any-return, unused-ignore]


def make_begin_rows(
    shape: AttentionShape, store_query: Callable[[int, int, Vector], None]
) -> Callable[[int, int, int, int], None]:
    """Make ``begin_rows(arguments, work, queries, state)``: a work item's queries, and running sums of nothing."""
    num_heads, num_kv_heads, group, head_dim = shape.num_heads, shape.num_kv_heads, shape.group, shape.head_dim
    rows = RowState(shape)
    maximum_at, total_at = rows.maximum, rows.total

    @jit_for(shape.owner)
    def begin_rows(arguments: int, work: int, queries: int, state: int) -> None:
        item, head = item_address(arguments, work, num_kv_heads), work % num_kv_heads
        first, num_tokens = read_i32(item, 1), read_i32(item, 2)
        for r in range(num_tokens * group):
            source = ((first + r // group) * num_heads + head * group + r % group) * head_dim
            for i in range(0, head_dim, LANES):
                store_query(queries, r * head_dim + i, load_f32(read_i64(arguments, 0), source + i))
                store_f32(state, r * head_dim + i, splat(ZERO))
            write_f32(state + maximum_at, r, NO_SCORE)
            write_f32(state + total_at, r, ZERO)

    return begin_rows  # type: ignore[no-any-return, unused-ignore]


def make_end_rows(shape: AttentionShape, activation: str) -> Callable[[int, int, int], None]:
    """Make ``end_rows(arguments, work, state)``, which writes a work item's normalised context."""
    num_heads, num_kv_heads, group, head_dim = shape.num_heads, shape.num_kv_heads, shape.group, shape.head_dim
    total_at = RowState(shape).total
    store_activation = {"fp32": store_f32, "bf16": store_bf16}[activation]

    @jit_for(shape.owner)
    def end_rows(arguments: int, work: int, state: int) -> None:
        item, head = item_address(arguments, work, num_kv_heads), work % num_kv_heads
        first, num_tokens = read_i32(item, 1), read_i32(item, 2)
        for r in range(num_tokens * group):
            target = ((first + r // group) * num_heads + head * group + r % group) * head_dim
            total = splat(read_f32(state + total_at, r))
            for i in range(0, head_dim, LANES):
                store_activation(read_i64(arguments, 10), target + i, div(load_f32(state, r * head_dim + i), total))

    return end_rows  # type: ignore[no-any-return, unused-ignore]


def make_softmax_row(
    shape: AttentionShape,
    *,
    exponential: Callable[[Vector], Vector] = exp_weight,
    round_weight: Callable[[Vector], Vector] | None = None,
    store_weight: Callable[[int, int, Vector], None] = store_f32,
) -> Callable[[int, int, int, int, int, int, int], None]:
    """Make ``softmax_row(located, state, row, scores, weights, valid, units)``.

    It turns a row's scores of one tile into probabilities times value scales and updates the running state. Scores
    are changed; ``weights`` may be the same memory if they are stored as fp32. The first ``valid`` tokens count.

    What ``round_weight`` changes is counted in the sum of probabilities, too: then they still weigh values by numbers
    that add up to one.
    """
    quantized, row_vectors = shape.is_quantized, shape.head_dim // LANES
    rows = RowState(shape)
    maximum_at, total_at = rows.maximum, rows.total
    rounded = round_weight is not None
    round_to = round_weight or exponential

    @jit_for(shape.owner)
    def softmax_row(located: int, state: int, row: int, scores: int, weights: int, valid: int, units: int) -> None:
        if valid <= 0:
            for i in range(units * UNIT_VECTORS):
                store_weight(weights, i * LANES, splat(ZERO))
            return
        peak = splat(NO_SCORE)
        for i in range(units * UNIT_VECTORS):
            score = load_f32(scores, i * LANES)
            if quantized:
                score = mul(score, load_f32(located + TILE_KEY_SCALES, i * LANES))
            if valid < (i + 1) * LANES:
                score = first_lanes(score, valid - i * LANES, NO_SCORE)
            store_f32(scores, i * LANES, score)
            peak = maximum(score, peak)
        old = read_f32(state + maximum_at, row)
        new = max(old, max_lanes(peak))
        shift = splat(new)
        total = splat(ZERO)
        for i in range(units * UNIT_VECTORS):
            weight = exponential(sub(load_f32(scores, i * LANES), shift))
            if rounded and not quantized:
                weight = round_to(weight)
            total = add(total, weight)
            if quantized:
                weight = mul(weight, load_f32(located + TILE_VALUE_SCALES, i * LANES))
                if rounded:
                    lost = sub(round_to(weight), weight)
                    total = fma(lost, load_f32(located + TILE_INVERSE_SCALES, i * LANES), total)
            store_weight(weights, i * LANES, weight)
        running = read_f32(state + total_at, row)
        if new > old:
            decay = exponential(splat(old - new))
            running = running * max_lanes(decay)
            write_f32(state + maximum_at, row, new)
            for i in range(row * row_vectors, (row + 1) * row_vectors):
                store_f32(state, i * LANES, mul(load_f32(state, i * LANES), decay))
        write_f32(state + total_at, row, running + sum_lanes(total))

    return softmax_row  # type: ignore[no-any-return, unused-ignore]
