"""Prints a digest of what the kernels compute; run in processes that compile for different instruction sets."""

import hashlib

from tests.conformance.ragged_batch import RaggedBatch, config
from trtcb.plugins.cpu import threads
from trtcb.plugins.cpu.isa import accumulators
from trtcb.plugins.cpu.kernels import load_kernels

layer = threads.configure()
print(accumulators())
for kv in ("fp8", "fp16"):
    cfg = config(kv)
    batch = RaggedBatch.make(cfg, [(300, 1), (37, 70)])
    result = batch.run(load_kernels(cfg, num_threads=layer.num_threads))
    print(hashlib.sha256(result.tobytes()).hexdigest())
