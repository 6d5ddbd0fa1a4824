"""What kernels are compiled for: the CPU as numba sees it."""

import hashlib
import platform

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


def accumulators() -> int:
    """How many 16-lane fp32 accumulators fit in registers beside the operands of a tile. Speed only, never bits."""
    features = set(_target()[2].split(","))
    if "+avx512f" in features:
        return 24  # of 32 registers
    return 6  # of 8: AVX2 has 16 registers of half a vector, NEON 32 of a quarter


def _target() -> tuple[str, str, str]:
    """Triple, CPU name and feature list: numba's own cache key."""
    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    return str(triple), str(name), str(features)
