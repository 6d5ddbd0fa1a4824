"""Products of int8 weights with rows of planes on the matrix unit; ``quantized.py`` describes rows and panels.

Sums are exact and are scaled as in ``dot_tile.py``, so the bits are the same. Two planes of 16 rows and two tiles of
columns take all registers. Their sums go through memory to be put together and scaled, which is done for one tile while
the unit multiplies the next: what was just stored could not be read without waiting.

Rows are taken in blocks of 16. The last block ends with the last row, so it overlaps the one before: rows in both are
computed twice, with the same result.
"""

from collections.abc import Callable
from itertools import product

from trtcb.plugins.cpu import matrix_unit, quantized
from trtcb.plugins.cpu.matrix_product import Multiply
from trtcb.plugins.cpu.matrix_unit import (
    A_TILES,
    AHEAD,
    B_TILES,
    C_TILES,
    CHUNK_BYTES,
    COLUMNS,
    PANEL,
    ROW_BYTES,
    ROWS,
    TILE_BYTES,
    emit_number,
    emit_panel_chunk,
    rows_in_cache,
)
from trtcb.plugins.cpu.simd import jit_for, read_f32, stack, write_f32
from trtcb.plugins.cpu.vector_ir import (
    F32,
    I32,
    INTEGERS,
    LANES,
    VECTOR,
    Builder,
    Loop,
    Value,
    constant,
    define_outlined,
    emit_pointer,
    emit_prefetch,
    emit_splat,
)

_CELLS = tuple(product(range(2), range(2)))  # planes x tiles of columns
_SUMS_BYTES = len(_CELLS) * TILE_BYTES


def define_byte_product(owner: str, depth: int, width: int) -> Multiply:
    """Make ``multiply(x, panels, out, num_rows, first, end)`` for jitted code: columns of some panels, of all rows.

    For ``owner`` see ``simd.jit_for``.
    """
    row_bytes, panel_bytes = quantized.row_bytes(depth), quantized.panel_bytes(depth, PANEL)
    num_whole, block = width // PANEL, rows_in_cache(row_bytes)
    first_tile, more_tile = (_define_tile(depth, width, fetch=fetch) for fetch in (True, False))
    finish, finish_edge = (_define_finish(depth, stride) for stride in (width, PANEL))
    two_sums, nowhere = stack(2 * _SUMS_BYTES), stack(ROWS * PANEL * 4)

    @jit_for(owner)
    def last_panel(x: int, panel: int, out: int, num_rows: int, sums: int, columns: int) -> None:
        height = min(num_rows, ROWS)
        for row in range(0, num_rows, ROWS):
            top = max(0, min(row, num_rows - ROWS))
            rows = x + top * row_bytes
            more_tile(rows, panel, sums, rows, panel, sums, sums, 0, panel)
            finish_edge(rows, panel, columns, sums, height)
            for r in range(height):
                for column in range(width - num_whole * PANEL):
                    value = read_f32(columns, r * PANEL + column)
                    write_f32(out, (top + r) * width + num_whole * PANEL + column, value)

    @jit_for(owner)
    def multiply(x: int, panels: int, out: int, num_rows: int, first: int, end: int) -> None:
        saved = matrix_unit.saved_configuration()
        height = min(num_rows, ROWS)
        matrix_unit.enter(saved, height)
        sums, finished = two_sums(), two_sums() + _SUMS_BYTES
        a, panel, c, count = x, panels + first * panel_bytes, 0, 0  # of the tile before: none
        for start in range(0, num_rows, block):
            for index in range(first, min(end, num_whole)):
                for row in range(start, min(start + block, num_rows), ROWS):
                    top = max(0, min(row, num_rows - ROWS))
                    next_a, next_panel = x + top * row_bytes, panels + index * panel_bytes
                    if row == start:
                        first_tile(next_a, next_panel, sums, a, panel, c, finished, count, next_panel + AHEAD)
                    else:
                        more_tile(next_a, next_panel, sums, a, panel, c, finished, count, next_panel)
                    a, panel, c, count = next_a, next_panel, out + (top * width + index * PANEL) * 4, height
                    sums, finished = finished, sums
        if count:
            finish(a, panel, c, finished, height)
        if end > num_whole:
            last_panel(x, panels + num_whole * panel_bytes, out, num_rows, sums, nowhere())
        matrix_unit.leave(saved)

    return multiply  # type: ignore[no-any-return, unused-ignore]


def _define_tile(depth: int, c_stride: int, *, fetch: bool) -> Callable[..., None]:
    """Make ``tile(a, panel, sums, done_a, done_panel, done_c, done_sums, done_rows, prefetch)``.

    Sums of a block of rows, plane by plane, and the results of another one, which was multiplied before.
    """
    num_chunks = -(-depth // ROW_BYTES)
    rows_per_chunk = -(-ROWS // num_chunks)

    def emit(builder: Builder, *values: Value) -> None:
        a, panel, sums, done_a, done_panel, done_c, done_sums, done_rows, prefetch = values
        for plane, column in _CELLS:
            matrix_unit.emit_zero(builder, C_TILES[2 * plane + column])
        scaling = _Scaling(builder, depth, done_panel)
        with Loop(builder, num_chunks) as step:
            emit_panel_chunk(builder, panel, step)
            place = builder.add(a, builder.mul(step, emit_number(ROW_BYTES)))
            for plane in range(2):
                codes = builder.add(place, emit_number(plane * depth))
                matrix_unit.emit_load(builder, A_TILES[plane], codes, emit_number(quantized.row_bytes(depth)))
            for plane, column in _CELLS:
                matrix_unit.emit_byte_product(builder, C_TILES[2 * plane + column], A_TILES[plane], B_TILES[column])
            if fetch:
                emit_prefetch(builder, prefetch, step, CHUNK_BYTES)
            first = builder.mul(step, emit_number(rows_per_chunk))
            for number in range(rows_per_chunk):
                row = builder.add(first, emit_number(number))
                with builder.if_then(builder.icmp_signed("<", row, done_rows)):
                    scaling.emit_row(builder, done_a, done_c, c_stride, done_sums, row)
        for number, (plane, column) in enumerate(_CELLS):
            at = builder.add(sums, emit_number(number * TILE_BYTES))
            matrix_unit.emit_store(builder, C_TILES[2 * plane + column], at, emit_number(COLUMNS * 4))
        builder.ret_void()

    return define_outlined(f"bytes_{depth}_{c_stride}_{int(fetch)}", 9, emit)


def _define_finish(depth: int, c_stride: int) -> Callable[[int, int, int, int, int], None]:
    """Make ``finish(a, panel, c, sums, rows)``: the results of a block of at least one row."""

    def emit(builder: Builder, a: Value, panel: Value, c: Value, sums: Value, rows: Value) -> None:
        scaling = _Scaling(builder, depth, panel)
        with Loop(builder, rows) as row:
            scaling.emit_row(builder, a, c, c_stride, sums, row)
        builder.ret_void()

    return define_outlined(f"finish_bytes_{depth}_{c_stride}", 5, emit)


class _Scaling:
    """From sums to results, with a panel's scales and corrections in registers."""

    def __init__(self, builder: Builder, depth: int, panel: Value) -> None:
        self._depth = depth
        behind = builder.add(panel, emit_number(quantized.panel_weights(depth, PANEL)))
        self._scales = [_load(builder, behind, emit_number(column * LANES), F32) for column in range(2)]
        self._corrections = [_load(builder, behind, emit_number((2 + column) * LANES), I32) for column in range(2)]

    def emit_row(self, builder: Builder, a: Value, c: Value, c_stride: int, sums: Value, row: Value) -> None:
        """Results of one row of a block."""
        at = builder.add(builder.mul(row, emit_number(quantized.row_bytes(self._depth))), emit_number(2 * self._depth))
        pointer = emit_pointer(builder, builder.add(a, at), emit_number(0), F32)
        row_scale = emit_splat(builder, builder.load(pointer, align=4))
        row_sums = builder.add(sums, builder.mul(row, emit_number(COLUMNS * 4)))
        out = builder.add(c, builder.mul(row, emit_number(c_stride * 4)))
        for column, (scale, correction) in enumerate(zip(self._scales, self._corrections, strict=True)):
            high, low = (
                _load(builder, row_sums, emit_number((2 * plane + column) * ROWS * COLUMNS), I32) for plane in range(2)
            )
            total = builder.sub(builder.add(builder.shl(high, constant(I32, 8)), low), correction)
            result = builder.fmul(builder.fmul(builder.sitofp(total, VECTOR), scale), row_scale)
            builder.store(result, emit_pointer(builder, out, emit_number(column * LANES), F32, VECTOR), align=4)


def _load(builder: Builder, address: Value, index: Value, element: Value) -> Value:
    kind = VECTOR if element == F32 else INTEGERS
    return builder.load(emit_pointer(builder, address, index, element, kind), align=4)
