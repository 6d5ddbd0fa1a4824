"""Products of bf16 rows with bf16 weights on the matrix unit.

Panels have two tiles of columns and pairs along the depth: ``[depth / 2, columns, 2]``. Sums are what the unit gives,
the same for a row alone as among others.

Rows are taken in blocks of 16. The last block ends with the last row, so it overlaps the one before: rows in both are
computed twice, with the same result.
"""

from collections.abc import Callable
from itertools import product

from trtcb.plugins.cpu import matrix_unit
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
    emit_number,
    emit_panel_chunk,
    rows_in_cache,
)
from trtcb.plugins.cpu.simd import jit_for, read_f32, stack, write_f32
from trtcb.plugins.cpu.vector_ir import Builder, Loop, Value, define_outlined, emit_prefetch

Multiply = Callable[[int, int, int, int, int, int], None]


def define_bf16_product(owner: str, depth: int, width: int) -> Multiply:
    """Make ``multiply(x, panels, out, num_rows, first, end)`` for jitted code: columns of some panels, of all rows.

    ``depth`` is a multiple of 32; for ``owner`` see ``simd.jit_for``.
    """
    row_bytes, panel_bytes, num_whole = 2 * depth, 2 * depth * PANEL, width // PANEL
    block = rows_in_cache(row_bytes)
    first_rows, more_rows, edge_rows = (
        _define_rows(owner, depth, stride, fetch=fetch)
        for stride, fetch in ((width, True), (width, False), (PANEL, False))
    )
    edge_columns = stack(2 * ROWS * PANEL * 4)

    @jit_for(owner)
    def last_panel(x: int, panel: int, out: int, row: int, num_rows: int) -> None:
        columns = edge_columns()
        top, bottom = max(0, min(row, num_rows - ROWS)), max(0, min(row + ROWS, num_rows - ROWS))
        edge_rows(x, panel, columns - top * PANEL * 4, columns + (ROWS - bottom) * PANEL * 4, row, num_rows)
        for part in range(2 if row + ROWS < num_rows else 1):
            for r in range(min(ROWS, num_rows)):
                for column in range(width - num_whole * PANEL):
                    value = read_f32(columns, (part * ROWS + r) * PANEL + column)
                    write_f32(out, ((bottom if part else top) + r) * width + num_whole * PANEL + column, value)

    @jit_for(owner)
    def multiply(x: int, panels: int, out: int, num_rows: int, first: int, end: int) -> None:
        saved = matrix_unit.saved_configuration()
        matrix_unit.enter(saved, min(num_rows, ROWS))
        for start in range(0, num_rows, block):
            for index in range(first, end):
                panel, columns = panels + index * panel_bytes, out + index * PANEL * 4
                for row in range(start, min(start + block, num_rows), 2 * ROWS):
                    if index >= num_whole:
                        last_panel(x, panel, out, row, num_rows)
                    elif row == start:
                        first_rows(x, panel, columns, columns, row, num_rows)
                    else:
                        more_rows(x, panel, columns, columns, row, num_rows)
        matrix_unit.leave(saved)

    return multiply  # type: ignore[no-any-return, unused-ignore]


def _define_rows(
    owner: str, depth: int, c_stride: int, *, fetch: bool
) -> Callable[[int, int, int, int, int, int], None]:
    """Make ``rows(x, panel, c_top, c_bottom, row, num_rows)``: a panel's columns of up to 32 rows, from ``row`` on.

    The first block of 16 has its results behind ``c_top``, the second, if there are so many, behind ``c_bottom``: each
    at the place of its rows, ``c_stride`` elements apart.
    """
    one, both = (_define_tile(depth, c_stride, num_blocks, fetch=fetch) for num_blocks in (1, 2))
    row_bytes = 2 * depth

    @jit_for(owner)
    def rows(x: int, panel: int, c_top: int, c_bottom: int, row: int, num_rows: int) -> None:
        top, bottom = max(0, min(row, num_rows - ROWS)), max(0, min(row + ROWS, num_rows - ROWS))
        a_top, a_bottom, ahead = x + top * row_bytes, x + bottom * row_bytes, panel + AHEAD
        c_top, c_bottom = c_top + top * c_stride * 4, c_bottom + bottom * c_stride * 4
        if row + ROWS < num_rows:
            both(a_top, a_bottom, panel, c_top, c_bottom, ahead)
        else:
            one(a_top, a_bottom, panel, c_top, c_bottom, ahead)

    return rows  # type: ignore[no-any-return, unused-ignore]


def _define_tile(
    depth: int, c_stride: int, num_blocks: int, *, fetch: bool
) -> Callable[[int, int, int, int, int, int], None]:
    """Make ``tile(a_top, a_bottom, panel, c_top, c_bottom, prefetch)`` of one block of rows or two."""
    cells = list(product(range(num_blocks), range(2)))

    def emit(builder: Builder, *values: Value) -> None:
        blocks, panel, outs, prefetch = values[:2], values[2], values[3:5], values[5]
        for block, column in cells:
            matrix_unit.emit_zero(builder, C_TILES[2 * block + column])
        with Loop(builder, 2 * depth // ROW_BYTES) as step:
            emit_panel_chunk(builder, panel, step)
            for block in range(num_blocks):
                chunk = builder.add(blocks[block], builder.mul(step, emit_number(ROW_BYTES)))
                matrix_unit.emit_load(builder, A_TILES[block], chunk, emit_number(2 * depth))
            for block, column in cells:
                matrix_unit.emit_bf16_product(builder, C_TILES[2 * block + column], A_TILES[block], B_TILES[column])
            if fetch:
                emit_prefetch(builder, prefetch, step, CHUNK_BYTES)
        for block, column in cells:
            place = builder.add(outs[block], emit_number(column * COLUMNS * 4))
            matrix_unit.emit_store(builder, C_TILES[2 * block + column], place, emit_number(c_stride * 4))
        builder.ret_void()

    return define_outlined(f"bf16_{num_blocks}_{depth}_{c_stride}_{int(fetch)}", 6, emit)
