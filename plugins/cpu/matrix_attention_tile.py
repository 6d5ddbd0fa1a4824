"""The loops of attention on the matrix unit, built directly as LLVM IR: conversion to pairs of bf16, and products.

The unit multiplies ``A[rows, depth] @ B[depth, 16 columns]`` with B in pairs along the depth. Scores have keys as B
(depth: head_dim, columns: tokens), the context has values (depth: tokens, columns: head_dim). Either way B's pairs
come from two neighbouring rows of the pool, so one conversion serves both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import llvmlite.ir as ir
from numba import types

from trtcb.plugins.cpu import matrix_unit
from trtcb.plugins.cpu.vector_ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    INTEGERS,
    LANES,
    VECTOR,
    Builder,
    Loop,
    Value,
    constant,
    define,
    define_outlined,
    emit_call,
    emit_intrinsic,
    emit_pointer,
    emit_prefetch,
    f32x16,
)

WIDTH = 32  # elements of a row converted at once: two tiles' columns
FEATURES = ("avx512bf16", "avx512bw", "avx512dq", "avx512fp16", "avx512vbmi")
"""Instruction sets that all this is meant for; every processor with the unit has them."""

BF16_SCALE = {"bf16": 1.0, "int8": 2.0**104, "fp8": 2.0**105}
"""Factor between a stored number and the bf16 made of it. Formats that can become bf16, all of them exactly."""


@dataclass(frozen=True, slots=True)
class ConvertSpec:
    """A unit of ``rows x columns`` elements of the pool, ``stride`` elements from row to row, as tiles of B.

    The tiles of 16 columns follow each other, each with ``rows / 2`` lines of 64 bytes. While at it, ``rows / 2`` times
    ``prefetch_bytes`` are fetched from the address given at the call.
    """

    kv_format: str
    rows: int
    columns: int
    stride: int
    prefetch_bytes: int

    @property
    def symbol(self) -> str:
        """Name of the function in a module."""
        return f"pairs_{self.kv_format}_{self.rows}x{self.columns}_{self.stride}_{self.prefetch_bytes}"


def define_convert(spec: ConvertSpec) -> Callable[[int, int, int], None]:
    """Make ``convert(source, target, prefetch)`` of three addresses."""
    return define_outlined(spec.symbol, 3, partial(_emit_convert, spec))


def _emit_convert(spec: ConvertSpec, builder: Builder, source: Value, target: Value, prefetch: Value) -> None:
    with Loop(builder, spec.rows // 2) as pair:
        emit_prefetch(builder, prefetch, pair, spec.prefetch_bytes, nearest=False)
        first = builder.mul(pair, ir.Constant(I64, 2 * spec.stride))
        second = builder.add(first, ir.Constant(I64, spec.stride))
        line = builder.add(target, builder.mul(pair, ir.Constant(I64, matrix_unit.ROW_BYTES)))
        for column in range(0, spec.columns, WIDTH):
            offset = ir.Constant(I64, column)
            upper, lower = (
                _load(builder, source, builder.add(row, offset), I16 if spec.kv_format == "bf16" else I8)
                for row in (first, second)
            )
            for half in range(2):
                pairs = _EMIT_PAIRS[spec.kv_format](builder, upper, lower, half * LANES)
                tile = (column // LANES + half) * spec.rows // 2 * matrix_unit.ROW_BYTES
                pointer = builder.inttoptr(builder.add(line, ir.Constant(I64, tile)), pairs.type.as_pointer())
                builder.store(pairs, pointer, align=8)
    builder.ret_void()


def _load(builder: Builder, address: Value, index: Value, element: ir.Type) -> Value:
    return builder.load(emit_pointer(builder, address, index, element, ir.VectorType(element, WIDTH)), align=1)


def _shuffle(builder: Builder, a: Value, b: Value, order: list[int]) -> Value:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))


def _pairs_of_bf16(builder: Builder, a: Value, b: Value, start: int) -> Value:
    return _shuffle(builder, a, b, [lane for i in range(start, start + LANES) for lane in (i, WIDTH + i)])


def _upper_bytes(builder: Builder, a: Value, b: Value, start: int) -> Value:
    """Pairs of 16-bit words with the elements in their upper bytes and zeros below."""
    both = _shuffle(builder, a, b, list(range(2 * WIDTH)))
    zero = 2 * WIDTH
    order = [byte for i in range(start, start + LANES) for byte in (zero, i, zero, WIDTH + i)]
    return builder.bitcast(_shuffle(builder, both, constant(I8, 0, 2 * WIDTH), order), ir.VectorType(I16, WIDTH))


def _bf16_of_f16(builder: Builder, x: Value) -> Value:
    """The bits of normal fp16 numbers of at most seven bits of mantissa, and of zero, as bf16 numbers over 2**112."""
    bits = builder.ashr(builder.bitcast(x, ir.VectorType(I16, WIDTH)), constant(I16, 3, WIDTH))
    return builder.and_(bits, constant(I16, -0x7001, WIDTH))


def _pairs_of_i8(builder: Builder, a: Value, b: Value, start: int) -> Value:
    """Signed bytes: times 256 they are whole numbers of 16 bits, exact in fp16."""
    return _bf16_of_f16(builder, builder.sitofp(_upper_bytes(builder, a, b, start), ir.VectorType(F16, WIDTH)))


def _pairs_of_e4m3(builder: Builder, a: Value, b: Value, start: int) -> Value:
    """e4m3fn bytes: shifted into an fp16 as in ``emit_load_e4m3_scaled``, then times 2**15, which leaves no subnormal.

    The matrix unit would take subnormal bf16 for zero, and zero is not one of the numbers that have an exponent to
    correct: hence the way through fp16, and a scale that is applied elsewhere.
    """
    halves = builder.ashr(_upper_bytes(builder, a, b, start), constant(I16, 1, WIDTH))
    halves = builder.bitcast(builder.and_(halves, constant(I16, -0x4080, WIDTH)), ir.VectorType(F16, WIDTH))
    return _bf16_of_f16(builder, builder.fmul(halves, constant(F16, 2.0**15, WIDTH)))


_EMIT_PAIRS: dict[str, Callable[[Builder, Value, Value, int], Value]] = {
    "bf16": _pairs_of_bf16,
    "int8": _pairs_of_i8,
    "fp8": _pairs_of_e4m3,
}


# --- products --------------------------------------------------------------------------------------------------------


def define_scores(head_dim: int, remainder: int, score_stride: int) -> Callable[[int, int, int], None]:
    """Make ``scores(queries, keys, scores)``: some rows' scores of two units of keys, fp32.

    Queries are sums of two bf16, the second ``remainder`` bytes after the first. Rows of scores are ``score_stride``
    bytes apart. Keys are four tiles' columns of tokens, as :class:`ConvertSpec` describes.
    """
    symbol = f"matrix_scores_{head_dim}_{remainder}_{score_stride}"
    return define_outlined(symbol, 3, partial(_emit_scores, head_dim, remainder, score_stride))


def _emit_scores(
    head_dim: int, remainder: int, score_stride: int, builder: Builder, queries: Value, keys: Value, scores: Value
) -> None:
    for c in matrix_unit.C_TILES:
        matrix_unit.emit_zero(builder, c)
    for step in range(head_dim // WIDTH):
        for a, part in zip(matrix_unit.A_TILES, (0, remainder), strict=True):
            at = builder.add(queries, ir.Constant(I64, part + step * matrix_unit.ROW_BYTES))
            matrix_unit.emit_load(builder, a, at, matrix_unit.emit_number(head_dim * 2))
        for c in matrix_unit.C_TILES:
            offset = c * head_dim // 2 * matrix_unit.ROW_BYTES + step * matrix_unit.TILE_BYTES
            _multiply(builder, c, matrix_unit.A_TILES, builder.add(keys, ir.Constant(I64, offset)))
    for c in matrix_unit.C_TILES:
        at = builder.add(scores, ir.Constant(I64, c * matrix_unit.ROW_BYTES))
        matrix_unit.emit_store(builder, c, at, matrix_unit.emit_number(score_stride))
    builder.ret_void()


def define_context(head_dim: int, weight_stride: int) -> Callable[[int, int, int, int, int], None]:
    """Make ``context(weights, values, unit_bytes, units, context)``: adds weights times values of some units, in order.

    Units of values are ``unit_bytes`` apart; context is fp32 ``[rows, head_dim]``.
    """
    return define_outlined(
        f"matrix_context_{head_dim}_{weight_stride}", 5, partial(_emit_context, head_dim, weight_stride)
    )


def _emit_context(
    head_dim: int,
    weight_stride: int,
    builder: Builder,
    weights: Value,
    values: Value,
    unit_bytes: Value,
    units: Value,
    context: Value,
) -> None:
    stride = matrix_unit.emit_number(head_dim * 4)
    columns = head_dim // LANES
    for first in range(0, columns, len(matrix_unit.C_TILES)):
        tiles = matrix_unit.C_TILES[: columns - first]
        places = [builder.add(context, ir.Constant(I64, (first + c) * matrix_unit.ROW_BYTES)) for c in tiles]
        for c in tiles:
            matrix_unit.emit_load(builder, c, places[c], stride)
        with Loop(builder, units) as unit:
            a = matrix_unit.A_TILES[0]
            at = builder.add(weights, builder.mul(unit, ir.Constant(I64, matrix_unit.ROW_BYTES)))
            matrix_unit.emit_load(builder, a, at, matrix_unit.emit_number(weight_stride))
            unit_values = builder.add(values, builder.mul(unit, unit_bytes))
            for c in tiles:
                offset = (first + c) * matrix_unit.TILE_BYTES
                _multiply(builder, c, (a,), builder.add(unit_values, ir.Constant(I64, offset)))
        for c in tiles:
            matrix_unit.emit_store(builder, c, places[c], stride)
    builder.ret_void()


def _multiply(builder: Builder, c: int, factors: Sequence[int], b_address: Value) -> None:
    b = matrix_unit.B_TILES[c % 2]
    matrix_unit.emit_load(builder, b, b_address, matrix_unit.emit_number(matrix_unit.ROW_BYTES))
    for a in factors:
        matrix_unit.emit_bf16_product(builder, c, a, b)


# --- numbers between the products ------------------------------------------------------------------------------------


class _BFloat(ir.Type):  # type: ignore[misc, unused-ignore]
    """LLVM's bf16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _rounded(builder: Builder, x: Value) -> Value:
    narrow = builder.fptrunc(x, ir.VectorType(_BFloat(), LANES))
    return builder.bitcast(narrow, ir.VectorType(I16, LANES))


@define(f32x16, f32x16)
def round_bf16(builder: Builder, x: Value) -> Value:
    """To the nearest bf16, ties to even, as the processor does it: what is too small for a normal number becomes 0."""
    bits = builder.zext(_rounded(builder, x), INTEGERS)
    return builder.bitcast(builder.shl(bits, constant(I32, 16)), VECTOR)


@define(types.none, types.int64, types.int64, f32x16)
def store_rounded_bf16(builder: Builder, address: Value, index: Value, x: Value) -> None:
    """bf16 as :func:`round_bf16` makes them."""
    rounded = _rounded(builder, x)
    builder.store(rounded, emit_pointer(builder, address, index, I16, rounded.type), align=2)


@define(f32x16, f32x16)
def exp2_weight(builder: Builder, x: Value) -> Value:
    """``2 ** x`` for ``x <= 0``, a weight that is rounded to bf16 anyway, within 3e-6; 0 for minus infinity, NaN kept.

    A polynomial for the fraction above the next lower whole number, exact at 0, and AVX-512's two instructions that
    take a number apart and together.
    """
    everything, exact = ir.Constant(I16, -1), ir.Constant(I32, 4)
    r = _avx512(builder, "reduce", x, ir.Constant(I32, 9), x, everything, exact)
    p = constant(F32, 0.013426706709506816)
    for coefficient in (0.05224243820152938, 0.2412802215935316, 0.6930448427766487, 1.0):
        p = emit_call(builder, "fma", p, r, constant(F32, coefficient))
    return _avx512(builder, "scalef", p, x, x, everything, exact)


def _avx512(builder: Builder, name: str, *arguments: Value) -> Value:
    return emit_intrinsic(builder, f"llvm.x86.avx512.mask.{name}.ps.512", VECTOR, arguments)
