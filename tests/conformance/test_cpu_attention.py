"""Paged attention of the CPU target against the numpy reference, and its law: a row's bits depend on its own inputs alone."""

import numpy as np
import pytest

from tests.conformance.conftest import RaggedBatch, attend, config
from trtcb.plugins.cpu.pools import from_portable

SHAPES = [
    ("fp32", 3, 3, 64, 32),
    ("fp32", 8, 1, 128, 64),
    ("bf16", 9, 3, 64, 32),
    ("bf16", 4, 4, 80, 32),
    ("fp16", 8, 2, 32, 96),
    ("int8", 9, 3, 64, 32),
    ("int8", 8, 1, 128, 32),
    ("fp8", 9, 3, 64, 32),
    ("fp8", 8, 2, 128, 32),
    ("fp8", 2, 2, 96, 64),
]
MIX = [(0, 1), (255, 1), (256, 1), (37, 70), (0, 33), (600, 3), (700, 1), (250, 2), (0, 300)]
TOLERANCE = {"fp32": 2e-5}
