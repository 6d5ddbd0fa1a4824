"""``trtcb doctor``: what this machine can build and run, without importing any of it but numba, which knows the CPU."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from trtcb import __version__
from trtcb.cache import cache_root
from trtcb.memory import available_memory, format_size, total_memory

_LIBRARIES = ("numpy", "torch", "numba", "onnx", "tokenizers", "gguf", "aiohttp", "huggingface-hub")
_CPU_TARGET = ("torch", "numba", "onnx")
_GPU_TARGETS = ("cuda", "tensorrt")
# What the kernels can make use of, as Linux names it on x86 and on Arm.
_FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "sve", "bf16", "i8mm"),
)


def doctor() -> None:
    """Show which targets work here, and what of the machine matters to them."""
    print(f"trtcb {__version__}, Python {platform.python_version()} at {sys.executable}")
    print(f"{platform.system()} {platform.release()} {platform.machine()}")
    print("\ntargets")
    for name, state in _targets().items():
        print(f"  {name:<14} {state}")
    print("\nmachine")
    for name, value in _machine().items():
        print(f"  {name:<14} {value}")
    print("\nlibraries")
    for name in _LIBRARIES:
        print(f"  {name:<16} {_version(name) or 'missing'}")
    print("\ncache folders")
    for folder in cache_folders():
        print(f"  {folder}  {format_size(_size(folder)) if folder.is_dir() else 'empty'}")


def cpu_features(cpuinfo: str) -> list[str]:
    """Return the instruction sets of ``/proc/cpuinfo`` that matter here, in order of age."""
    flags: set[str] = set()
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags.update(value.split())
    return [feature for feature in _FEATURES if feature in flags]


def cache_folders() -> list[Path]:
    """Return where trtcb keeps what it can make again: models it fetched, kernels it compiled."""
    return [cache_root()]


def _targets() -> dict[str, str]:
    missing = [name for name in _CPU_TARGET if find_spec(name) is None]
    ready = f"missing {', '.join(missing)}: run {sys.executable} -m pip install --upgrade trtcb" if missing else "works"
    builds = "builds plans, which this version cannot run yet"
    rtx = builds if find_spec("tensorrt_rtx") else f"missing: run {sys.executable} -m pip install 'trtcb[rtx]'"
    return {"cpu": ready, **dict.fromkeys(_GPU_TARGETS, "not in this version"), "tensorrt-rtx": rtx}


def _machine() -> dict[str, str]:
    text = Path("/proc/cpuinfo").read_text(errors="replace")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    usable = len(os.sched_getaffinity(0))
    return {
        "processor": names[0] if names else platform.processor() or "unknown",
        "instructions": " ".join(cpu_features(text)) or "nothing beyond the baseline",
        "matrix unit": _matrix_unit(),
        "cores": f"{usable} usable of {os.cpu_count()}",
        "memory": f"{format_size(available_memory())} available of {format_size(total_memory())}",
    }


def _matrix_unit() -> str:
    if find_spec("numba") is None:
        return "unknown without numba"
    from trtcb.plugins.cpu.matrix_unit import is_usable

    return "AMX, used for products and attention" if is_usable() else "none that can be used"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
