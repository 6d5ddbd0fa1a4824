"""The inner loop of int8 products as LLVM IR: exact sums of 8-bit products, scaled once at the end.

Rows of A are what ``quantized.py`` describes, B is a panel of columns, ``[depth / 4, columns, 4]`` bytes and then the
columns' fp32 scales. ``C = float(sum) * column scale * row scale``, in this order. Sums are exact, so neither the shape
of a tile nor the instructions change a bit.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import llvmlite.ir as ir

from trtcb.plugins.cpu.isa import has_feature
from trtcb.plugins.cpu.streams import ONE_STREAM, Streams
from trtcb.plugins.cpu.vector_ir import (
    F32,
    I16,
    I32,
    I64,
    INTEGERS,
    LANES,
    VECTOR,
    Builder,
    Value,
    constant,
    define_outlined,
    emit_intrinsic,
    emit_pointer,
    emit_prefetch,
    emit_splat,
)


@dataclass(frozen=True, slots=True)
class DotSpec:
    """Shape of a tile. ``depth`` is a multiple of 4; strides count bytes of A's rows and elements of C's (fp32).

    With several ``streams``, ``vectors`` are those of each.
    """

    rows: int
    vectors: int
    depth: int
    a_stride: int
    scale_offset: int
    c_stride: int
    prefetch_bytes: int = 0
    streams: Streams = ONE_STREAM

    @property
    def symbol(self) -> str:
        """Name of the function in a module."""
        shape = f"{self.rows}x{self.streams.count}x{self.vectors}"
        strides = f"{self.a_stride}_{self.scale_offset}_{self.c_stride}"
        return f"dot_{shape}_{self.depth}_{strides}_{self.prefetch_bytes}"


def define_dot_tile(spec: DotSpec) -> Callable[[int, int, int, int, int], None]:
    """Make ``tile(a, b, c, depth, prefetch)`` with the parameters of :func:`~trtcb.plugins.cpu.tile.define_tile`."""
    return define_outlined(spec.symbol, 5, partial(_emit_tile, spec))


def _emit_tile(spec: DotSpec, builder: Builder, a: Value, b: Value, c: Value, depth: Value, prefetch: Value) -> None:
    function = builder.function
    entry, loop, done = builder.block, function.append_basic_block("loop"), function.append_basic_block("done")
    emit_dots = _emit_pair_dots if platform.machine() in ("x86_64", "AMD64") and has_feature("avx2") else _emit_dots
    places = spec.streams.places(builder, b, c, prefetch)
    num_columns = len(places) * spec.vectors
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(I64)
    step.add_incoming(ir.Constant(I64, 0), entry)
    sums = [builder.phi(INTEGERS) for _ in range(spec.rows * num_columns)]
    for phi in sums:
        phi.add_incoming(constant(I32, 0), entry)
    values: list[Value] = list(sums)
    weights = [
        builder.load(
            emit_pointer(
                builder,
                panel,
                builder.add(builder.mul(step, ir.Constant(I64, spec.vectors * LANES)), ir.Constant(I64, v * LANES)),
                I32,
                INTEGERS,
            ),
            align=4,
        )
        for panel, _ in places
        for v in range(spec.vectors)
    ]
    for row in range(spec.rows):
        codes = builder.add(
            builder.add(a, ir.Constant(I64, row * spec.a_stride)), builder.mul(step, ir.Constant(I64, 8))
        )
        emitted = emit_dots(builder, weights, codes)
        for v in range(num_columns):
            values[row * num_columns + v] = builder.add(values[row * num_columns + v], emitted[v])
    if spec.prefetch_bytes:
        emit_prefetch(builder, prefetch, step, spec.prefetch_bytes)
    spec.streams.fetch_ahead(builder, [panel for panel, _ in places], step, 4 * spec.vectors * LANES)
    following = builder.add(step, ir.Constant(I64, 1))
    step.add_incoming(following, loop)
    for phi, value in zip(sums, values, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, ir.Constant(I64, spec.depth // 4)), loop, done)

    builder.position_at_end(done)
    _emit_results(builder, spec, a, places, values)
    builder.ret_void()


def _emit_dots(builder: Builder, weights: list[Value], codes: Value) -> list[Value]:
    """Sums of four products in every lane: the plain form. Codes are 16 bits each, in the order 0, 2, 1, 3."""
    products: list[Value] = []
    factors = []
    for place in (0, 2, 1, 3):
        code = builder.load(emit_pointer(builder, codes, ir.Constant(I64, place), I16), align=2)
        factors.append(emit_splat(builder, builder.sext(code, I32)))
    for weight in weights:
        total: Value = constant(I32, 0)
        for byte, factor in enumerate(factors):
            moved = builder.shl(weight, constant(I32, 24 - 8 * byte))
            total = builder.add(total, builder.mul(builder.ashr(moved, constant(I32, 24)), factor))
        products.append(total)
    return products


def _emit_pair_dots(builder: Builder, weights: list[Value], codes: Value) -> list[Value]:
    """The same by products of pairs: even bytes times codes 0 and 2, odd ones times 1 and 3."""
    pairs = []
    for place in (0, 1):
        pair = builder.load(emit_pointer(builder, codes, ir.Constant(I64, place), I32), align=4)
        pairs.append(builder.bitcast(emit_splat(builder, pair), ir.VectorType(I16, 2 * LANES)))
    products = []
    for weight in weights:
        wide = builder.bitcast(weight, ir.VectorType(I16, 2 * LANES))
        eight = constant(I16, 8, 2 * LANES)
        even, odd = builder.ashr(builder.shl(wide, eight), eight), builder.ashr(wide, eight)
        products.append(builder.add(_pmadd(builder, even, pairs[0]), _pmadd(builder, odd, pairs[1])))
    return products


def _pmadd(builder: Builder, x: Value, y: Value) -> Value:
    """Sums of products of neighbours, of 32 lanes of 16 bits: at once with AVX-512, else in halves."""
    if has_feature("avx512bw"):  # with VNNI, LLVM takes the addition that follows into the same instruction
        return emit_intrinsic(builder, "llvm.x86.avx512.pmaddw.d.512", INTEGERS, [x, y])
    undefined = ir.Constant(x.type, ir.Undefined)
    halves = []
    for start in (0, LANES):
        index = ir.Constant(ir.VectorType(I32, LANES), list(range(start, start + LANES)))
        parts = [builder.shuffle_vector(one, undefined, index) for one in (x, y)]
        halves.append(emit_intrinsic(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, LANES // 2), parts))
    return builder.shuffle_vector(*halves, ir.Constant(INTEGERS, list(range(LANES))))


def _emit_results(
    builder: Builder, spec: DotSpec, a: Value, places: list[tuple[Value, Value]], sums: list[Value]
) -> None:
    remaining = iter(sums)
    for row in range(spec.rows):
        place = builder.add(a, ir.Constant(I64, row * spec.a_stride + spec.scale_offset))
        row_scale = emit_splat(builder, builder.load(emit_pointer(builder, place, ir.Constant(I64, 0), F32), align=4))
        for panel, c in places:
            scales = builder.add(panel, ir.Constant(I64, spec.depth * spec.vectors * LANES))
            for v in range(spec.vectors):
                lane = ir.Constant(I64, v * LANES)
                column_scale = builder.load(emit_pointer(builder, scales, lane, F32, VECTOR), align=4)
                total = builder.sitofp(next(remaining), VECTOR)
                result = builder.fmul(builder.fmul(total, column_scale), row_scale)
                out = emit_pointer(builder, c, ir.Constant(I64, row * spec.c_stride + v * LANES), F32, VECTOR)
                builder.store(result, out, align=4)
