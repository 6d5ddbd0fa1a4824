"""The inner loop of int4 products as LLVM IR: exact sums of a group's products, scaled and added up group after group.

Rows of A and the panel B are what ``grouped.py`` describes. With ``sum`` a group's exact sum of products of codes::

    C = fma(zero, row scale * sum of the row's codes, fma(float(sum), scale * row scale, C))

Every element of C is one such chain in order of depth, so neither the shape of a tile nor the instructions change a
bit.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir
from numba import types

from trtcb.plugins.cpu.grouped import CODE_BYTES, GROUP, WEIGHT_BYTES
from trtcb.plugins.cpu.isa import has_feature
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
    define,
    emit_call,
    emit_pointer,
    emit_prefetch,
    emit_splat,
)

_HALF = LANES // 2  # lanes of AVX2
_BYTES = ir.VectorType(I8, 4 * _HALF)
_SHORTS = ir.VectorType(I16, 2 * _HALF)
_INTS = ir.VectorType(I32, _HALF)
_FLOATS = ir.VectorType(F32, _HALF)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Shape of a tile: ``columns`` is a multiple of 16; ``c_stride`` counts elements between rows of C (fp32).

    With ``fetch``, what the tile reads is fetched ahead, from the address given at the call.
    """

    rows: int
    columns: int
    depth: int
    a_stride: int
    c_stride: int
    fetch: bool = False

    @property
    def symbol(self) -> str:
        """Name of the function in a module."""
        strides = f"{self.a_stride}_{self.c_stride}_{int(self.fetch)}"
        return f"group_{self.rows}x{self.columns}_{self.depth}_{strides}"


def define_group_tile(spec: GroupSpec) -> Callable[[int, int, int, int, int], None]:
    """Make ``tile(a, b, c, depth, prefetch)`` with the parameters of :func:`~trtcb.plugins.cpu.tile.define_tile`."""

    def tile(builder: Builder, a: Value, b: Value, c: Value, depth: Value, prefetch: Value) -> None:
        function = builder.module.globals.get(spec.symbol)
        if function is None:
            function = _build(builder.module, spec)
        builder.call(function, [a, b, c, prefetch])

    return define(types.none, *[types.int64] * 5)(tile)


def _build(module: Any, spec: GroupSpec) -> Any:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 4), spec.symbol)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    a, b, c, prefetch = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    entry, loop, done = builder.block, function.append_basic_block("loop"), function.append_basic_block("done")
    is_avx2 = platform.machine() in ("x86_64", "AMD64") and has_feature("avx2")
    dots = _PairDots() if is_avx2 else _Dots()
    builder.branch(loop)

    builder.position_at_end(loop)
    group = builder.phi(I64)
    group.add_incoming(ir.Constant(I64, 0), entry)
    sums = [builder.phi(_FLOATS) for _ in range(spec.rows * spec.columns // _HALF)]
    for phi in sums:
        phi.add_incoming(constant(F32, 0.0, _HALF), entry)
    block_bytes = WEIGHT_BYTES * spec.columns
    block = builder.add(b, builder.mul(group, ir.Constant(I64, block_bytes)))
    products = _emit_products(builder, spec, dots, (a, block), group)
    values = _emit_scaled(builder, spec, (a, block), group, (sums, products))
    if spec.fetch:
        emit_prefetch(builder, prefetch, group, block_bytes)
    following = builder.add(group, ir.Constant(I64, 1))
    group.add_incoming(following, loop)
    for phi, value in zip(sums, values, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, ir.Constant(I64, spec.depth // GROUP)), loop, done)

    builder.position_at_end(done)
    for index, value in enumerate(values):
        row, vector = divmod(index, spec.columns // _HALF)
        place = ir.Constant(I64, row * spec.c_stride + vector * _HALF)
        builder.store(value, emit_pointer(builder, c, place, F32, _FLOATS), align=4)
    builder.ret_void()
    return function


def _emit_products(
    builder: Builder, spec: GroupSpec, dots: "_Dots | _PairDots", addresses: tuple[Value, Value], group: Value
) -> list[Value]:
    """A group's sums of products of codes, row by row and then by 8 columns."""
    a, block = addresses
    vectors = spec.columns // _HALF
    sums = [dots.zero] * (spec.rows * vectors)
    for chunk in range(CODE_BYTES // 4):
        packed = []
        for vector in range(vectors):
            place = ir.Constant(I64, chunk * spec.columns + vector * _HALF)
            packed.append(builder.load(emit_pointer(builder, block, place, I32, _INTS), align=4))
        halves = [dots.split(builder, weights) for weights in packed]
        for row in range(spec.rows):
            codes = builder.add(builder.mul(group, ir.Constant(I64, GROUP)), ir.Constant(I64, row * spec.a_stride))
            for half in range(2):
                place = builder.add(codes, ir.Constant(I64, half * CODE_BYTES + 4 * chunk))
                factors = dots.factors(builder, builder.add(a, place))
                for vector in range(vectors):
                    at = row * vectors + vector
                    sums[at] = dots.add(builder, sums[at], halves[vector][half], factors)
    return [dots.total(builder, value) for value in sums]


def _emit_scaled(
    builder: Builder,
    spec: GroupSpec,
    addresses: tuple[Value, Value],
    group: Value,
    sums_and_products: tuple[list[Value], list[Value]],
) -> list[Value]:
    """The chain of every element, one group further."""
    a, block = addresses
    sums, products = sums_and_products
    vectors, num_groups = spec.columns // _HALF, spec.depth // GROUP
    scales, zeros = (
        [
            builder.fpext(
                builder.load(
                    emit_pointer(
                        builder,
                        block,
                        ir.Constant(I64, (CODE_BYTES // 2 + part) * spec.columns + v * _HALF),
                        F16,
                        ir.VectorType(F16, _HALF),
                    ),
                    align=2,
                ),
                _FLOATS,
            )
            for v in range(vectors)
        ]
        for part in range(2)
    )
    result = []
    for row in range(spec.rows):
        factors = builder.add(a, ir.Constant(I64, row * spec.a_stride + spec.depth))
        row_scale, row_sum = (
            emit_splat(
                builder,
                builder.load(
                    emit_pointer(builder, factors, builder.add(group, ir.Constant(I64, part * num_groups)), F32),
                    align=4,
                ),
                _HALF,
            )
            for part in range(2)
        )
        for v in range(vectors):
            at = row * vectors + v
            scale = builder.fmul(scales[v], row_scale)
            total = emit_call(builder, "fma", builder.sitofp(products[at], _FLOATS), scale, sums[at])
            result.append(emit_call(builder, "fma", zeros[v], row_sum, total))
    return result


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
