"""What this machine can do at most: the limits that a step is measured against."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Bytes a second of a parallel read from memory, and fp32 operations a second in fused multiply-adds."""

    read_bytes_per_s: float
    flops: float

    def __str__(self) -> str:
        return f"{self.read_bytes_per_s / 1e9:.1f} GB/s read, {self.flops / 1e9:.1f} GFLOP/s in fp32 multiply-adds"


def read_bandwidth(num_bytes: int = 1 << 30, rounds: int = 5) -> float:
    """Bytes per second of a parallel read of memory that no cache holds; the best of ``rounds``."""
    from numba import njit, prange

    @njit(parallel=True, fastmath=True)
    def total(x: Any) -> Any:
        sums = np.zeros(256)
        size = len(x) // 1024
        for part in prange(256):  # four streams each, for the prefetchers
            chunk = x[4 * part * size : 4 * (part + 1) * size]
            a, b, c, d = chunk[:size], chunk[size : 2 * size], chunk[2 * size : 3 * size], chunk[3 * size :]
            sum_a = sum_b = sum_c = sum_d = np.float32(0)
            for i in range(size):
                sum_a += a[i]
                sum_b += b[i]
                sum_c += c[i]
                sum_d += d[i]
            sums[part] = sum_a + sum_b + sum_c + sum_d
        return sums.sum()

    data = np.ones(num_bytes // 4, np.float32)
    total(data[:1024])
    best = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        total(data)
        best = max(best, num_bytes / (time.perf_counter() - start))
    return best
