"""The inner loop of int4 products in AVX-512: four products of bytes are added up in each of 16 columns at once (VNNI).

The bits are those of ``group_tile.py``. Here the sums of a group as well as the chains stay in registers.
"""

import llvmlite.ir as ir

from trtcb.plugins.cpu.group_spec import GroupSpec
from trtcb.plugins.cpu.grouped import CODE_BYTES, GROUP, WEIGHT_BYTES
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
    emit_byte_dots,
    emit_call,
    emit_load_f16,
    emit_pointer,
    emit_prefetch,
    emit_splat,
)


def emit_wide_tile(
    spec: GroupSpec, builder: Builder, a: Value, b: Value, c: Value, depth: Value, prefetch: Value
) -> None:
    """Append the body of a tile, see :func:`~trtcb.plugins.cpu.group_tile.define_group_tile`."""
    function = builder.function
    entry, loop, done = builder.block, function.append_basic_block("loop"), function.append_basic_block("done")
    streams = spec.streams.places(builder, b, c, prefetch)
    vectors = range(spec.columns // LANES)
    places = [(at, v) for _, at in streams for v in vectors]
    cells = [(row, at, v) for row in range(spec.rows) for at, v in places]
    builder.branch(loop)

    builder.position_at_end(loop)
    group = builder.phi(I64)
    chains = [builder.phi(VECTOR) for _ in cells]
    offset = builder.mul(group, ir.Constant(I64, WEIGHT_BYTES * spec.columns))
    codes = builder.add(a, builder.mul(group, ir.Constant(I64, GROUP)))
    panels = [(builder.add(panel, offset), v) for panel, _ in streams for v in vectors]
    sums: list[Value] = [constant(I32, 0)] * len(cells)
    for chunk in range(CODE_BYTES // 4):
        halves = [_emit_halves(builder, panel, chunk * spec.columns + v * LANES) for panel, v in panels]
        for row in range(spec.rows):
            for half in range(2):
                factors = _emit_factors(builder, codes, row * spec.a_stride + half * CODE_BYTES + 4 * chunk)
                for index, weights in enumerate(halves):
                    at = row * len(panels) + index
                    sums[at] = emit_byte_dots(builder, sums[at], weights[half], factors)
    values = []
    scales, zeros = zip(*(_emit_scales(builder, panel, spec.columns, v) for panel, v in panels), strict=True)
    for at, (row, _, _) in enumerate(cells):
        index = at % len(panels)
        row_factors = _emit_row_factors(builder, spec, a, row, group)
        values.append(_emit_link(builder, chains[at], sums[at], (scales[index], zeros[index]), row_factors))
    spec.streams.fetch_ahead(builder, [panel for panel, _ in streams], group, WEIGHT_BYTES * spec.columns)
    if spec.fetch:
        emit_prefetch(builder, prefetch, group, WEIGHT_BYTES * spec.columns)
    following = builder.add(group, ir.Constant(I64, 1))
    group.add_incoming(ir.Constant(I64, 0), entry)
    group.add_incoming(following, loop)
    for phi, value in zip(chains, values, strict=True):
        phi.add_incoming(constant(F32, 0.0), entry)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, ir.Constant(I64, spec.depth // GROUP)), loop, done)

    builder.position_at_end(done)
    for (row, at, v), value in zip(cells, values, strict=True):
        place = ir.Constant(I64, row * spec.c_stride + v * LANES)
        builder.store(value, emit_pointer(builder, at, place, F32, VECTOR), align=4)
    builder.ret_void()


def _emit_halves(builder: Builder, codes: Value, place: int) -> tuple[Value, Value]:
    """The low and the high codes of four bytes of 16 columns; ``place`` counts columns of four bytes."""
    pointer = emit_pointer(builder, codes, ir.Constant(I64, place), I32, INTEGERS)
    packed, low = builder.load(pointer, align=4), constant(I32, 0x0F0F0F0F)
    return builder.and_(packed, low), builder.and_(builder.lshr(packed, constant(I32, 4)), low)


def _emit_scales(builder: Builder, codes: Value, columns: int, vector: int) -> tuple[Value, Value]:
    """Scales and zeros of 16 columns, from behind a group's codes."""
    factors = builder.add(codes, ir.Constant(I64, CODE_BYTES * columns))
    first, second = (emit_load_f16(builder, factors, ir.Constant(I64, p * columns + vector * LANES)) for p in range(2))
    return first, second


def _emit_row_factors(builder: Builder, spec: GroupSpec, a: Value, row: int, group: Value) -> tuple[Value, Value]:
    """A row's scale and its scaled sum of codes, for all columns."""
    factors = []
    for part in range(2):
        start = row * spec.a_stride + spec.depth + 4 * part * (spec.depth // GROUP)
        place = builder.add(a, ir.Constant(I64, start))
        factors.append(emit_splat(builder, builder.load(emit_pointer(builder, place, group, F32), align=4)))
    return factors[0], factors[1]


def _emit_link(
    builder: Builder, chain: Value, total: Value, column: tuple[Value, Value], row: tuple[Value, Value]
) -> Value:
    """Take a chain one group further, with the scale and zero of the columns, and the scale and scaled sum of a row."""
    scaled = emit_call(builder, "fma", builder.sitofp(total, VECTOR), builder.fmul(column[0], row[0]), chain)
    return emit_call(builder, "fma", column[1], row[1], scaled)


def _emit_factors(builder: Builder, codes: Value, place: int) -> Value:
    """Four codes of a row, in every column."""
    pointer = emit_pointer(builder, codes, ir.Constant(I64, place), I8, I32)
    return emit_splat(builder, builder.load(pointer, align=1))
