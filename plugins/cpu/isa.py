"""What kernels are compiled for: the CPU as numba sees it."""

import hashlib
import platform
from functools import cache

from numba.core.registry import cpu_target

from trtcb.errors import TargetUnavailableError


def isa_fingerprint() -> dict[str, str]:
    """CPU model and features that compiled code depends on, as short strings for a plan header or a cache key."""
    _, name, features = _target()
    digest = hashlib.sha256(features.encode()).hexdigest()[:16]
    return {"arch": platform.machine(), "cpu": name, "features": digest}


def check_supported() -> None:
    """Raise ``TargetUnavailableError`` on an x86 CPU without the instructions that fp16 and fused products need."""
    features = set(_target()[2].split(","))
    missing = [name for name in ("avx2", "fma", "f16c") if f"+{name}" not in features]
    if platform.machine() == "x86_64" and missing:
        raise TargetUnavailableError(
            f"The cpu target needs an x86 CPU with AVX2, FMA and F16C; this one lacks {', '.join(missing)}."
        )


def has_feature(name: str) -> bool:
    """Whether the CPU has an instruction set, under LLVM's name."""
    return f"+{name}" in _target()[2].split(",")


def multiplies_bytes() -> bool:
    """Whether 64 bytes without a sign are multiplied by ones with it, and added up in fours, at once.

    Rows for int8 weights are planes of bytes then (``quantized.py``). Speed only, never bits.
    """
    return has_feature("avx512f") and has_feature("avx512vnni")


def multiplies_bf16_pairs() -> bool:
    """Whether bf16 is multiplied in pairs, and bf16 rows are faster than fp32 ones."""
    return has_feature("avx512bf16")


def accumulators() -> int:
    """How many 16-lane fp32 accumulators fit in registers beside the operands of a tile. Speed only, never bits."""
    if has_feature("avx512f"):
        return 24  # of 32 registers
    return 6  # of 8: AVX2 has 16 registers of half a vector, NEON 32 of a quarter


def panel_columns(weights: str) -> int:
    """Columns of a panel of packed weights: enough accumulators to hide the latency of a single row's additions."""
    if weights == "int8":  # whole numbers are added at once
        return 32 if has_feature("avx512f") else 16
    if weights == "int4":
        return 16
    if weights == "bf16_pairs":
        return 32
    return 64 if has_feature("avx512f") else 32


def product_tile(weights: str) -> tuple[int, int]:
    """Rows and 16-lane vectors of the largest tile of a product: what registers hold. Speed only, never bits."""
    if weights == "int8":
        if multiplies_bytes():
            return (6, 2)  # two accumulators each
        return (8, 2) if has_feature("avx512f") else (4, 1)
    if weights == "int4":
        return (12, 1) if multiplies_bytes() else (4, 1)
    if weights == "bf16_pairs":
        return (12, 2)
    return (6, 4) if has_feature("avx512f") else (6, 1)


@cache  # LLVM takes milliseconds to tell, and every kernel asks
def _target() -> tuple[str, str, str]:
    """Triple, CPU name and feature list: numba's own cache key."""
    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    return str(triple), str(name), str(features)
