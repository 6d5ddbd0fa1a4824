"""The CPU target's own layout of a layer's KV pool, known only here and in the kernel sources.

Keys lie as ``[block, kv_head, head_dim, block_size]`` so that 16 tokens' scores form in the lanes of one vector, values
as ``[block, kv_head, block_size, head_dim]`` so that 16 dimensions of the context do; scales as
``[block, kv_head, block_size]``.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtcb.plugins.cpu.kernel_config import KernelConfig
from trtcb.plugins.reference import STORAGE_DTYPE, KVPools

PoolArrays = dict[str, npt.NDArray[np.generic]]


def pool_shapes(config: KernelConfig, num_blocks: int) -> dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]:
    """Shape and type of one layer's arrays: ``k`` and ``v``, and ``k_scale`` and ``v_scale`` for quantised formats."""
    dtype = STORAGE_DTYPE[config.kv_dtype]
    pages = (num_blocks, config.num_kv_heads)
    shapes: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]] = {
        "k": ((*pages, config.head_dim, config.block_size), dtype),
        "v": ((*pages, config.block_size, config.head_dim), dtype),
    }
    if config.kv_dtype.is_quantized:
        scales = ((*pages, config.block_size), np.dtype(np.float16))
        shapes |= {"k_scale": scales, "v_scale": scales}
    return shapes


def pool_nbytes_per_block(config: KernelConfig) -> int:
    """Bytes of one block in one layer, scales included."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in pool_shapes(config, 1).values())


@dataclass(frozen=True, slots=True)
class PoolAddresses:
    """One layer's pool arrays; the scales are 0 for unquantised formats."""

    k: int
    v: int
    k_scale: int = 0
    v_scale: int = 0


def pool_addresses(arrays: PoolArrays) -> PoolAddresses:
    """Addresses of arrays that must stay alive."""
    return PoolAddresses(**{name: array.ctypes.data for name, array in arrays.items()})


def allocate_pools(config: KernelConfig, num_blocks: int) -> PoolArrays:
    """One layer's zeroed arrays. They must be zeroed: attention multiplies unwritten elements by a probability of 0."""
    return {name: np.zeros(shape, dtype) for name, (shape, dtype) in pool_shapes(config, num_blocks).items()}


def copy_blocks(arrays: PoolArrays, copies: npt.NDArray[np.int32]) -> None:
    """Copy whole blocks ``[NC, 2]`` (read, written) of one layer, bit by bit; all are read before any is written."""
    sources, destinations = copies.T
    for array in arrays.values():
        array[destinations] = array[sources]


def to_portable(config: KernelConfig, arrays: PoolArrays) -> KVPools:
    """Copy into the portable layout, slot by slot, for tests and tools."""

    def by_slot(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        moved = np.moveaxis(array, 2, 1)  # [block, block_size, kv_head, ...]
        return np.ascontiguousarray(moved.reshape(-1, config.num_kv_heads, *moved.shape[3:]))

    k, v = by_slot(arrays["k"].swapaxes(2, 3)), by_slot(arrays["v"])
    if not config.kv_dtype.is_quantized:
        return KVPools(config.kv_dtype, k, v)
    scales = (by_slot(arrays[name]).astype(np.float16) for name in ("k_scale", "v_scale"))
    return KVPools(config.kv_dtype, k, v, *scales)


def from_portable(config: KernelConfig, pools: KVPools) -> PoolArrays:
    """Inverse of :func:`to_portable`."""

    def by_page(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        blocks = array.reshape(-1, config.block_size, *array.shape[1:])
        return np.ascontiguousarray(np.moveaxis(blocks, 1, 2))

    arrays = {"k": np.ascontiguousarray(by_page(pools.k).swapaxes(2, 3)), "v": by_page(pools.v)}
    if pools.k_scale is not None and pools.v_scale is not None:
        arrays |= {"k_scale": by_page(pools.k_scale), "v_scale": by_page(pools.v_scale)}
    return arrays
