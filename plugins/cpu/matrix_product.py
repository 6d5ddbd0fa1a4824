"""Products of rows with packed weights on the matrix unit.

Rows are bf16, or planes of bytes with their scale. Panels have two tiles of columns and, of bf16, pairs along the depth
(``[depth / 2, columns, 2]``), of int8 fours (``quantized.py``). Sums of bytes are exact, as in ``dot_tile.py``; those
of bf16 are what the unit gives, the same for a row alone as among others.

Rows are taken in blocks of 16. The last block ends with the last row, so it overlaps the one before: rows in both are
computed twice, with the same result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import llvmlite.ir as ir

from trtcb.plugins.cpu import matrix_unit, quantized
from trtcb.plugins.cpu.matrix_unit import A_TILES, B_TILES, C_TILES, COLUMNS, ROW_BYTES, ROWS, emit_number
from trtcb.plugins.cpu.simd import jit, read_f32, stack, write_f32
from trtcb.plugins.cpu.vector_ir import (
    F32,
    I32,
    I64,
    INTEGERS,
    LANES,
    VECTOR,
    Builder,
    Value,
    constant,
    define_outlined,
    emit_pointer,
    emit_prefetch,
    emit_splat,
)

PANEL = 2 * COLUMNS
CHUNK_BYTES = ROWS * 4 * PANEL  # of a panel, for one tile of A
AHEAD = 4096  # bytes between what is multiplied and what is fetched
BLOCK_BYTES = 512 << 10  # of rows that stay in a core's cache while panels pass


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """A product's shape and weights: ``bf16``, whose depth is a multiple of 32, or ``int8``."""

    weights: str
    depth: int
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of A."""
        return quantized.row_bytes(self.depth) if self.weights == "int8" else 2 * self.depth

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel."""
        return quantized.panel_bytes(self.depth, PANEL) if self.weights == "int8" else 2 * self.depth * PANEL

    @property
    def num_chunks(self) -> int:
        """Tiles along the depth."""
        return -(-self.depth * (1 if self.weights == "int8" else 2) // ROW_BYTES)


def define_matrix_product(spec: MatrixSpec) -> Callable[[int, int, int, int, int, int], None]:
    """Make ``multiply(x, panels, out, num_rows, first, end)`` for jitted code: columns of some panels, of all rows."""
    row_bytes, panel_bytes, width, whole = spec.row_bytes, spec.panel_bytes, spec.width, spec.width // PANEL
    block = max(1, BLOCK_BYTES // row_bytes // (2 * ROWS)) * 2 * ROWS
    first_rows, more_rows, edge_rows = (
        _define_rows(spec, stride, fetch=fetch) for stride, fetch in ((width, True), (width, False), (PANEL, False))
    )
    edge_columns = stack(2 * ROWS * PANEL * 4)

    @jit
    def last_panel(x: int, panel: int, out: int, row: int, num_rows: int) -> None:
        columns = edge_columns()
        edge_rows(x, panel, columns, row, num_rows, 1)
        for part in range(2 if row + ROWS < num_rows else 1):
            top = max(0, min(row + part * ROWS, num_rows - ROWS))
            for r in range(min(ROWS, num_rows)):
                for column in range(width - whole * PANEL):
                    value = read_f32(columns, (part * ROWS + r) * PANEL + column)
                    write_f32(out, (top + r) * width + whole * PANEL + column, value)

    @jit
    def multiply(x: int, panels: int, out: int, num_rows: int, first: int, end: int) -> None:
        saved = matrix_unit.saved_configuration()
        matrix_unit.enter(saved, min(num_rows, ROWS))
        for start in range(0, num_rows, block):
            for index in range(first, end):
                panel = panels + index * panel_bytes
                for row in range(start, min(start + block, num_rows), 2 * ROWS):
                    if index >= whole:
                        last_panel(x, panel, out, row, num_rows)
                    elif row == start:
                        first_rows(x, panel, out + index * PANEL * 4, row, num_rows, 0)
                    else:
                        more_rows(x, panel, out + index * PANEL * 4, row, num_rows, 0)
        matrix_unit.leave(saved)

    return multiply


def _define_rows(spec: MatrixSpec, c_stride: int, *, fetch: bool) -> Callable[[int, int, int, int, int, int], None]:
    """Make ``rows(x, panel, out, row, num_rows, is_apart)``: up to 32 rows' columns of a panel.

    With ``is_apart`` the two blocks of 16 rows get places of their own behind ``out``, else those of their rows.
    """
    row_bytes = spec.row_bytes
    multiply = (_define_byte_blocks if spec.weights == "int8" else _define_bf16_blocks)(spec, c_stride, fetch=fetch)

    @jit
    def rows(x: int, panel: int, out: int, row: int, num_rows: int, is_apart: int) -> None:
        top = max(0, min(row, num_rows - ROWS))
        bottom = max(0, min(row + ROWS, num_rows - ROWS))
        c_top = out if is_apart else out + top * c_stride * 4
        c_bottom = out + (ROWS if is_apart else bottom) * c_stride * 4
        height, has_more = min(num_rows, ROWS), num_rows - row > ROWS
        multiply(x + top * row_bytes, x + bottom * row_bytes, panel, c_top, c_bottom, height, has_more)

    return rows


def _define_bf16_blocks(
    spec: MatrixSpec, c_stride: int, *, fetch: bool
) -> Callable[[int, int, int, int, int, int, int], None]:
    """Make ``blocks(a_top, a_bottom, panel, c_top, c_bottom, height, has_more)``: one block of rows, or two."""
    one, both = (_define_bf16_tile(spec, c_stride, num_blocks, fetch=fetch) for num_blocks in (1, 2))

    @jit
    def blocks(a_top: int, a_bottom: int, panel: int, c_top: int, c_bottom: int, height: int, has_more: int) -> None:
        if has_more:
            both(a_top, a_bottom, panel, c_top, c_bottom, panel + AHEAD)
        else:
            one(a_top, a_bottom, panel, c_top, c_bottom, panel + AHEAD)

    return blocks


def _define_byte_blocks(
    spec: MatrixSpec, c_stride: int, *, fetch: bool
) -> Callable[[int, int, int, int, int, int, int], None]:
    """The same of bytes, one after the other: their planes take all tiles."""
    top, bottom = (_define_byte_tile(spec, c_stride, fetch=fetches) for fetches in (fetch, False))

    @jit
    def blocks(a_top: int, a_bottom: int, panel: int, c_top: int, c_bottom: int, height: int, has_more: int) -> None:
        top(a_top, panel, c_top, height, panel + AHEAD)
        if has_more:
            bottom(a_bottom, panel, c_bottom, ROWS, panel)

    return blocks


def _define_bf16_tile(
    spec: MatrixSpec, c_stride: int, num_blocks: int, *, fetch: bool
) -> Callable[[int, int, int, int, int, int], None]:
    """Make ``tile(a_top, a_bottom, panel, c_top, c_bottom, prefetch)`` of one block of rows or two."""

    def emit(builder: Builder, *values: Value) -> None:
        (*blocks, panel), outs, prefetch = values[:3], values[3:5], values[5]
        cells = list(product(range(num_blocks), range(2)))
        for block, column in cells:
            matrix_unit.emit_zero(builder, C_TILES[2 * block + column])
        loop = _Loop(builder, spec.num_chunks)
        _emit_columns(builder, panel, loop.step)
        for block in range(num_blocks):
            chunk = builder.add(blocks[block], builder.mul(loop.step, emit_number(ROW_BYTES)))
            matrix_unit.emit_load(builder, A_TILES[block], chunk, emit_number(spec.row_bytes))
        for block, column in cells:
            matrix_unit.emit_bf16_product(builder, C_TILES[2 * block + column], A_TILES[block], B_TILES[column])
        if fetch:
            emit_prefetch(builder, prefetch, loop.step, CHUNK_BYTES)
        loop.close()
        for block, column in cells:
            place = builder.add(outs[block], emit_number(column * COLUMNS * 4))
            matrix_unit.emit_store(builder, C_TILES[2 * block + column], place, emit_number(c_stride * 4))
        builder.ret_void()

    return define_outlined(f"matrix_bf16_{num_blocks}_{spec.depth}_{c_stride}_{int(fetch)}", 6, emit)


def _define_byte_tile(spec: MatrixSpec, c_stride: int, *, fetch: bool) -> Callable[[int, int, int, int, int], None]:
    """Make ``tile(a, panel, c, rows, prefetch)`` of one block of rows."""
    return define_outlined(
        f"matrix_int8_{spec.depth}_{c_stride}_{int(fetch)}", 5, partial(_emit_byte_tile, spec, c_stride, fetch)
    )


def _emit_byte_tile(
    spec: MatrixSpec,
    c_stride: int,
    fetch: bool,
    builder: Builder,
    a: Value,
    panel: Value,
    c: Value,
    rows: Value,
    prefetch: Value,
) -> None:
    cells = list(product(range(2), range(2)))  # planes x columns
    room = builder.alloca(ir.ArrayType(I32, len(cells) * ROWS * COLUMNS))
    room.align = 64
    sums = builder.ptrtoint(room, I64)
    for plane, column in cells:
        matrix_unit.emit_zero(builder, C_TILES[2 * plane + column])
    chunks = _Loop(builder, spec.num_chunks)
    _emit_columns(builder, panel, chunks.step)
    place = builder.add(a, builder.mul(chunks.step, emit_number(ROW_BYTES)))
    for plane in range(2):
        codes = builder.add(place, emit_number(plane * spec.depth))
        matrix_unit.emit_load(builder, A_TILES[plane], codes, emit_number(spec.row_bytes))
    for plane, column in cells:
        matrix_unit.emit_byte_product(builder, C_TILES[2 * plane + column], A_TILES[plane], B_TILES[column])
    if fetch:
        emit_prefetch(builder, prefetch, chunks.step, CHUNK_BYTES)
    chunks.close()
    for number, (plane, column) in enumerate(cells):
        at = builder.add(sums, emit_number(number * ROWS * COLUMNS * 4))
        matrix_unit.emit_store(builder, C_TILES[2 * plane + column], at, emit_number(COLUMNS * 4))
    scales = builder.add(panel, emit_number(quantized.panel_weights(spec.depth, PANEL)))
    column_scales = [_emit_load(builder, scales, column * LANES, VECTOR, F32) for column in range(2)]
    corrections = [_emit_load(builder, scales, (2 + column) * LANES, INTEGERS, I32) for column in range(2)]

    each = _Loop(builder, rows)
    scale_at = builder.add(builder.mul(each.step, emit_number(spec.row_bytes)), emit_number(2 * spec.depth))
    pointer = emit_pointer(builder, builder.add(a, scale_at), emit_number(0), F32)
    row_scale = emit_splat(builder, builder.load(pointer, align=4))
    row_sums = builder.add(sums, builder.mul(each.step, emit_number(COLUMNS * 4)))
    out = builder.add(c, builder.mul(each.step, emit_number(c_stride * 4)))
    for column in range(2):
        high, low = (
            _emit_load(builder, row_sums, (2 * plane + column) * ROWS * COLUMNS, INTEGERS, I32) for plane in range(2)
        )
        total = builder.sub(builder.add(builder.shl(high, constant(I32, 8)), low), corrections[column])
        result = builder.fmul(builder.fmul(builder.sitofp(total, VECTOR), column_scales[column]), row_scale)
        builder.store(result, emit_pointer(builder, out, emit_number(column * LANES), F32, VECTOR), align=4)
    each.close()
    builder.ret_void()


class _Loop:
    """A loop that runs at least once: what is emitted before :meth:`close` is its body, ``step`` counts from 0."""

    def __init__(self, builder: Builder, count: int | Value) -> None:
        self._builder = builder
        self._count = emit_number(count) if isinstance(count, int) else count
        before, self._body = builder.block, builder.function.append_basic_block("loop")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.step = builder.phi(I64)
        self.step.add_incoming(emit_number(0), before)

    def close(self) -> None:
        """End the body; what follows comes after the loop."""
        builder = self._builder
        after = builder.function.append_basic_block("done")
        following = builder.add(self.step, emit_number(1))
        self.step.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, self._count), self._body, after)
        builder.position_at_end(after)


def _emit_columns(builder: Builder, panel: Value, step: Value) -> None:
    """Load the two tiles of a panel's chunk."""
    chunk = builder.add(panel, builder.mul(step, emit_number(CHUNK_BYTES)))
    for column in range(2):
        place = builder.add(chunk, emit_number(column * COLUMNS * 4))
        matrix_unit.emit_load(builder, B_TILES[column], place, emit_number(PANEL * 4))


def _emit_load(builder: Builder, address: Value, index: int, kind: ir.Type, element: ir.Type) -> Value:
    return builder.load(emit_pointer(builder, address, emit_number(index), element, kind), align=4)
