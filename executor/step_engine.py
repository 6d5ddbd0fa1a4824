"""The whole-step CPU engine: all layers of a step in one call, on kernels of our own."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

from trtcb.executor.layer_pools import allocate_layers
from trtcb.executor.program_check import checked_program
from trtcb.executor.runtime import Batch, Float32, StepOutput
from trtcb.executor.step_ops import StepOps
from trtcb.executor.token_drawer import TokenDrawer
from trtcb.plan import Plan
from trtcb.plugins.cpu.arena import Arena
from trtcb.plugins.cpu.isa import multiplies_bf16_pairs
from trtcb.plugins.cpu.kernels import KernelConfig, load_kernels
from trtcb.plugins.cpu.pools import copy_blocks, pool_addresses
from trtcb.plugins.cpu.rows import QUANTIZED, row_bytes
from trtcb.plugins.cpu.step import CallTimes, StepFunction, StepWord
from trtcb.program import Program, Value

SERIAL_MULTIPLICATIONS = 4_000_000
"""Size of a step below which one thread does it all: to wake others costs some microseconds."""

ROWS_PER_PART = 4  # of what treats rows alone


class StepEngine:
    """Runs the steps of a ``cpu`` plan, on the calling thread and its team; one thread at a time. Needs no torch.

    ``threads.configure`` must have been called by the thread that makes it, before this module was imported.

    The pool is zeroed memory that the system hands out as it is first touched. The plan must stay open meanwhile.
    """

    def __init__(self, plan: Plan, *, num_blocks: int, max_num_tokens: int, max_num_logits: int) -> None:
        header = plan.header
        program = checked_program(plan)
        rows = _bf16_rows(program, header.weight_dtype)
        activation = "bf16" if rows else "fp32"
        block_size = header.limits.block_size
        config = KernelConfig.of(header.model, header.kv_dtype, activation, block_size, fp32_results=True)
        self._kernels = load_kernels(config)
        self._pools = allocate_layers(config, header.model.num_layers, num_blocks)
        counts, memory = {"tokens": max_num_tokens, "logits": max_num_logits}, Arena()
        self._values = {
            value.name: _allocate(value, counts[value.rows], memory, is_bf16=value.name in rows)
            for value in program.values
        }
        pools = [pool_addresses(arrays) for arrays in self._pools]
        self._ops = StepOps(plan, program, self._kernels, pools, self._values)
        self._calls = self._ops.bind()
        self._run_calls = StepFunction(self._calls).run
        self._num_params = header.model.num_params
        self._drawer = TokenDrawer(header.model.vocab_size)

    def run(self, batch: Batch) -> StepOutput:
        """Run one step and draw; -1 where a row's logits were not numbers."""
        if len(batch.copies):
            for pools in self._pools:
                copy_blocks(pools, batch.copies)
        input_ids = self._drawer.input_ids(batch)
        num_tokens = len(input_ids)
        numba.set_num_threads(self._kernels.num_threads)  # numba keeps the number for each thread
        positions = batch.positions.ctypes.data
        plan = self._kernels.plan_attention(batch.cu_q.ctypes.data, positions, len(batch.cu_q) - 1, num_tokens)
        self._run_calls(
            {
                StepWord.NUM_TOKENS: num_tokens,
                StepWord.NUM_LOGITS: len(batch.logit_index),
                StepWord.TABLE_WIDTH: batch.block_tables.shape[1],
                StepWord.INPUT_IDS: input_ids.ctypes.data,
                StepWord.POSITIONS: positions,
                StepWord.SLOT_MAPPING: batch.slot_mapping.ctypes.data,
                StepWord.BLOCK_TABLES: batch.block_tables.ctypes.data,
                StepWord.LOGIT_INDEX: batch.logit_index.ctypes.data,
                StepWord.ITEMS: plan.items,
                StepWord.NUM_ITEMS: plan.num_items,
                StepWord.TOKEN_PARTS: self._num_parts(num_tokens),
                StepWord.LOGIT_PARTS: self._num_parts(len(batch.logit_index)),
            },
            num_threads=self._kernels.num_threads if num_tokens * self._num_params > SERIAL_MULTIPLICATIONS else 1,
        )
        return self._drawer.draw(batch, self._values["logits"].ctypes.data)

    def time_calls(self, on_times: Callable[[CallTimes], None]) -> None:
        """Time the calls of each step from now on, and hand that over before the step's tokens are drawn."""
        function = StepFunction(self._calls, profile=True)

        def run(words: Mapping[StepWord, int], *, num_threads: int) -> None:
            on_times(function.run_timed(words, num_threads=num_threads))

        self._run_calls = run

    def _num_parts(self, num_rows: int) -> int:
        return min(-(-num_rows // ROWS_PER_PART), 2 * self._kernels.num_threads)

    def logits(self) -> Float32:
        """Logits ``[NL, vocab]`` of the last step, for evaluation; overwritten by the next."""
        logits: Float32 = self._values["logits"]
        return logits

    def close(self) -> None:
        """Drop pools and weights, and let go of the plan."""
        self._ops.close()
        self._pools.clear()
        self._values.clear()


def _bf16_rows(program: Program, weights: str) -> frozenset[str]:
    """Values that are bf16: what products of bf16 weights take, if they take bf16."""
    if weights != "bf16" or not multiplies_bf16_pairs():
        return frozenset()
    return frozenset(call.inputs[0] for call in program.calls if call.op == "linear")


def _allocate(value: Value, num_rows: int, memory: Arena, *, is_bf16: bool) -> npt.NDArray[Any]:
    if value.dtype in QUANTIZED:
        shape = (num_rows, row_bytes(value.dtype, value.width))
        return memory.take(math.prod(shape)).reshape(shape)
    dtype: np.dtype[Any] = np.dtype(bfloat16 if is_bf16 else np.float32)
    return memory.take(num_rows * value.width * dtype.itemsize).view(dtype).reshape(num_rows, value.width)
