"""The one inner loop of attention, built directly as LLVM IR: ``C[rows, 16 * vectors] (+)= A[rows, depth] @ B``.

Scores are ``query @ keys`` (depth = head_dim, columns = tokens) and the context is ``probabilities @ values`` (depth =
tokens, columns = head_dim), so both are this tile with other strides, and B is read straight from the pool's format.
All ``rows * vectors`` accumulators live in registers as loop-carried values. Each element of C is one chain of fused
multiply-adds in order of depth whatever the tile's shape, so shapes can be chosen freely for speed: bits never change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import llvmlite.ir as ir

from trtcb.plugins.cpu.streams import ONE_STREAM, Streams
from trtcb.plugins.cpu.vector_ir import (
    EMIT_LOAD,
    F32,
    I64,
    ITEM_BYTES,
    LANES,
    VECTOR,
    Builder,
    Value,
    constant,
    define_outlined,
    emit_call,
    emit_pointer,
    emit_prefetch,
    emit_splat,
)

UNROLL = 2  # depth steps per loop iteration; depths are multiples of 16


@dataclass(frozen=True, slots=True)
class TileSpec:
    """Shape and strides of a tile. Strides count elements between rows of A and C (fp32), and steps of depth in B.

    ``prefetch_bytes`` of memory are fetched per depth step from the address given at the call: what is needed next.
    With several ``streams``, ``vectors`` are those of each.
    """

    rows: int
    vectors: int
    b_format: str
    a_stride: int
    b_stride: int
    c_stride: int
    accumulate: bool = False
    prefetch_bytes: int = 0
    streams: Streams = ONE_STREAM

    @property
    def symbol(self) -> str:
        """Name of the function in a module."""
        mode = "add" if self.accumulate else "set"
        shape = f"{self.rows}x{self.streams.count}x{self.vectors}"
        strides = f"{self.a_stride}_{self.b_stride}_{self.c_stride}"
        return f"tile_{shape}_{self.b_format}_{strides}_{mode}_{self.prefetch_bytes}"


def define_tile(spec: TileSpec) -> Callable[[int, int, int, int, int], None]:
    """Make ``tile(a, b, c, depth, prefetch)`` of four addresses and a depth, for use inside jitted code.

    See :class:`~trtcb.plugins.cpu.streams.Streams` for what the last argument is with several streams.
    """
    return define_outlined(spec.symbol, 5, partial(_emit_tile, spec))


def _emit_tile(spec: TileSpec, builder: Builder, a: Value, b: Value, c: Value, depth: Value, prefetch: Value) -> None:
    function = builder.function
    entry, loop, done = builder.block, function.append_basic_block("loop"), function.append_basic_block("done")
    places = spec.streams.places(builder, b, c, prefetch)
    panels = [panel for panel, _ in places]
    cells = [(row, at, v) for row in range(spec.rows) for _, at in places for v in range(spec.vectors)]
    pointers = [
        emit_pointer(builder, at, ir.Constant(I64, row * spec.c_stride + vector * LANES), F32, VECTOR)
        for row, at, vector in cells
    ]
    initial = [builder.load(p, align=4) if spec.accumulate else constant(F32, 0.0) for p in pointers]
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(I64)
    sums = [builder.phi(VECTOR) for _ in cells]
    step.add_incoming(ir.Constant(I64, 0), entry)
    for phi, value in zip(sums, initial, strict=True):
        phi.add_incoming(value, entry)
    values: list[Value] = list(sums)
    for offset in range(UNROLL):
        at_step = builder.add(step, ir.Constant(I64, offset))
        values = _emit_step(builder, spec, a, panels, at_step, values)
        emit_prefetch(builder, prefetch, at_step, spec.prefetch_bytes)
        spec.streams.fetch_ahead(builder, panels, at_step, spec.b_stride * ITEM_BYTES[spec.b_format])
    following = builder.add(step, ir.Constant(I64, UNROLL))
    step.add_incoming(following, loop)
    for phi, value in zip(sums, values, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)

    builder.position_at_end(done)
    for pointer, value in zip(pointers, values, strict=True):
        builder.store(value, pointer, align=4)
    builder.ret_void()


def _emit_step(
    builder: Builder, spec: TileSpec, a: Value, panels: list[Value], step: Value, sums: list[Value]
) -> list[Value]:
    first = builder.mul(step, ir.Constant(I64, spec.b_stride))
    places = [builder.add(first, ir.Constant(I64, v * LANES)) for v in range(spec.vectors)]
    columns = [EMIT_LOAD[spec.b_format](builder, panel, place) for panel in panels for place in places]
    result: list[Value] = []
    for row in range(spec.rows):
        index = builder.add(step, ir.Constant(I64, row * spec.a_stride))
        factor = emit_splat(builder, builder.load(emit_pointer(builder, a, index, F32), align=4))
        for place, column in enumerate(columns):
            result.append(emit_call(builder, "fma", factor, column, sums[row * len(columns) + place]))
    return result


def largest_divisor(number: int, limit: int) -> int:
    """Largest divisor of ``number`` that is at most ``limit`` (at least 1)."""
    return max(d for d in range(1, max(1, min(number, limit)) + 1) if number % d == 0)


def value_shape(rows: int, vectors: int, accumulators: int) -> tuple[int, int]:
    """Choose the tile that covers ``rows x vectors`` with most accumulators in use and fewest columns beside them."""
    shapes = [
        (r, v)
        for r in range(1, rows + 1)
        for v in range(1, vectors + 1)
        if rows % r == 0 and vectors % v == 0 and (r * v <= accumulators or r * v == 1)
    ]
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]))
