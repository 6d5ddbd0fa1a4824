"""One pool of threads for kernels and GEMMs.

numba's OpenMP layer and torch each bring an OpenMP runtime. Two runtimes keep two teams of spinning threads that fight
for the same cores (measured: up to 20 times slower), so both must end up with one libgomp: it is loaded here, before
torch.
"""

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtcb.errors import UsageError


@dataclass(frozen=True, slots=True)
class ThreadLayer:
    """What kernels run on: ``name`` is ``omp``, ``tbb`` or ``workqueue``; ``note`` says what is not ideal."""

    name: str
    num_threads: int
    note: str


def configure(num_threads: int | None = None) -> ThreadLayer:
    """Choose the threading layer and number of threads; call it at the start, **before torch or numba is imported**.

    ``num_threads`` defaults to the CPUs this process may use, or to fewer if numba was started with fewer. The choice
    is the whole process's (numba and OpenMP allow no other): later, the number can only be lowered, and for the calling
    thread alone. ``UsageError`` if there are fewer CPUs than asked for.

    Sets ``NUMBA_NUM_THREADS`` for this process, and ``GOMP_SPINCOUNT`` unless a wait policy is set: idle threads spin
    for some microseconds, the best compromise between the latency of a small step and a core shared with the server.
    """
    available = len(os.sched_getaffinity(0))
    threads = available if num_threads is None else num_threads
    if not 1 <= threads <= available:
        raise UsageError(f"{threads} threads were asked for, but this process may use 1 to {available} CPUs.")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if "numba" not in sys.modules:
        os.environ["NUMBA_NUM_THREADS"] = str(threads)
    torch_first = "torch" in sys.modules
    import numba

    config: Any = numba.config
    if num_threads is None:
        threads = min(threads, config.NUMBA_NUM_THREADS)
    if threads > config.NUMBA_NUM_THREADS:
        raise UsageError(
            f"{threads} threads were asked for, but numba was started with {config.NUMBA_NUM_THREADS}, by the first "
            "engine of this process or NUMBA_NUM_THREADS: ask for no more, or start another process."
        )
    name, note = _load_layer()
    if torch_first and _num_gomp_runtimes() > 1:
        note = "torch was imported first and brought a second OpenMP runtime; call threads.configure() earlier"
    config.THREADING_LAYER = name
    numba.set_num_threads(threads)
    return ThreadLayer(name, threads, note)


def _load_layer() -> tuple[str, str]:
    if _try_import("omppool"):
        return "omp", ""
    # numba asks for libgomp.so.1.0.0 by that name, so the copy inside torch's wheel cannot stand in
    fallback = "tbb" if _try_import("tbbpool") else "workqueue"
    return fallback, f"libgomp is missing, so kernels use {fallback} threads beside torch's: install libgomp1"


def _try_import(layer: str) -> bool:
    try:
        importlib.import_module(f"numba.np.ufunc.{layer}")
    except ImportError:
        return False
    return True


def _num_gomp_runtimes() -> int:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return 1
    return len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line})
