"""The portable CPU engine: a plan's call list over oneDNN products and compiled kernels, with its paged KV pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtcb.executor.runtime import Batch, Float32, Int32, StepOutput
from trtcb.plugins.cpu.pools import copy_blocks, pool_addresses
from trtcb.spec import WeightDtype

if TYPE_CHECKING:
    from trtcb.executor.call_list import Op, Step
    from trtcb.plan import Plan


class PortableEngine:
    """Runs the steps of a ``cpu`` plan on the thread that made it; no other may touch it.

    ``threads.configure`` must have been called, before torch was imported, so that torch and numba share one team.

    The pool is zeroed memory that the system hands out as it is first touched. The plan must stay open meanwhile.
    """

    def __init__(self, plan: Plan, *, num_blocks: int, max_num_tokens: int, max_num_logits: int) -> None:
        import numba
        import torch

        from trtcb.executor.call_list import allocate_values, bind_program
        from trtcb.executor.layer_pools import allocate_layers
        from trtcb.executor.portable_ops import PortableOps
        from trtcb.executor.program_check import checked_program
        from trtcb.executor.token_drawer import TokenDrawer
        from trtcb.plugins.cpu.kernels import KernelConfig, load_kernels

        torch.set_num_threads(numba.get_num_threads())
        header = plan.header
        program = checked_program(plan)
        activation = WeightDtype(header.weight_dtype).activation_dtype
        config = KernelConfig.of(header.model, header.kv_dtype, activation, header.limits.block_size)
        self._kernels = load_kernels(config)
        self._pools = allocate_layers(config, header.model.num_layers, num_blocks)
        self._values = allocate_values(program, max(2, max_num_tokens), max(2, max_num_logits))
        self._ops = PortableOps(plan, self._kernels, [pool_addresses(pools) for pools in self._pools])
        self._calls: tuple[Op, ...] = bind_program(program, self._values, self._ops.table())
        self._drawer = TokenDrawer(header.model.vocab_size)

    def run(self, batch: Batch) -> StepOutput:
        """Run one step and draw; -1 where a row's logits were not numbers."""
        if len(batch.copies):
            for pools in self._pools:
                copy_blocks(pools, batch.copies)
        input_ids = self._drawer.input_ids(batch)
        step = _step(batch, input_ids)
        self._ops.attention = self._kernels.plan_attention(
            step.cu_q, step.positions, step.num_sequences, step.num_tokens
        )
        for call in self._calls:
            call(step)
        return self._drawer.draw(batch, self._values["logits"].data_ptr())

    def logits(self) -> Float32:
        """Logits ``[NL, vocab]`` of the last step, for evaluation; overwritten by the next."""
        array: Float32 = self._values["logits"].numpy()
        return array

    def close(self) -> None:
        """Drop pools and weights, and let go of the plan."""
        self._calls = ()
        self._ops.close()
        self._pools.clear()
        self._values.clear()


def _step(batch: Batch, input_ids: Int32) -> Step:
    """Point at a batch's arrays, which must stay alive meanwhile. ``input_ids`` are all known."""
    from trtcb.executor.call_list import Step

    return Step(
        num_tokens=len(batch.input_ids),
        num_logits=len(batch.logit_index),
        num_sequences=len(batch.cu_q) - 1,
        table_width=batch.block_tables.shape[1],
        input_ids=input_ids.ctypes.data,
        positions=batch.positions.ctypes.data,
        slot_mapping=batch.slot_mapping.ctypes.data,
        cu_q=batch.cu_q.ctypes.data,
        block_tables=batch.block_tables.ctypes.data,
        logit_index=batch.logit_index.ctypes.data,
    )
