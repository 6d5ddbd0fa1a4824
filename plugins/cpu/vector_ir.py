"""16-lane vectors as LLVM IR: the numba type, how IR becomes a function for jitted code, and loads per stored format.

``simd.py`` builds its vocabulary on this, ``tile.py`` hand-written loops.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import llvmlite.ir as ir
from numba import types
from numba.core.datamodel import models
from numba.core.extending import intrinsic, register_model

LANES = 16
CACHE_LINE = 64

Value = Any  # an llvmlite value
Builder = Any  # llvmlite.ir.IRBuilder
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
VECTOR = ir.VectorType(F32, LANES)
INTEGERS = ir.VectorType(I32, LANES)


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16 = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VECTOR)  # type: ignore[no-untyped-call]


def define(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function for jitted code out of ``emit(builder, *llvm_values)``, which appends IR and returns a value."""

    def wrap(emit: Callable[..., Any]) -> Callable[..., Any]:
        def typing(context: Any, *_: Any) -> Any:
            def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Any:
                value = emit(builder, *values)
                return context.get_dummy_value() if result is types.none else value

            return result(*parameters), codegen

        typing.__name__, typing.__doc__ = emit.__name__, emit.__doc__
        # numba binds the call's arguments to this: the builder's place is taken by the typing context
        typing.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return cast(Callable[..., Any], intrinsic(typing))

    return wrap


# --- building blocks ----- ------------------------------------------------------------------------------------------


def constant(element: Any, value: float, lanes: int = LANES) -> Value:
    """Make a vector constant with every lane equal."""
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def emit_splat(builder: Builder, scalar: Value, lanes: int = LANES) -> Value:
    """Broadcast a scalar to all lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def emit_call(builder: Builder, name: str, *arguments: Value) -> Value:
    """Call an overloaded LLVM intrinsic whose result has the type of its first argument."""
    kind = arguments[0].type
    suffix = "f32" if kind == F32 else f"v{kind.count}f32"
    full_name = f"llvm.{name}.{suffix}"
    callee = builder.module.globals.get(full_name)
    if callee is None:
        callee = ir.Function(builder.module, ir.FunctionType(kind, [a.type for a in arguments]), full_name)
    return builder.call(callee, arguments)


def emit_intrinsic(builder: Builder, name: str, result: Any, arguments: Sequence[Value]) -> Value:
    """Call an LLVM intrinsic by its full name."""
    callee = builder.module.globals.get(name)
    if callee is None:
        callee = ir.Function(builder.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return builder.call(callee, arguments)


def emit_byte_dots(builder: Builder, total: Value, unsigned: Value, signed: Value) -> Value:
    """Add four products of bytes in every lane, of the first without a sign and of the second with one (VNNI)."""
    return emit_intrinsic(builder, "llvm.x86.avx512.vpdpbusd.512", INTEGERS, [total, unsigned, signed])


def define_outlined(symbol: str, num_parameters: int, emit: Callable[..., None]) -> Callable[..., None]:
    """Make a function of int64 parameters for jitted code that exists once in a module, under its own name.

    ``emit(builder, *parameters)`` appends its body and returns from it. It has a register allocation of its own.
    """

    def call(builder: Builder, *values: Value) -> None:
        function = builder.module.globals.get(symbol)
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), [I64] * num_parameters)
            function = ir.Function(builder.module, kind, symbol)
            function.linkage = "internal"
            function.attributes.add("noinline")
            function.attributes.add("nounwind")
            emit(ir.IRBuilder(function.append_basic_block("entry")), *function.args)
        builder.call(function, values)

    names = ("builder", *(f"value{i}" for i in range(num_parameters)))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return define(types.none, *[types.int64] * num_parameters)(call)


class Loop:
    """``with Loop(builder, count) as step:`` emits a loop that runs at least once; ``step`` counts from 0."""

    def __init__(self, builder: Builder, count: int | Value) -> None:
        self._builder = builder
        self._count = ir.Constant(I64, count) if isinstance(count, int) else count

    def __enter__(self) -> Value:
        builder = self._builder
        before, self._body = builder.block, builder.append_basic_block("loop")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self._step = builder.phi(I64)
        self._step.add_incoming(ir.Constant(I64, 0), before)
        return self._step

    def __exit__(self, *_: object) -> None:
        builder = self._builder
        following = builder.add(self._step, ir.Constant(I64, 1))
        self._step.add_incoming(following, builder.block)
        done = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("<", following, self._count), self._body, done)
        builder.position_at_end(done)


def emit_pointer(builder: Builder, address: Value, index: Value, element: Any, pointee: Any = None) -> Value:
    """Pointer to element ``index`` after ``address``, typed for ``pointee`` (the element itself by default)."""
    pointer = builder.gep(builder.inttoptr(address, element.as_pointer()), [index])
    return pointer if pointee is None else builder.bitcast(pointer, pointee.as_pointer())


def emit_prefetch(builder: Builder, address: Value, step: Value, num_bytes: int, *, nearest: bool = True) -> None:
    """Fetch the ``step``-th ``num_bytes`` from ``address`` on: for reading, into all cache levels.

    Or into all but the ``nearest``, for what is used some microseconds later.
    """
    base = builder.mul(step, ir.Constant(I64, num_bytes))
    name = "llvm.prefetch.p0"
    for line in range(0, num_bytes, CACHE_LINE):
        callee = builder.module.globals.get(name)
        if callee is None:
            kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
            callee = ir.Function(builder.module, kind, name)
        pointer = emit_pointer(builder, address, builder.add(base, ir.Constant(I64, line)), I8)
        builder.call(callee, [pointer, ir.Constant(I32, 0), ir.Constant(I32, 3 if nearest else 1), ir.Constant(I32, 1)])


def _load_raw(builder: Builder, address: Value, index: Value, element: Any, size: int) -> Value:
    pointer = emit_pointer(builder, address, index, element, ir.VectorType(element, LANES))
    return builder.load(pointer, align=size)


# --- loads: 16 stored elements to fp32, exactly ----------------------------------------------------------------------


def emit_load_f32(builder: Builder, address: Value, index: Value) -> Value:
    """fp32 as it is."""
    return _load_raw(builder, address, index, F32, 4)


def emit_load_bf16(builder: Builder, address: Value, index: Value) -> Value:
    """bf16: the upper half of an fp32."""
    bits = builder.zext(_load_raw(builder, address, index, I16, 2), INTEGERS)
    return builder.bitcast(builder.shl(bits, constant(I32, 16)), VECTOR)


def emit_load_f16(builder: Builder, address: Value, index: Value) -> Value:
    """fp16, subnormals included."""
    return builder.fpext(_load_raw(builder, address, index, F16, 2), VECTOR)


def emit_load_i8(builder: Builder, address: Value, index: Value) -> Value:
    """Signed bytes as numbers."""
    return builder.sitofp(builder.sext(_load_raw(builder, address, index, I8, 1), INTEGERS), VECTOR)


E4M3_SCALE = 256.0
"""Factor between an e4m3 number and what ``emit_load_e4m3_scaled`` makes of it."""


def emit_load_e4m3_scaled(builder: Builder, address: Value, index: Value) -> Value:
    """e4m3fn bytes as numbers over 256: shifted into an fp16 the exponent is 8 too low, and nothing else is lost.

    Even e4m3's subnormals stay exact and become normal fp32. The two NaN codes read as +-480; nothing here writes them.
    """
    wide = builder.sext(_load_raw(builder, address, index, I8, 1), ir.VectorType(I16, LANES))
    # sign-extension keeps bit 15; of the rest only the seven magnitude bits, moved up by 7, may stay
    half = builder.and_(builder.shl(wide, constant(I16, 7)), constant(I16, -0x4080))
    return builder.fpext(builder.bitcast(half, ir.VectorType(F16, LANES)), VECTOR)


def emit_load_e4m3(builder: Builder, address: Value, index: Value) -> Value:
    """e4m3fn bytes as numbers."""
    return builder.fmul(emit_load_e4m3_scaled(builder, address, index), constant(F32, E4M3_SCALE))


ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1, "fp8/256": 1}
EMIT_LOAD: dict[str, Callable[[Builder, Value, Value], Value]] = {
    "fp32": emit_load_f32,
    "bf16": emit_load_bf16,
    "fp16": emit_load_f16,
    "int8": emit_load_i8,
    "fp8": emit_load_e4m3,
    "fp8/256": emit_load_e4m3_scaled,
}
"""Loads by format name; the last leaves a power of two to whoever applies the scale anyway."""
