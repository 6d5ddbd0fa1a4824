"""Sampling as it is meant, with a sort: the kernel is tested against this."""

from dataclasses import dataclass

import numpy as np

MASK = 0xFFFFFFFF


def philox(counter: int, key: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 of a 128-bit counter and a 64-bit key; four 32-bit words."""
    c = [(counter >> shift) & MASK for shift in (0, 32, 64, 96)]
    k = [key & MASK, key >> 32 & MASK]
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [high >> 32 ^ c[1] ^ k[0], high & MASK, low >> 32 ^ c[3] ^ k[1], low & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c[0], c[1], c[2], c[3]


def uniform(seed: int, position: int) -> float:
    first, second, _, _ = philox(position, seed)
    return ((first >> 5 << 26) | (second >> 6)) / 2**53


def probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution a row is drawn from: temperature, then the filters one after the other, ties kept."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    if 0 < top_k < len(p):
        p[logits < np.sort(logits)[-top_k]] = 0
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-logits, kind="stable")
        reached = np.flatnonzero(np.cumsum(p[order]) >= top_p)
        last = logits[order[reached[0] if len(reached) else -1]]
        p[logits < last] = 0
        p /= p.sum()
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@dataclass(frozen=True)
class Rows:
    """Settings of ``num_rows`` rows, scalars repeated."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    position: np.ndarray

    @staticmethod
    def of(num_rows: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0) -> "Rows":
        def full(value, dtype):
            return np.ascontiguousarray(np.broadcast_to(np.asarray(value, dtype), (num_rows,)))

        return Rows(
            full(temperature, np.float32),
            full(top_k, np.int32),
            full(top_p, np.float32),
            full(min_p, np.float32),
            full(seed, np.uint64),
            full(position, np.int32),
        )

    def take(self, rows) -> "Rows":
        return Rows(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))
