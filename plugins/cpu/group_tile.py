"""The inner loop of int4 products as LLVM IR: exact sums of a group's products, scaled and added up group after group.

Rows of A and the panel B are what ``grouped.py`` describes. With ``sum`` a group's exact sum of products of codes::

    C = fma(zero, row scale * sum of the row's codes, fma(float(sum), scale * row scale, C))

Every element of C is one such chain in order of depth, so neither the shape of a tile nor the instructions change a
bit: plain ones and AVX2's are here, those of AVX-512 in ``group_wide_tile.py``.
"""

import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import llvmlite.ir as ir

from trtcb.plugins.cpu.group_spec import GroupSpec
from trtcb.plugins.cpu.group_wide_tile import emit_wide_tile
from trtcb.plugins.cpu.grouped import CODE_BYTES, GROUP, WEIGHT_BYTES
from trtcb.plugins.cpu.isa import has_feature, multiplies_bytes
from trtcb.plugins.cpu.vector_ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Builder,
    Value,
    constant,
    define_outlined,
    emit_call,
    emit_pointer,
    emit_prefetch,
    emit_splat,
)

CHUNKS = CODE_BYTES // 4  # of a group: four bytes of every column
_HALF = LANES // 2  # lanes of AVX2
_BYTES = ir.VectorType(I8, 4 * _HALF)
_SHORTS = ir.VectorType(I16, 2 * _HALF)
_INTS = ir.VectorType(I32, _HALF)
_FLOATS = ir.VectorType(F32, _HALF)


def define_group_tile(spec: GroupSpec) -> Callable[[int, int, int, int, int], None]:
    """Make ``tile(a, b, c, depth, prefetch)`` with the parameters of :func:`~trtcb.plugins.cpu.tile.define_tile`."""
    emit = emit_wide_tile if multiplies_bytes() else _emit_tile
    return define_outlined(spec.symbol, 5, partial(emit, spec))


def _emit_tile(spec: GroupSpec, builder: Builder, a: Value, b: Value, c: Value, depth: Value, prefetch: Value) -> None:
    function = builder.function
    entry, loop, end_of_group, done = builder.block, *map(function.append_basic_block, ("loop", "end_of_group", "done"))
    is_avx2 = platform.machine() in ("x86_64", "AMD64") and has_feature("avx2")
    dots = _PairDots() if is_avx2 else _Dots()
    streams = spec.streams.places(builder, ir.Constant(I64, 0), c, prefetch)
    offsets = [offset for offset, _ in streams]
    places = [
        emit_pointer(builder, at, ir.Constant(I64, row * spec.c_stride + vector * _HALF), F32, _FLOATS)
        for row in range(spec.rows)
        for _, at in streams
        for vector in range(spec.vectors)
    ]
    for place in places:
        builder.store(constant(F32, 0.0, _HALF), place, align=4)
    builder.branch(loop)

    builder.position_at_end(loop)
    chunk, weights, codes = (builder.phi(I64) for _ in range(3))
    sums = [builder.phi(dots.zero.type) for _ in places]
    panels = [builder.add(weights, offset) for offset in offsets]
    values = _emit_products(builder, spec, dots, codes, panels, sums)
    following = builder.add(chunk, ir.Constant(I64, 1))
    next_weights, next_codes = (
        builder.add(weights, ir.Constant(I64, 4 * spec.columns)),
        builder.add(codes, ir.Constant(I64, 4)),
    )
    is_inside = builder.icmp_signed("!=", builder.and_(following, ir.Constant(I64, CHUNKS - 1)), ir.Constant(I64, 0))
    builder.cbranch(is_inside, loop, end_of_group)

    # C stays in memory: it is touched once a group, and the sums of 16 bits take the registers.
    builder.position_at_end(end_of_group)
    group = builder.lshr(chunk, ir.Constant(I64, 2))
    totals = [builder.sitofp(dots.total(builder, value), _FLOATS) for value in values]
    behind = [builder.add(next_weights, offset) for offset in offsets]
    _emit_group(builder, spec, a, behind, group, (places, totals))
    spec.streams.fetch_ahead(
        builder, [builder.add(b, offset) for offset in offsets], group, WEIGHT_BYTES * spec.columns
    )
    if spec.fetch:
        emit_prefetch(builder, prefetch, group, WEIGHT_BYTES * spec.columns)
    behind_factors = builder.add(next_weights, ir.Constant(I64, 4 * spec.columns))
    behind_half = builder.add(next_codes, ir.Constant(I64, CODE_BYTES))
    is_more = builder.icmp_signed("<", following, ir.Constant(I64, spec.depth // GROUP * CHUNKS))
    builder.cbranch(is_more, loop, done)

    zeros = [dots.zero] * len(sums)
    for block, state in (
        (entry, (ir.Constant(I64, 0), b, a, *zeros)),
        (loop, (following, next_weights, next_codes, *values)),
        (end_of_group, (following, behind_factors, behind_half, *zeros)),
    ):
        for phi, value in zip((chunk, weights, codes, *sums), state, strict=True):
            phi.add_incoming(value, block)
    builder.position_at_end(done)
    builder.ret_void()


def _emit_products(
    builder: Builder, spec: GroupSpec, dots: "_Dots | _PairDots", codes: Value, panels: list[Value], sums: list[Value]
) -> list[Value]:
    """Sums row by row, and then by 8 columns, with the products of a chunk: eight codes of every column."""
    halves = []
    for panel in panels:
        for vector in range(spec.vectors):
            pointer = emit_pointer(builder, panel, ir.Constant(I64, vector * _HALF), I32, _INTS)
            halves.append(dots.split(builder, builder.load(pointer, align=4)))
    result = list(sums)
    for row in range(spec.rows):
        for half in range(2):
            place = builder.add(codes, ir.Constant(I64, row * spec.a_stride + half * CODE_BYTES))
            factors = dots.factors(builder, place)
            for vector in range(spec.all_vectors):
                at = row * spec.all_vectors + vector
                result[at] = dots.add(builder, result[at], halves[vector][half], factors)
    return result


def _emit_group(
    builder: Builder,
    spec: GroupSpec,
    a: Value,
    behind: list[Value],
    group: Value,
    places_and_totals: tuple[list[Value], list[Value]],
) -> None:
    """Take the chains at ``places`` in C one group further, with the scales and zeros behind its codes."""
    scales, zeros = (
        [_emit_factors(builder, spec, panel, part, v) for panel in behind for v in range(spec.vectors)]
        for part in range(2)
    )
    for index, (place, total) in enumerate(zip(*places_and_totals, strict=True)):
        row, vector = divmod(index, spec.all_vectors)
        factors = builder.add(a, ir.Constant(I64, row * spec.a_stride + spec.depth))
        row_scale, row_sum = (_emit_row_factor(builder, spec, factors, part, group) for part in range(2))
        scaled = emit_call(builder, "fma", total, builder.fmul(scales[vector], row_scale), builder.load(place, align=4))
        builder.store(emit_call(builder, "fma", zeros[vector], row_sum, scaled), place, align=4)


def _emit_factors(builder: Builder, spec: GroupSpec, address: Value, part: int, vector: int) -> Value:
    """Scales (part 0) or zeros (part 1) of 8 columns."""
    place = ir.Constant(I64, part * spec.columns + vector * _HALF)
    stored = builder.load(emit_pointer(builder, address, place, F16, ir.VectorType(F16, _HALF)), align=2)
    return builder.fpext(stored, _FLOATS)


def _emit_row_factor(builder: Builder, spec: GroupSpec, factors: Value, part: int, group: Value) -> Value:
    """A row's scale (part 0) or scaled sum of codes (part 1), for all columns."""
    place = builder.add(group, ir.Constant(I64, part * (spec.depth // GROUP)))
    return emit_splat(builder, builder.load(emit_pointer(builder, factors, place, F32), align=4), _HALF)


class _Dots:
    """Sums of products of codes, plainly: 32 bits a column."""

    zero = constant(I32, 0, _HALF)

    def split(self, builder: Builder, packed: Value) -> tuple[Value, Value]:
        """The low and the high codes of every byte."""
        low = constant(I8, 15, 4 * _HALF)
        wide = builder.bitcast(packed, _BYTES)
        return builder.and_(wide, low), builder.lshr(wide, constant(I8, 4, 4 * _HALF))

    def factors(self, builder: Builder, address: Value) -> list[Value]:
        """Four codes of a row."""
        codes = [builder.load(emit_pointer(builder, address, ir.Constant(I64, i), I8), align=1) for i in range(4)]
        return [emit_splat(builder, builder.sext(code, I32), _HALF) for code in codes]

    def add(self, builder: Builder, total: Value, weights: Value, factors: list[Value]) -> Value:
        """Add the products of four codes in every column."""
        columns = builder.bitcast(weights, _INTS)
        for byte, factor in enumerate(factors):
            code = builder.and_(builder.lshr(columns, constant(I32, 8 * byte, _HALF)), constant(I32, 15, _HALF))
            total = builder.add(total, builder.mul(code, factor))
        return total

    def total(self, builder: Builder, value: Value) -> Value:
        """The sum of a column."""
        return value


class _PairDots:
    """The same by AVX2's products of unsigned and signed bytes: the sums of pairs of a group fit 16 bits."""

    zero = constant(I16, 0, 2 * _HALF)

    def split(self, builder: Builder, packed: Value) -> tuple[Value, Value]:
        """The low and the high codes of every byte."""
        low = constant(I8, 15, 4 * _HALF)
        moved = builder.lshr(builder.bitcast(packed, _SHORTS), constant(I16, 4, 2 * _HALF))
        return builder.and_(builder.bitcast(packed, _BYTES), low), builder.and_(builder.bitcast(moved, _BYTES), low)

    def factors(self, builder: Builder, address: Value) -> Value:
        """Four codes of a row, in every column."""
        codes = builder.load(emit_pointer(builder, address, ir.Constant(I64, 0), I32), align=1)
        return builder.bitcast(emit_splat(builder, codes, _HALF), _BYTES)

    def add(self, builder: Builder, total: Value, weights: Value, factors: Value) -> Value:
        """Add the products of four codes in every column, as two sums."""
        pairs = _intrinsic(builder, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, weights, factors)
        return builder.add(total, pairs)

    def total(self, builder: Builder, value: Value) -> Value:
        """The sum of a column."""
        return _intrinsic(builder, "llvm.x86.avx2.pmadd.wd", _INTS, value, constant(I16, 1, 2 * _HALF))


def _intrinsic(builder: Builder, name: str, result: Any, *arguments: Value) -> Value:
    callee = builder.module.globals.get(name)
    if callee is None:
        callee = ir.Function(builder.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return builder.call(callee, arguments)
