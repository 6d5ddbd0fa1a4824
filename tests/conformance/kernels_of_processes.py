"""Computes products and attention with kernels named on the command line, and prints whether they are right.

Run by one process after the other, each finds in the cache what those before it compiled.
"""

import sys

import numpy as np

from tests.conformance.ragged_batch import RaggedBatch, config
from trtcb.plugins.cpu import quantized
from trtcb.plugins.cpu.kernels import load_kernels
from trtcb.plugins.cpu.linear import PackedLinear
from trtcb.plugins.cpu.quantizer import Quantizer


def product_is_exact(width: int, depth: int) -> bool:
    """Whether an int8 product of 20 rows of ones has the right sums."""
    rng = np.random.default_rng(0)
    weight, scale = quantized.quantize(quantized.rotate(rng.normal(size=(width, depth)).astype(np.float32)))
    x = rng.normal(size=(20, depth)).astype(np.float32)
    rows, out = np.zeros((20, quantized.row_bytes(depth)), np.uint8), np.zeros((20, width), np.float32)
    Quantizer(depth).quantize(x.ctypes.data, rows.ctypes.data, 20)
    PackedLinear(weight, scale).multiply(rows.ctypes.data, out.ctypes.data, 20)
    expected = quantized.rotate(x) @ (weight * scale[:, None]).T
    return bool(np.abs(out - expected).max() < 0.01 * np.abs(expected).max())


def attention_is_close(kv: str) -> bool:
    """Whether attention over pools of a format is near the reference."""
    batch = RaggedBatch.make(config(kv, heads=9, kv_heads=3, dim=64, block_size=32), [(0, 40), (300, 1)])
    expected = batch.expected()
    return bool(np.abs(batch.run(load_kernels(batch.config)) - expected).max() < 3e-3 * np.abs(expected).max())


for name in sys.argv[1:]:
    print(product_is_exact(*map(int, name.split("x"))) if "x" in name else attention_is_close(name))
