"""The matrix unit of some x86 processors (Intel AMX): eight tile registers of up to 16 rows of 64 bytes.

A product adds to a tile C of ``rows x 16`` 32-bit numbers: A has ``rows`` rows of 64 bytes along the depth, B 16 rows,
each with 4 bytes of the depth for 16 columns. Two kinds: 32 pairs of bf16 into fp32, and 64 bytes, of A without and of
B with a sign, into whole numbers that wrap around. A row of C depends on that row of A and on B alone.

Sums of bf16 round once a pair and once a tile (Intel's Architecture Instruction Set Extensions reference, TDPBF16PS):
other bits than fused multiply-adds give, but always the same ones. Denormal numbers count as zero.

The operating system keeps the registers' contents from a process until it asks for them, once (Linux:
``arch_prctl(ARCH_REQ_XCOMP_PERM)``, Documentation/arch/x86/xstate.rst).
"""

import ctypes
import platform
import sys
from functools import cache

import llvmlite.ir as ir
from numba import types

from trtcb.plugins.cpu.isa import has_feature
from trtcb.plugins.cpu.simd import jit, stack, write_i64
from trtcb.plugins.cpu.vector_ir import I8, I64, Builder, Value, define, emit_intrinsic

ROWS = 16  # of a tile, at most
ROW_BYTES = 64
TILE_BYTES = ROWS * ROW_BYTES
COLUMNS = 16  # of C and B

C_TILES = (0, 1, 2, 3)
A_TILES = (4, 5)
B_TILES = (6, 7)
"""How this project uses the registers: those of A and C have as many rows as :func:`enter` was told, of B all."""

_ARCH_PRCTL = 158  # of x86_64
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18


@cache
def is_usable() -> bool:
    """Whether the processor has the unit with bf16 and int8, and the system lets this process use it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if not all(map(has_feature, ("amx-tile", "amx-bf16", "amx-int8", "avx512f"))):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


# --- in jitted code: what surrounds the use of tiles -----------------------------------------------------------------


@define(types.none, types.int64)
def _load_configuration(builder: Builder, address: Value) -> None:
    _call(builder, "ldtilecfg", builder.inttoptr(address, I8.as_pointer()))


@define(types.none, types.int64)
def _store_configuration(builder: Builder, address: Value) -> None:
    _call(builder, "sttilecfg", builder.inttoptr(address, I8.as_pointer()))


_configuration = stack(64)


@jit
def enter(saved: int, rows: int) -> None:
    """Configure this thread's tiles, those of A and C with ``rows`` rows; 64 bytes at ``saved`` get what was before.

    Other libraries on the same thread count on finding their own configuration again, so :func:`leave` restores it.
    """
    _store_configuration(saved)
    configure(rows)


@jit
def configure(rows: int) -> None:
    """Change the number of rows of A and C; what tiles hold is lost. Only after :func:`enter`."""
    configuration = _configuration()
    write_i64(configuration, 0, 1)  # palette
    write_i64(configuration, 1, 0)
    write_i64(configuration, 2, 0x0040_0040_0040_0040)  # bytes of a row, 16 bits a tile
    write_i64(configuration, 3, 0x0040_0040_0040_0040)
    write_i64(configuration, 4, 0)
    write_i64(configuration, 5, 0)
    write_i64(configuration, 6, rows * 0x0101_0101_0101 + (0x1010 << 48))  # rows, 8 bits a tile
    write_i64(configuration, 7, 0)
    _load_configuration(configuration)


@jit
def leave(saved: int) -> None:
    """Give the tiles back as they were configured before :func:`enter`."""
    _load_configuration(saved)


saved_configuration = stack(64)
"""Room on the caller's stack for :func:`enter`."""


# --- in LLVM IR: what is done with tiles, between enter and leave, within one function --------------------------------


def emit_zero(builder: Builder, tile: int) -> None:
    """Clear a tile."""
    _call(builder, "tilezero", ir.Constant(I8, tile))


def emit_load(builder: Builder, tile: int, address: Value, stride: Value) -> None:
    """Load a tile's rows, ``stride`` bytes apart."""
    _call(builder, "tileloadd64", ir.Constant(I8, tile), builder.inttoptr(address, I8.as_pointer()), stride)


def emit_store(builder: Builder, tile: int, address: Value, stride: Value) -> None:
    """Store a tile's rows, ``stride`` bytes apart."""
    _call(builder, "tilestored64", ir.Constant(I8, tile), builder.inttoptr(address, I8.as_pointer()), stride)


def emit_bf16_product(builder: Builder, c: int, a: int, b: int) -> None:
    """``C += A @ B`` in bf16 with fp32 sums; B has pairs of bf16 along the depth."""
    _call(builder, "tdpbf16ps", *(ir.Constant(I8, tile) for tile in (c, a, b)))


def emit_byte_product(builder: Builder, c: int, a: int, b: int) -> None:
    """``C += A @ B`` with unsigned bytes in A and signed ones in B; B has fours of bytes along the depth."""
    _call(builder, "tdpbusd", *(ir.Constant(I8, tile) for tile in (c, a, b)))


def _call(builder: Builder, name: str, *arguments: Value) -> None:
    emit_intrinsic(builder, f"llvm.x86.{name}", ir.VoidType(), arguments)


def emit_number(number: int) -> Value:
    """A constant stride or offset."""
    return ir.Constant(I64, number)
