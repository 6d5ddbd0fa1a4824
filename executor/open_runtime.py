"""Opens the runtime a plan was compiled for, with a KV pool that fits this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtcb.errors import OutOfMemoryError, TargetUnavailableError
from trtcb.memory import available_memory, format_size, pool_memory

if TYPE_CHECKING:
    from trtcb.executor.config import EngineConfig
    from trtcb.executor.runtime import Runtime
    from trtcb.plan import Plan


def open_runtime(plan: Plan, config: EngineConfig) -> Runtime:
    """Make the runtime of ``plan.header.target``. ``config`` is within the plan's limits (``EngineConfig.within``).

    The runtime takes the plan over and closes it in the end. Raises :class:`TargetUnavailableError` for a target this
    installation cannot run, and :class:`OutOfMemoryError` if not one block fits.
    """
    if plan.header.target != "cpu":
        raise TargetUnavailableError(
            f"{plan.path} was built for the target '{plan.header.target}', which this trtcb cannot run: "
            "rebuild it with --target cpu"
        )
    from trtcb.executor.cpu_runtime import CpuRuntime

    return CpuRuntime(
        plan,
        num_blocks=pool_blocks(plan, config),
        max_num_tokens=config.max_num_tokens,
        max_num_logits=config.max_batch_size,
        num_threads=config.threads,
        engine=config.cpu_engine,
        overlaps=config.overlap_depth > 0,
    )


def pool_blocks(plan: Plan, config: EngineConfig) -> int:
    """Blocks of the pool: as told, else what the memory share allows, up to what a full batch can use."""
    block_bytes = plan.header.model.kv_bytes_per_token(plan.header.kv_dtype) * config.block_size
    weights = sum(info.num_bytes for info in plan.tensors.values())
    available = available_memory()
    if config.num_blocks is not None:
        budget = config.num_blocks * block_bytes
    elif config.kv_memory_bytes is not None:
        budget = config.kv_memory_bytes
    else:
        per_sequence = -(-config.max_seq_len // config.block_size)
        full_batch = config.max_batch_size * per_sequence * block_bytes
        budget = min(pool_memory(available, weights, config.kv_memory_fraction), full_batch)
    if budget + weights > available:
        raise OutOfMemoryError(
            f"a KV pool of {format_size(budget)} and weights of {format_size(weights)} do not fit in the "
            f"{format_size(available)} that are free: lower --kv-memory or --num-blocks, or free memory"
        )
    blocks = budget // block_bytes
    if blocks < 1:
        raise OutOfMemoryError(
            f"the KV pool would get {format_size(budget)}, less than one block of {format_size(block_bytes)}: "
            "raise --kv-memory or --kv-memory-fraction, or free memory"
        )
    return blocks
