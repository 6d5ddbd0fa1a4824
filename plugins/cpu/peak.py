"""How fast this CPU multiplies: the limit that products are measured against."""

import time

import numba
import numpy as np

from trtcb.plugins.cpu.isa import accumulators
from trtcb.plugins.cpu.specialize import compile_kernels, compile_launcher
from trtcb.plugins.cpu.vector_ir import LANES

_ROUNDS = 200_000


def peak_flops(repeats: int = 200) -> float:
    """Fp32 operations a second of all threads in fused multiply-adds between registers; the best of ``repeats``.

    A multiply-add is two operations. Call ``threads.configure`` first. Whole numbers of 8 bits may be faster.
    """
    chains, num_threads = accumulators(), numba.get_num_threads()
    kernel, launch = compile_kernels("kernel_peak", {"CHAINS": chains})["multiply"], compile_launcher()
    factors, results = np.full(LANES, 0.5, np.float32), np.zeros((num_threads, LANES), np.float32)
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        launch(kernel.address, num_threads, factors.ctypes.data, _ROUNDS, results.ctypes.data, *(0,) * 9)
        best = max(best, 2 * num_threads * _ROUNDS * chains * LANES / (time.perf_counter() - began))
    return best
