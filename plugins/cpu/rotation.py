"""The Hadamard transform of a block and the store of its codes, as LLVM IR."""

import math
from collections.abc import Callable

import llvmlite.ir as ir
from numba import types

from trtcb.plugins.cpu.vector_ir import (
    F32,
    I16,
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
    return builder.fadd(partner, builder.fmul(vector, signs))


def _butterfly_across(builder: Builder, vectors: list[Value], span: int) -> list[Value]:
    result = list(vectors)
    for i, vector in enumerate(vectors):
        partner = vectors[i ^ span]
        result[i] = builder.fsub(partner, vector) if i & span else builder.fadd(vector, partner)
    return result


@define(types.none, types.int64, types.int64, f32x16)
def store_codes(builder: Builder, address: Value, index: Value, x: Value) -> None:
    """Whole numbers next to ``x`` as 16 bits, of each four in the order 0, 2, 1, 3; ``x`` must fit and not be NaN."""
    integers = builder.fptosi(emit_call(builder, "rint", x), INTEGERS)
    undefined = ir.Constant(INTEGERS, ir.Undefined)
    order = [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(LANES)]
    shuffled = builder.shuffle_vector(integers, undefined, ir.Constant(INTEGERS, order))
    narrow = builder.trunc(shuffled, ir.VectorType(I16, LANES))
    builder.store(narrow, emit_pointer(builder, address, index, I16, narrow.type), align=2)
