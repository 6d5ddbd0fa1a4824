"""The inner loop of products of bf16 rows with bf16 weights, by products of pairs (AVX512-BF16), as LLVM IR.

B is a panel of columns in pairs along the depth, ``[depth / 2, columns, 2]``, as the matrix unit's. An element of C is
one chain over the depth, of pairs whose two products the processor adds in its own way (Intel's instruction set
reference, VDPBF16PS: denormal numbers count as zero): neither the shape of a tile nor the other rows change a bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import llvmlite.ir as ir

from trtcb.plugins.cpu.streams import ONE_STREAM, Streams
from trtcb.plugins.cpu.vector_ir import (
    F32,
    I32,
    I64,
    INTEGERS,
    LANES,
    VECTOR,
    Builder,
    Loop,
    Value,
    constant,
    define_outlined,
    emit_intrinsic,
    emit_pointer,
    emit_prefetch,
    emit_splat,
)


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Shape of a tile. ``depth`` is even; ``c_stride`` counts elements between rows of C (fp32).

    ``prefetch_bytes`` are fetched per pair of the depth. With several ``streams``, ``vectors`` are those of each.
    """

    rows: int
    vectors: int
    depth: int
    c_stride: int
    prefetch_bytes: int = 0
    streams: Streams = ONE_STREAM

    @property
    def symbol(self) -> str:
        """Name of the function in a module."""
        shape = f"{self.rows}x{self.streams.count}x{self.vectors}"
        return f"pairs_{shape}_{self.depth}_{self.c_stride}_{self.prefetch_bytes}"


def define_pair_tile(spec: PairSpec) -> Callable[[int, int, int, int, int], None]:
    """Make ``tile(a, b, c, depth, prefetch)`` with the parameters of :func:`~trtcb.plugins.cpu.tile.define_tile`."""
    return define_outlined(spec.symbol, 5, partial(_emit_tile, spec))


def _emit_tile(spec: PairSpec, builder: Builder, a: Value, b: Value, c: Value, depth: Value, prefetch: Value) -> None:
    places = spec.streams.places(builder, b, c, prefetch)
    panels = [panel for panel, _ in places]
    num_columns = len(places) * spec.vectors
    before = builder.block
    with Loop(builder, spec.depth // 2) as step:
        sums = [builder.phi(VECTOR) for _ in range(spec.rows * num_columns)]
        for phi in sums:
            phi.add_incoming(constant(F32, 0.0), before)
        first = builder.mul(step, ir.Constant(I64, spec.vectors * LANES))
        weights = [
            builder.load(
                emit_pointer(builder, panel, builder.add(first, ir.Constant(I64, v * LANES)), I32, INTEGERS), align=4
            )
            for panel in panels
            for v in range(spec.vectors)
        ]
        values = []
        for row in range(spec.rows):
            place = builder.add(step, ir.Constant(I64, row * spec.depth // 2))
            pair = emit_splat(builder, builder.load(emit_pointer(builder, a, place, I32), align=2))
            for column, weight in enumerate(weights):
                values.append(_emit_dot(builder, sums[row * num_columns + column], pair, weight))
        if spec.prefetch_bytes:
            emit_prefetch(builder, prefetch, step, spec.prefetch_bytes)
        spec.streams.fetch_ahead(builder, panels, step, 4 * spec.vectors * LANES)
        for phi, value in zip(sums, values, strict=True):
            phi.add_incoming(value, builder.block)
    remaining = iter(values)
    for row in range(spec.rows):
        for _, at in places:
            for v in range(spec.vectors):
                place = ir.Constant(I64, row * spec.c_stride + v * LANES)
                builder.store(next(remaining), emit_pointer(builder, at, place, F32, VECTOR), align=4)
    builder.ret_void()


def _emit_dot(builder: Builder, total: Value, pair: Value, weight: Value) -> Value:
    """Add the products of a pair, in every lane."""
    return emit_intrinsic(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [total, pair, weight])
