"""Source of the loop that measures how fast the CPU multiplies; ``specialize.py`` rewrites the constant."""

import llvmlite.ir as ir
from numba import types

from trtcb.plugins.cpu.simd import load_f32, read_i64, store_f32
from trtcb.plugins.cpu.vector_ir import F32, I64, LANES, VECTOR, Builder, Value, constant, define, emit_call, f32x16

# --- constants of a specialisation ---
CHAINS = 6
# --- end of constants ---


@define(f32x16, f32x16, types.int64)
def multiply_and_add(builder: Builder, factor: Value, rounds: Value) -> Value:
    """``CHAINS`` vectors, multiplied by a factor and increased by 1 ``rounds`` times, each for itself; their sum."""
    before = builder.block
    loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    vectors = [builder.phi(VECTOR) for _ in range(CHAINS)]
    following = builder.add(index, ir.Constant(I64, 1))
    results = [emit_call(builder, "fma", vector, factor, constant(F32, 1.0)) for vector in vectors]
    index.add_incoming(ir.Constant(I64, 0), before)
    index.add_incoming(following, loop)
    for number, (vector, result) in enumerate(zip(vectors, results, strict=True)):
        vector.add_incoming(constant(F32, float(number)), before)
        vector.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", following, rounds), loop, after)
    builder.position_at_end(after)
    total = results[0]
    for result in results[1:]:
        total = builder.fadd(total, result)
    return total


def multiply(arguments: int, part: int, parts: int) -> None:
    """Arguments: address of 16 fp32 factors, rounds (at least 1), results (16 fp32 a part)."""
    vector = multiply_and_add(load_f32(read_i64(arguments, 0), 0), read_i64(arguments, 1))
    store_f32(read_i64(arguments, 2), part * LANES, vector)


KERNELS = (multiply,)
