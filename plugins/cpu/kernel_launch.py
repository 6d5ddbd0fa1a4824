"""Source of the one parallel function of the CPU target; ``specialize.py`` compiles it once for all models.

Kernels are serial C functions ``void (arguments, part, parts)``. Only this loop is parallel, so numba's expensive
parallel compilation happens once, and a small launch can skip the thread team altogether.
"""

import llvmlite.ir as ir
from numba import njit, prange, types

from trtcb.plugins.cpu.simd import (
    JIT_OPTIONS,
    call_kernel,
)
from trtcb.plugins.cpu.vector_ir import (
    I64,
    Builder,
    Value,
    define,
)

ARGUMENTS = 16  # int64 words of an argument block; the last is a counter, 0 at the start of each launch


@define(types.int64, *[types.int64] * (ARGUMENTS - 1))
def argument_block(
    builder: Builder,
    a0: Value,
    a1: Value,
    a2: Value,
    a3: Value,
    a4: Value,
    a5: Value,
    a6: Value,
    a7: Value,
    a8: Value,
    a9: Value,
    a10: Value,
    a11: Value,
    a12: Value,
    a13: Value,
    a14: Value,
) -> Value:
    """Address of a block on the caller's stack that holds the arguments and a zeroed counter."""
    with builder.goto_entry_block():
        block = builder.alloca(I64, size=ARGUMENTS)
        block.align = 64
    arguments = [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, ir.Constant(I64, 0)]
    for i, argument in enumerate(arguments):
        builder.store(argument, builder.gep(block, [ir.Constant(I64, i)]))
    return builder.ptrtoint(block, I64)


@njit(parallel=True, **JIT_OPTIONS)
def run_parts(function: int, arguments: int, parts: int) -> None:
    """Call a kernel once per part, on as many threads as there are."""
    for part in prange(parts):
        call_kernel(function, arguments, part, parts)


def launch(
    function: int,
    parts: int,
    a0: int,
    a1: int,
    a2: int,
    a3: int,
    a4: int,
    a5: int,
    a6: int,
    a7: int,
    a8: int,
    a9: int,
    a10: int,
    a11: int,
) -> None:
    """Run the kernel at an address, in the calling thread if ``parts`` is 1."""
    arguments = argument_block(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, 0, 0, 0)
    if parts == 1:
        call_kernel(function, arguments, 0, 1)
    else:
        run_parts(function, arguments, parts)
