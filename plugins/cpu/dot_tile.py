"""The inner loop of int8 products as LLVM IR: exact sums of 8-bit products, scaled once at the end.

Rows of A and the panel B are what ``quantized.py`` describes. ``C = float(sum) * column scale * row scale``, in this
order. Sums are exact, so neither the shape of a tile nor the instructions change a bit.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import llvmlite.ir as ir

from trtcb.plugins.cpu.isa import has_feature, multiplies_bytes
from trtcb.plugins.cpu.quantized import panel_weights
from trtcb.plugins.cpu.streams import ONE_STREAM, Streams
from trtcb.plugins.cpu.vector_ir import (
    F32,
    I8,
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
    emit_byte_dots,
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
    c_stride: int
    prefetch_bytes: int = 0
    streams: Streams = ONE_STREAM

    @property
    def symbol(self) -> str:
        """Name of the function in a module."""
        shape = f"{self.rows}x{self.streams.count}x{self.vectors}"
        strides = f"{self.a_stride}_{self.c_stride}"
        return f"dot_{shape}_{self.depth}_{strides}_{self.prefetch_bytes}"


def define_dot_tile(spec: DotSpec) -> Callable[[int, int, int, int, int], None]:
    """Make ``tile(a, b, c, depth, prefetch)`` with the parameters of :func:`~trtcb.plugins.cpu.tile.define_tile`."""
    return define_outlined(spec.symbol, 5, partial(_emit_tile, spec))


class _Pairs:
    """Sums for rows that are pairs: one a column."""

    num_sums = 1

    def __init__(self, emit_dots: Callable[[Builder, list[Value], Value], list[Value]]) -> None:
        self._emit_dots = emit_dots

    def add(
        self, builder: Builder, spec: DotSpec, row: Value, step: Value, weights: list[Value], sums: list[Value]
    ) -> list[Value]:
        """Add a step's products with one row to its columns' sums."""
        codes = builder.add(row, builder.mul(step, ir.Constant(I64, 8)))
        dots = self._emit_dots(builder, weights, codes)
        return [builder.add(total, dot) for total, dot in zip(sums, dots, strict=True)]

    def total(self, builder: Builder, sums: list[Value], correction: Value) -> Value:
        """Sum of a column."""
        return sums[0]


class _Planes:
    """Sums for rows that are planes: of a column's products with the high bytes, then with the low ones."""

    num_sums = 2

    def add(
        self, builder: Builder, spec: DotSpec, row: Value, step: Value, weights: list[Value], sums: list[Value]
    ) -> list[Value]:
        """Add a step's products with one row to its columns' sums."""
        place = builder.mul(step, ir.Constant(I64, 4))
        planes = []
        for plane in (0, spec.depth):
            codes = emit_pointer(builder, builder.add(row, ir.Constant(I64, plane)), place, I8, I32)
            planes.append(emit_splat(builder, builder.load(codes, align=1)))
        return [
            emit_byte_dots(builder, sums[2 * column + which], planes[which], weight)
            for column, weight in enumerate(weights)
            for which in (0, 1)
        ]

    def total(self, builder: Builder, sums: list[Value], correction: Value) -> Value:
        """Sum of a column."""
        high, low = sums
        return builder.sub(builder.add(builder.shl(high, constant(I32, 8)), low), correction)


def _form() -> _Pairs | _Planes:
    """What suits the processor; rows are stored accordingly, see ``isa.multiplies_bytes``."""
    if multiplies_bytes():
        return _Planes()
    is_avx2 = platform.machine() in ("x86_64", "AMD64") and has_feature("avx2")
    return _Pairs(_emit_pair_dots if is_avx2 else _emit_dots)


def _emit_tile(spec: DotSpec, builder: Builder, a: Value, b: Value, c: Value, depth: Value, prefetch: Value) -> None:
    function, form = builder.function, _form()
    entry, loop, done = builder.block, function.append_basic_block("loop"), function.append_basic_block("done")
    places = spec.streams.places(builder, b, c, prefetch)
    num_sums = len(places) * spec.vectors * form.num_sums  # of a row
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(I64)
    step.add_incoming(ir.Constant(I64, 0), entry)
    sums = [builder.phi(INTEGERS) for _ in range(spec.rows * num_sums)]
    for phi in sums:
        phi.add_incoming(constant(I32, 0), entry)
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
    values: list[Value] = []
    for row in range(spec.rows):
        codes = builder.add(a, ir.Constant(I64, row * spec.a_stride))
        values += form.add(builder, spec, codes, step, weights, sums[row * num_sums : (row + 1) * num_sums])
    if spec.prefetch_bytes:
        emit_prefetch(builder, prefetch, step, spec.prefetch_bytes)
    spec.streams.fetch_ahead(builder, [panel for panel, _ in places], step, 4 * spec.vectors * LANES)
    following = builder.add(step, ir.Constant(I64, 1))
    step.add_incoming(following, loop)
    for phi, value in zip(sums, values, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, ir.Constant(I64, spec.depth // 4)), loop, done)

    builder.position_at_end(done)
    _emit_results(builder, spec, form, a, places, values)
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
    builder: Builder,
    spec: DotSpec,
    form: _Pairs | _Planes,
    a: Value,
    places: list[tuple[Value, Value]],
    sums: list[Value],
) -> None:
    remaining = iter(sums)
    for row in range(spec.rows):
        place = builder.add(a, ir.Constant(I64, row * spec.a_stride + 2 * spec.depth))
        row_scale = emit_splat(builder, builder.load(emit_pointer(builder, place, ir.Constant(I64, 0), F32), align=4))
        for panel, c in places:
            scales = builder.add(panel, ir.Constant(I64, panel_weights(spec.depth, spec.vectors * LANES)))
            for v in range(spec.vectors):
                lane = ir.Constant(I64, v * LANES)
                column_scale = builder.load(emit_pointer(builder, scales, lane, F32, VECTOR), align=4)
                behind = ir.Constant(I64, (spec.vectors + v) * LANES)
                correction = builder.load(emit_pointer(builder, scales, behind, I32, INTEGERS), align=4)
                total = form.total(builder, list(islice(remaining, form.num_sums)), correction)
                result = builder.fmul(builder.fmul(builder.sitofp(total, VECTOR), column_scale), row_scale)
                out = emit_pointer(builder, c, ir.Constant(I64, row * spec.c_stride + v * LANES), F32, VECTOR)
                builder.store(result, out, align=4)
