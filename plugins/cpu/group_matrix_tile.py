"""Int4 products of 8 or 16 rows by the matrix unit: sums of a group at once, then scaled and added up in vectors.

The bits are those of ``group_tile.py``. Codes of a panel of 16 columns are first spread out to a byte each, once for
all rows: ``[depth / 32, 8, 16, 4]``, tiles of the unit. Sums leave the unit through memory, which takes time, so it is
some groups ahead of the vectors.
"""

from collections.abc import Callable
from functools import partial

import llvmlite.ir as ir

from trtcb.plugins.cpu.group_spec import GroupSpec
from trtcb.plugins.cpu.group_wide_tile import emit_halves, emit_link, emit_row_factors, emit_scales
from trtcb.plugins.cpu.grouped import CODE_BYTES, GROUP, WEIGHT_BYTES
from trtcb.plugins.cpu.matrix_unit import (
    A_TILES,
    B_TILES,
    C_TILES,
    COLUMNS,
    ROW_BYTES,
    TILE_BYTES,
    emit_load,
    emit_mixed_product,
    emit_number,
    emit_store,
    emit_zero,
)
from trtcb.plugins.cpu.vector_ir import (
    F32,
    I8,
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
)

SPREAD_BYTES = GROUP * COLUMNS  # of a group of a panel
_AHEAD = 2
_RING = 4  # places for sums: more than are ahead, a power of two


def define_spread(depth: int) -> Callable[[int, int], None]:
    """Make ``spread(panel, codes)``: a panel's codes as bytes at ``codes``, ``16 * depth`` of them."""
    return define_outlined(f"spread_{depth}", 2, partial(_emit_spread, depth))


def define_matrix_tile(spec: GroupSpec) -> Callable[[int, int, int, int, int], None]:
    """Make ``tile(a, codes, panel, c, prefetch)``, for 16 columns: ``codes`` are those of the panel, spread out.

    To be called between :func:`~trtcb.plugins.cpu.matrix_unit.enter_depth`, with the tile's rows and the bytes of a
    group, and ``leave``. With ``fetch``, as much as the panel is fetched from ``prefetch`` on.
    """
    return define_outlined(f"matrix_{spec.symbol}", 5, partial(_emit_tile, spec))


def _emit_spread(depth: int, builder: Builder, panel: Value, codes: Value) -> None:
    loop, done = (builder.function.append_basic_block(name) for name in ("loop", "done"))
    entry = builder.block
    builder.branch(loop)
    builder.position_at_end(loop)
    group = builder.phi(I64)
    source = builder.add(panel, builder.mul(group, ir.Constant(I64, WEIGHT_BYTES * COLUMNS)))
    target = builder.add(codes, builder.mul(group, ir.Constant(I64, SPREAD_BYTES)))
    chunks = CODE_BYTES // 4
    for chunk in range(chunks):
        for half, vector in enumerate(emit_halves(builder, source, chunk * COLUMNS)):
            place = ir.Constant(I64, (half * chunks + chunk) * LANES)
            builder.store(vector, emit_pointer(builder, target, place, I32, INTEGERS), align=64)
    following = builder.add(group, ir.Constant(I64, 1))
    group.add_incoming(ir.Constant(I64, 0), entry)
    group.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, ir.Constant(I64, depth // GROUP)), loop, done)
    builder.position_at_end(done)
    builder.ret_void()


def _emit_tile(spec: GroupSpec, builder: Builder, a: Value, codes: Value, panel: Value, c: Value, ahead: Value) -> None:
    ring = builder.alloca(ir.ArrayType(I8, _RING * TILE_BYTES))
    ring.align = ROW_BYTES
    sums = builder.ptrtoint(ring, I64)
    loop, done = (builder.function.append_basic_block(name) for name in ("loop", "done"))
    entry = builder.block
    for number in range(_AHEAD):
        _emit_sums(builder, spec, a, codes, sums, ir.Constant(I64, number))
    builder.branch(loop)

    builder.position_at_end(loop)
    group = builder.phi(I64)
    chains = [builder.phi(VECTOR) for _ in range(spec.rows)]
    _emit_sums(builder, spec, a, codes, sums, builder.add(group, ir.Constant(I64, _AHEAD)))
    column = emit_scales(builder, builder.add(panel, builder.mul(group, emit_number(_panel_bytes()))), COLUMNS, 0)
    totals = _emit_place(builder, sums, group)
    values = []
    for row in range(spec.rows):
        pointer = emit_pointer(builder, totals, ir.Constant(I64, row * COLUMNS), I32, INTEGERS)
        factors = emit_row_factors(builder, spec, a, row, group)
        values.append(emit_link(builder, chains[row], builder.load(pointer, align=ROW_BYTES), column, factors))
    if spec.fetch:
        emit_prefetch(builder, ahead, group, _panel_bytes())
    following = builder.add(group, ir.Constant(I64, 1))
    group.add_incoming(ir.Constant(I64, 0), entry)
    group.add_incoming(following, loop)
    for phi, value in zip(chains, values, strict=True):
        phi.add_incoming(constant(F32, 0.0), entry)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, ir.Constant(I64, spec.depth // GROUP)), loop, done)

    builder.position_at_end(done)
    for row, value in enumerate(values):
        builder.store(value, emit_pointer(builder, c, ir.Constant(I64, row * spec.c_stride), F32, VECTOR), align=4)
    builder.ret_void()


def _emit_sums(builder: Builder, spec: GroupSpec, a: Value, codes: Value, sums: Value, group: Value) -> None:
    """Have the unit write a group's sums to their place in the ring; behind the last group, the last one's again."""
    last = ir.Constant(I64, spec.depth // GROUP - 1)
    known = builder.select(builder.icmp_signed("<", group, last), group, last)
    emit_zero(builder, C_TILES[0])
    emit_load(builder, A_TILES[0], builder.add(a, builder.mul(known, emit_number(GROUP))), emit_number(spec.a_stride))
    weights = builder.add(codes, builder.mul(known, emit_number(SPREAD_BYTES)))
    emit_load(builder, B_TILES[0], weights, emit_number(ROW_BYTES))
    emit_mixed_product(builder, C_TILES[0], A_TILES[0], B_TILES[0])
    emit_store(builder, C_TILES[0], _emit_place(builder, sums, group), emit_number(ROW_BYTES))


def _emit_place(builder: Builder, sums: Value, group: Value) -> Value:
    return builder.add(sums, builder.mul(builder.and_(group, emit_number(_RING - 1)), emit_number(TILE_BYTES)))


def _panel_bytes() -> int:
    """Of a group of a panel."""
    return WEIGHT_BYTES * COLUMNS
