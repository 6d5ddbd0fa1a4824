"""Compiles small checkpoints for the cpu target and runs their steps, for tests that compare runtimes."""

from pathlib import Path

import numpy as np

from trtcb.builder.compiler import CompileOptions
from trtcb.builder.cpu import CpuCompiler
from trtcb.executor.cpu_runtime import CpuRuntime
from trtcb.executor.runtime import Batch
from trtcb.plan import Plan
from trtcb.plan_format import PlanHeader
from trtcb.plan_writer import write_plan
from trtcb.spec import BuildLimits, KVDtype, WeightDtype


def write_cpu_plan(path: Path, checkpoint, weight_dtype: WeightDtype, kv_dtype: KVDtype, limits: BuildLimits) -> Path:
    """Compile ``checkpoint`` (anything with ``spec``, ``shape`` and ``tensor``) without a tokenizer."""
    options = CompileOptions(weight_dtype, kv_dtype, limits)
    compiled = CpuCompiler().compile(checkpoint, options)
    header = PlanHeader(
        target="cpu",
        fingerprint=compiled.fingerprint,
        model=checkpoint.spec,
        weight_dtype=weight_dtype.value,
        kv_dtype=kv_dtype,
        limits=limits,
        source={"model": "memory"},
        versions=compiled.versions,
    )
    write_plan(path, header, compiled.sections, compiled.tensors)
    return path


class CpuRunner:
    """The cpu runtime behind the interface of ``ort_runner.OrtRunner``."""

    def __init__(self, path: Path, *, num_blocks: int, engine: str) -> None:
        plan = Plan.open(path)
        limits = plan.header.limits
        self.block_size = limits.block_size
        self.runtime = CpuRuntime(
            plan,
            num_blocks=num_blocks,
            max_num_tokens=limits.max_num_tokens,
            max_num_logits=limits.max_batch_size,
            engine=engine,
        )

    def step(self, batch: Batch) -> np.ndarray:
        """Run one step; logits ``[NL, vocab_size]``."""
        self.runtime.launch(batch)
        self.tokens = self.runtime.wait().tokens
        return self.runtime.logits()[: len(batch.logit_index)].copy()
