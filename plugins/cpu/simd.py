"""A small vector language for numba: 16 fp32 lanes as plain LLVM vector IR, no target intrinsics, no inline assembly.

LLVM legalises a 16-lane vector to whatever the CPU has (one AVX-512 register, two AVX2, four NEON or SSE), always with
the same bits: nothing here may be reassociated, contracted or approximated. Memory is addressed by an int64 address and
an index that counts elements of the stored format. No alignment is needed beyond the element's.

Groups: loads and stores per format, arithmetic, lanes and reductions, scalars, threads and calls.
"""

import platform
from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar, cast

import llvmlite.ir as ir
from numba import njit, types

from trtcb.plugins.cpu.vector_ir import (
    F16,
    F32,
    F64,
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
    define,
    emit_call,
    emit_load_bf16,
    emit_load_e4m3,
    emit_load_f16,
    emit_load_f32,
    emit_load_i8,
    emit_pointer,
    emit_splat,
    f32x16,
)

Vector = Any  # a vector inside jitted code
Real = Any  # an fp32 or fp64 scalar inside jitted code
Function = TypeVar("Function", bound=Callable[..., Any])


class JitOptions(TypedDict):
    """The options of numba that this project sets."""

    nogil: bool
    error_model: Literal["numpy"]
    fastmath: bool


JIT_OPTIONS: JitOptions = {"nogil": True, "error_model": "numpy", "fastmath": False}
"""Numba options of every kernel. Fast-math would reorder sums, and with them the bits of a row."""


def jit(function: Function) -> Function:
    """``numba.njit`` with this project's options, keeping the function's type for the type checker.

    For functions that exist once, or are made in a kernel's source (``kernel_*.py``: each specialisation is a module of
    its own); others need :func:`jit_for`.
    """
    package, _, module = function.__module__.rpartition(".")
    if "<locals>" in function.__qualname__ and package == __package__ and not module.startswith("kernel_"):
        raise TypeError(f"{function.__qualname__} is made for several kernels: decorate it with jit_for(owner)")
    return cast(Function, njit(**JIT_OPTIONS)(function))


def jit_for(owner: str) -> Callable[[Function], Function]:
    """:func:`jit` for what a shared module makes anew for each specialisation; ``owner`` is that module's ``__name__``.

    numba names machine code after a function's module and name, and a counter of the process that compiled it. Of
    kernels that were compiled by several processes and are loaded by one, the first would lend its code to the others.
    """

    def decorate(function: Function) -> Function:
        function.__qualname__ = f"{owner}.{function.__qualname__}"
        return cast(Function, njit(**JIT_OPTIONS)(function))

    return decorate


# --- loads: 16 stored elements to fp32, exactly ----------------------------------------------------------------------

load_f32 = define(f32x16, types.int64, types.int64)(emit_load_f32)
load_bf16 = define(f32x16, types.int64, types.int64)(emit_load_bf16)
load_f16 = define(f32x16, types.int64, types.int64)(emit_load_f16)
load_i8 = define(f32x16, types.int64, types.int64)(emit_load_i8)
load_e4m3 = define(f32x16, types.int64, types.int64)(emit_load_e4m3)


# --- stores: round to nearest, ties to even --------------------------------------------------------------------------


def _store_raw(builder: Builder, address: Value, index: Value, value: Value, size: int) -> None:
    builder.store(value, emit_pointer(builder, address, index, value.type.element, value.type), align=size)


def _select_nan(builder: Builder, x: Value, if_nan: Value, otherwise: Value) -> Value:
    return builder.select(builder.fcmp_unordered("uno", x, x), if_nan, otherwise)


@define(types.none, types.int64, types.int64, f32x16)
def store_f32(builder: Builder, address: Value, index: Value, x: Value) -> None:
    """fp32 as it is."""
    _store_raw(builder, address, index, x, 4)


@define(types.none, types.int64, types.int64, f32x16)
def store_bf16(builder: Builder, address: Value, index: Value, x: Value) -> None:
    """bf16; overflow goes to infinity, NaN stays NaN."""
    bits = builder.bitcast(x, INTEGERS)
    odd = builder.and_(builder.lshr(bits, constant(I32, 16)), constant(I32, 1))
    rounded = builder.add(bits, builder.add(odd, constant(I32, 0x7FFF)))
    quiet = builder.or_(bits, constant(I32, 0x400000))
    high = builder.lshr(_select_nan(builder, x, quiet, rounded), constant(I32, 16))
    _store_raw(builder, address, index, builder.trunc(high, ir.VectorType(I16, LANES)), 2)


@define(types.none, types.int64, types.int64, f32x16)
def store_f16(builder: Builder, address: Value, index: Value, x: Value) -> None:
    """fp16; overflow goes to infinity, NaN stays NaN."""
    _store_raw(builder, address, index, builder.fptrunc(x, ir.VectorType(F16, LANES)), 2)


@define(types.none, types.int64, types.int64, f32x16)
def store_i8(builder: Builder, address: Value, index: Value, x: Value) -> None:
    """Signed bytes, saturating at +-127; ``x`` must not be NaN."""
    limited = _clamp(builder, x, 127.0)
    integers = builder.fptosi(emit_call(builder, "rint", limited), INTEGERS)
    _store_raw(builder, address, index, builder.trunc(integers, ir.VectorType(I8, LANES)), 1)


@define(types.none, types.int64, types.int64, f32x16)
def store_e4m3(builder: Builder, address: Value, index: Value, x: Value) -> None:
    """e4m3fn bytes, saturating at +-448; ``x`` must not be NaN.

    Normal numbers round in the integer domain: add half of the last kept place, drop 20 bits, move the exponent bias
    from 127 to 7. Subnormals (below 2**-6) are multiples of 2**-9, the last place of 2**14: one addition rounds them.
    """
    bits = builder.bitcast(x, INTEGERS)
    sign = builder.and_(builder.lshr(bits, constant(I32, 24)), constant(I32, 0x80))
    magnitude = emit_call(builder, "fabs", x)
    magnitude = builder.select(
        builder.fcmp_ordered("<", magnitude, constant(F32, 448.0)), magnitude, constant(F32, 448.0)
    )
    bits = builder.bitcast(magnitude, INTEGERS)
    odd = builder.and_(builder.lshr(bits, constant(I32, 20)), constant(I32, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(I32, 0x7FFFF))), constant(I32, 20))
    normal = builder.sub(rounded, constant(I32, (127 - 7) << 3))
    shifted = builder.bitcast(builder.fadd(magnitude, constant(F32, 2.0**14)), INTEGERS)
    subnormal = builder.sub(shifted, constant(I32, (127 + 14) << 23))
    small = builder.fcmp_ordered("<", magnitude, constant(F32, 2.0**-6))
    code = builder.or_(builder.select(small, subnormal, normal), sign)
    _store_raw(builder, address, index, builder.trunc(code, ir.VectorType(I8, LANES)), 1)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def _clamp(builder: Builder, x: Value, limit: float) -> Value:
    upper, lower = constant(F32, limit), constant(F32, -limit)
    x = builder.select(builder.fcmp_ordered(">", x, upper), upper, x)
    return builder.select(builder.fcmp_ordered("<", x, lower), lower, x)


@define(f32x16, types.float32)
def splat(builder: Builder, x: Value) -> Value:
    """All lanes equal to a scalar."""
    return emit_splat(builder, x)


@define(f32x16, f32x16, f32x16)
def add(builder: Builder, x: Value, y: Value) -> Value:
    """Lane-wise ``x + y``."""
    return builder.fadd(x, y)


@define(f32x16, f32x16, f32x16)
def sub(builder: Builder, x: Value, y: Value) -> Value:
    """Lane-wise ``x - y``."""
    return builder.fsub(x, y)


@define(f32x16, f32x16, f32x16)
def mul(builder: Builder, x: Value, y: Value) -> Value:
    """Lane-wise ``x * y``."""
    return builder.fmul(x, y)


@define(f32x16, f32x16, f32x16)
def div(builder: Builder, x: Value, y: Value) -> Value:
    """Lane-wise ``x / y``, correctly rounded."""
    return builder.fdiv(x, y)


@define(f32x16, f32x16)
def reciprocal(builder: Builder, x: Value) -> Value:
    """Lane-wise ``1 / x``, correctly rounded, but 0 for 0."""
    zero = constant(F32, 0.0)
    return builder.select(builder.fcmp_unordered("une", x, zero), builder.fdiv(constant(F32, 1.0), x), zero)


@define(f32x16, f32x16, f32x16, f32x16)
def fma(builder: Builder, x: Value, y: Value, z: Value) -> Value:
    """Lane-wise ``x * y + z``, rounded once."""
    return emit_call(builder, "fma", x, y, z)


@define(f32x16, f32x16, f32x16)
def maximum(builder: Builder, x: Value, y: Value) -> Value:
    """Lane-wise maximum; ``y`` where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@define(f32x16, f32x16, f32x16)
def minimum(builder: Builder, x: Value, y: Value) -> Value:
    """Lane-wise minimum; ``y`` where either is NaN."""
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


@define(f32x16, f32x16)
def absolute(builder: Builder, x: Value) -> Value:
    """Lane-wise magnitude."""
    return emit_call(builder, "fabs", x)


@define(f32x16, f32x16, types.float32)
def finite(builder: Builder, x: Value, limit: Value) -> Value:
    """NaN becomes 0, everything else is held within ``+-limit``."""
    upper = emit_splat(builder, limit)
    lower = builder.fneg(upper)
    x = _select_nan(builder, x, constant(F32, 0.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, upper), upper, x)
    return builder.select(builder.fcmp_ordered("<", x, lower), lower, x)


@define(f32x16, f32x16)
def exp(builder: Builder, x: Value) -> Value:
    """``e ** x`` for ``x <= 88`` within 2 units in the last place; 0 below -87.3, infinite above 88.4, NaN kept.

    Cephes' scheme: ``x = n * ln 2 + r`` with ln 2 in two pieces, a polynomial for ``r``, and ``n`` put into the
    exponent. Adding 1.5 * 2**23 rounds to an integer and leaves that integer in the low bits.
    """
    magic = constant(F32, 12582912.0)
    below = builder.fcmp_ordered("<", x, constant(F32, -87.33))
    y = builder.select(below, constant(F32, -87.33), x)
    y = builder.select(builder.fcmp_ordered(">", y, constant(F32, 89.0)), constant(F32, 89.0), y)
    shifted = emit_call(builder, "fma", y, constant(F32, 1.4426950216293335), magic)
    n = builder.fsub(shifted, magic)
    r = emit_call(builder, "fma", n, constant(F32, -0.693359375), y)
    r = emit_call(builder, "fma", n, constant(F32, 0.00021219444170128554), r)
    p = constant(F32, 0.00019875691214110702)
    for coefficient in (
        0.0013981999363750219,
        0.008333452045917511,
        0.04166579619050026,
        0.16666665673255920,
        0.5,
        1.0,
        1.0,
    ):
        p = emit_call(builder, "fma", p, r, constant(F32, coefficient))
    exponent = builder.add(builder.bitcast(shifted, INTEGERS), constant(I32, 127))
    scale = builder.bitcast(builder.shl(exponent, constant(I32, 23)), VECTOR)
    return builder.select(below, constant(F32, 0.0), builder.fmul(p, scale))


@define(f32x16, f32x16)
def exp_weight(builder: Builder, x: Value) -> Value:
    """``e ** x`` for ``x <= 0``, the weight of a softmax, within 2e-7; 0 below -87, NaN kept.

    ``2 ** (n + r)`` with ``|r|`` up to 1/2 and a minimax polynomial that is 1 at 0: fewer operations than :func:`exp`.
    What rounding ``log2 e`` costs grows with ``-x``, but ``e ** x`` shrinks faster. ``magic`` rounds to an integer, and
    leaves the exponent of the result in the low bits of ``shifted``.
    """
    magic = constant(F32, 12582912.0 + 127)
    below = builder.fcmp_ordered("<", x, constant(F32, -87.0))
    y = builder.select(below, constant(F32, -87.0), x)
    log2_e = constant(F32, 1.4426950408889634)
    shifted = emit_call(builder, "fma", y, log2_e, magic)
    r = emit_call(builder, "fma", y, log2_e, builder.fsub(magic, shifted))
    p = constant(F32, 0.001326472731307149)
    for coefficient in (0.009671512991189957, 0.05550733581185341, 0.24022242426872253, 0.6931470036506653, 1.0):
        p = emit_call(builder, "fma", p, r, constant(F32, coefficient))
    scale = builder.bitcast(builder.shl(builder.bitcast(shifted, INTEGERS), constant(I32, 23)), VECTOR)
    return builder.select(below, constant(F32, 0.0), builder.fmul(p, scale))


# --- lanes and reductions: one fixed order ---------------------------------------------------------------------------


@define(f32x16, f32x16, types.int64, types.float32)
def first_lanes(builder: Builder, x: Value, count: Value, fill: Value) -> Value:
    """Lanes at or beyond ``count`` (which may be negative) replaced by ``fill``."""
    lane = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
    return builder.select(builder.icmp_signed("<", lane, emit_splat(builder, count)), x, emit_splat(builder, fill))


def _reduce(builder: Builder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    lanes = LANES
    while lanes > 1:
        half = lanes // 2
        undefined = ir.Constant(x.type, ir.Undefined)
        index = ir.VectorType(I32, half)
        low = builder.shuffle_vector(x, undefined, ir.Constant(index, list(range(half))))
        high = builder.shuffle_vector(x, undefined, ir.Constant(index, list(range(half, lanes))))
        x, lanes = combine(low, high), half
    return builder.extract_element(x, ir.Constant(I32, 0))


@define(types.float32, f32x16)
def sum_lanes(builder: Builder, x: Value) -> Value:
    """Sum of the lanes: the upper half is added to the lower one until one is left."""
    return _reduce(builder, x, builder.fadd)


@define(types.float32, f32x16)
def max_lanes(builder: Builder, x: Value) -> Value:
    """Largest lane; NaN lanes are not reliable."""
    return _reduce(builder, x, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@define(types.boolean, f32x16, types.float32)
def any_at_least(builder: Builder, x: Value, bound: Value) -> Value:
    """Whether some lane is at least ``bound``."""
    mask = builder.fcmp_ordered(">=", x, emit_splat(builder, bound))
    bits = builder.bitcast(mask, ir.IntType(LANES))
    return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))


# --- scalars ---------------------------------------------------------------------------------------------------------


def _reader(kind: Any, result: Any, widen: Callable[[Builder, Value], Value]) -> Callable[..., Any]:
    def read(builder: Builder, address: Value, index: Value) -> Value:
        return widen(builder, builder.load(emit_pointer(builder, address, index, kind)))

    return define(result, types.int64, types.int64)(read)


def _writer(kind: Any, parameter: Any, narrow: Callable[[Builder, Value], Value]) -> Callable[..., Any]:
    def write(builder: Builder, address: Value, index: Value, x: Value) -> None:
        builder.store(narrow(builder, x), emit_pointer(builder, address, index, kind))

    return define(types.none, types.int64, types.int64, parameter)(write)


read_f32: Callable[[int, int], Real] = _reader(F32, types.float32, lambda builder, x: x)
read_f64: Callable[[int, int], Real] = _reader(F64, types.float64, lambda builder, x: x)
read_f16: Callable[[int, int], Real] = _reader(F16, types.float32, lambda builder, x: builder.fpext(x, F32))
read_i64: Callable[[int, int], int] = _reader(I64, types.int64, lambda builder, x: x)
read_i32: Callable[[int, int], int] = _reader(I32, types.int64, lambda builder, x: builder.sext(x, I64))
read_u32: Callable[[int, int], int] = _reader(I32, types.int64, lambda builder, x: builder.zext(x, I64))
read_u16: Callable[[int, int], int] = _reader(I16, types.int64, lambda builder, x: builder.zext(x, I64))
read_u8: Callable[[int, int], int] = _reader(I8, types.int64, lambda builder, x: builder.zext(x, I64))


@define(types.float64, types.int64)
def as_float(builder: Builder, bits: Value) -> Value:
    """Take bits as a float64: how a number travels in an argument block."""
    return builder.bitcast(bits, F64)


write_f32 = _writer(F32, types.float32, lambda builder, x: x)
write_f64 = _writer(F64, types.float64, lambda builder, x: x)
write_f16 = _writer(F16, types.float32, lambda builder, x: builder.fptrunc(x, F16))
write_i64 = _writer(I64, types.int64, lambda builder, x: x)
write_i32 = _writer(I32, types.int64, lambda builder, x: builder.trunc(x, I32))
write_u16 = _writer(I16, types.int64, lambda builder, x: builder.trunc(x, I16))
write_u8 = _writer(I8, types.int64, lambda builder, x: builder.trunc(x, I8))


# --- threads and calls -----------------------------------------------------------------------------------------------


@define(types.int64, types.int64, types.int64)
def fetch_add(builder: Builder, address: Value, amount: Value) -> Value:
    """Atomically add to the int64 at ``address`` and return what it was: how threads claim work items."""
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), amount, "acq_rel")


@define(types.int64, types.int64, types.int64)
def fetch_max(builder: Builder, address: Value, number: Value) -> Value:
    """Atomically raise the int64 at ``address`` to ``number``, if it is below that, and return what it was."""
    return builder.atomic_rmw("max", builder.inttoptr(address, I64.as_pointer()), number, "acq_rel")


@define(types.int64, types.int64)
def load_acquire(builder: Builder, address: Value) -> Value:
    """The int64 at ``address``: what its writer wrote before it is visible after this."""
    return builder.load_atomic(builder.inttoptr(address, I64.as_pointer()), "acquire", align=8)


@define(types.none)
def pause(builder: Builder) -> None:
    """Tell the CPU that this is a loop that waits."""
    name, arguments = {
        "x86_64": ("llvm.x86.sse2.pause", []),
        "AMD64": ("llvm.x86.sse2.pause", []),
        "aarch64": ("llvm.aarch64.hint", [ir.Constant(I32, 1)]),
        "arm64": ("llvm.aarch64.hint", [ir.Constant(I32, 1)]),
    }.get(platform.machine(), ("", []))
    if name:
        callee = builder.module.globals.get(name)
        if callee is None:
            callee = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [a.type for a in arguments]), name)
        builder.call(callee, arguments)


def stack(num_bytes: int) -> Callable[[], int]:
    """Make a function that returns the address of ``num_bytes`` of its caller's stack, 64-byte aligned."""

    def allocate(builder: Builder) -> Value:
        with builder.goto_entry_block():
            block = builder.alloca(ir.ArrayType(I8, num_bytes))
            block.align = 64
        return builder.ptrtoint(block, I64)

    return define(types.int64)(allocate)


@define(types.none, types.int64, types.int64, types.int64, types.int64)
def call_kernel(builder: Builder, function: Value, arguments: Value, part: Value, parts: Value) -> None:
    """Call the C function ``void (int64 arguments, int64 part, int64 parts)`` at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [arguments, part, parts])
