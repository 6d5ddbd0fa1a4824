"""The Hadamard transform of a block and the store of its codes, as LLVM IR."""

import math
from collections.abc import Callable

import llvmlite.ir as ir
from numba import types

from trtcb.plugins.cpu.quantized import PLANE_OFFSET
from trtcb.plugins.cpu.vector_ir import (
    F32,
    I8,
    I16,
    I32,
    I64,
    INTEGERS,
    LANES,
    Builder,
    Value,
    constant,
    define,
    emit_call,
    emit_load_f32,
    emit_pointer,
    f32x16,
)

_MAGIC, _MAGIC_BITS = 12582912.0, 0x4B400000


def define_rotation(size: int) -> Callable[[int, int], None]:
    """Make ``rotate(source, target)`` of the addresses of ``size`` fp32: a power of two, at least 16."""

    def rotate(builder: Builder, source: Value, target: Value) -> None:
        vectors = [emit_load_f32(builder, source, ir.Constant(I64, i * LANES)) for i in range(size // LANES)]
        span = 1
        while span < LANES:
            vectors = [_butterfly_within(builder, vector, span) for vector in vectors]
            span *= 2
        span = 1
        while span < len(vectors):
            vectors = _butterfly_across(builder, vectors, span)
            span *= 2
        scale = constant(F32, 1 / math.sqrt(size))
        for i, vector in enumerate(vectors):
            pointer = emit_pointer(builder, target, ir.Constant(I64, i * LANES), F32, vector.type)
            builder.store(builder.fmul(vector, scale), pointer, align=4)

    return define(types.none, types.int64, types.int64)(rotate)


def _butterfly_within(builder: Builder, vector: Value, span: int) -> Value:
    """Sums in the lanes whose partner is ``span`` above, differences in their partners."""
    undefined = ir.Constant(vector.type, ir.Undefined)
    partner = builder.shuffle_vector(vector, undefined, ir.Constant(INTEGERS, [i ^ span for i in range(LANES)]))
    signs = ir.Constant(vector.type, [-1.0 if i & span else 1.0 for i in range(LANES)])
    return emit_call(builder, "fma", vector, signs, partner)  # one times a sign is exact


def _butterfly_across(builder: Builder, vectors: list[Value], span: int) -> list[Value]:
    result = list(vectors)
    for i, vector in enumerate(vectors):
        partner = vectors[i ^ span]
        result[i] = builder.fsub(partner, vector) if i & span else builder.fadd(vector, partner)
    return result


def _rounded(builder: Builder, x: Value, offset: int = 0) -> Value:
    """Whole numbers next to ``x``, plus ``offset``: the low bits of what is left of ``x`` beside 1.5 * 2**23."""
    bits = builder.bitcast(builder.fadd(x, constant(F32, _MAGIC)), INTEGERS)
    return builder.sub(bits, constant(I32, _MAGIC_BITS - offset))


@define(types.none, types.int64, types.int64, f32x16)
def store_pairs(builder: Builder, address: Value, index: Value, x: Value) -> None:
    """Whole numbers next to ``x`` as 16 bits, of each four in the order 0, 2, 1, 3; ``x`` must fit."""
    integers = _rounded(builder, x)
    undefined = ir.Constant(INTEGERS, ir.Undefined)
    order = [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(LANES)]
    shuffled = builder.shuffle_vector(integers, undefined, ir.Constant(INTEGERS, order))
    narrow = builder.trunc(shuffled, ir.VectorType(I16, LANES))
    builder.store(narrow, emit_pointer(builder, address, index, I16, narrow.type), align=2)


@define(types.none, types.int64, types.int64, types.int64, f32x16)
def store_planes(builder: Builder, high: Value, low: Value, index: Value, x: Value) -> None:
    """The same plus ``PLANE_OFFSET`` as bytes of two planes, in order."""
    codes = _rounded(builder, x, PLANE_OFFSET)
    for plane, bits in ((high, builder.lshr(codes, constant(I32, 8))), (low, codes)):
        narrow = builder.trunc(bits, ir.VectorType(I8, LANES))
        builder.store(narrow, emit_pointer(builder, plane, index, I8, narrow.type), align=1)
