"""The KV pool of all layers, or a sentence about the memory that is not there."""

from trtcb.errors import OutOfMemoryError
from trtcb.memory import format_size
from trtcb.plugins.cpu.kernel_config import KernelConfig
from trtcb.plugins.cpu.pools import PoolArrays, allocate_pools, pool_nbytes_per_block


def allocate_layers(config: KernelConfig, num_layers: int, num_blocks: int) -> list[PoolArrays]:
    """Zeroed pools of each layer, which the system hands out as they are first touched.

    Raises :class:`~trtcb.errors.OutOfMemoryError` if it does not even promise that much.
    """
    try:
        return [allocate_pools(config, num_blocks) for _ in range(num_layers)]
    except (MemoryError, ValueError):  # ValueError: more than an address can tell
        size = format_size(num_layers * num_blocks * pool_nbytes_per_block(config))
        raise OutOfMemoryError(
            f"a KV pool of {num_blocks:,} blocks, {size}, cannot be allocated: "
            "lower --num-blocks, --kv-memory or --kv-memory-fraction, or free memory"
        ) from None
