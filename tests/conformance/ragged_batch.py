"""Ragged batches over shuffled, garbage-filled pools."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from trtcb.plugins import reference
from trtcb.plugins.cpu.kernels import CpuKernels, KernelConfig, PoolAddresses
from trtcb.plugins.cpu.pools import PoolArrays, from_portable
from trtcb.plugins.nvidia.shape import PagedShape
from trtcb.spec import KVDtype


def config(kv: str, *, heads=9, kv_heads=3, dim=64, block_size=32, activation="fp32", hidden=128, inter=96):
    return KernelConfig(heads, kv_heads, dim, hidden, inter, block_size, KVDtype(kv), activation)


@dataclass
class RaggedBatch:
    """Sequences of ``(tokens already cached, new tokens)``; keys and values of all of them are in ``pools``."""

    config: KernelConfig | PagedShape
    sequences: list[tuple[int, int]]
    pools: reference.KVPools
    query: np.ndarray
    positions: np.ndarray
    cu_q: np.ndarray
    block_tables: np.ndarray

    @staticmethod
    def make(config: KernelConfig | PagedShape, sequences: list[tuple[int, int]], seed: int = 0) -> "RaggedBatch":
        rng = np.random.default_rng(seed)
        lengths = [cached + new for cached, new in sequences]
        num_blocks = [-(-length // config.block_size) for length in lengths]
        order = rng.permutation(sum(num_blocks) + 3).astype(np.int32)
        block_tables = np.zeros((len(sequences), max(num_blocks)), np.int32)
        pools = garbage_pools(config, len(order), rng)
        for b, length in enumerate(lengths):
            block_tables[b, : num_blocks[b]] = order[sum(num_blocks[:b]) : sum(num_blocks[: b + 1])]
            where = np.arange(length)
            slots = block_tables[b, where // config.block_size] * config.block_size + where % config.block_size
            k, v = rng.normal(size=(2, length, config.num_kv_heads, config.head_dim)).astype(np.float32)
            reference.kv_cache_write(pools, k, v, slots)
        new = [count for _, count in sequences]
        cu_q = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        positions = np.concatenate([np.arange(c, c + n) for c, n in sequences]).astype(np.int32)
        # large enough queries that the softmax is peaked, as in a trained model
        query = rng.normal(size=(cu_q[-1], config.num_heads, config.head_dim)).astype(np.float32)
        query *= 2 / np.sqrt(config.head_dim)
        return RaggedBatch(config, sequences, pools, query.astype(np.float32), positions, cu_q, block_tables)

    def expected(self) -> np.ndarray:
        out = reference.paged_attention(
            self.query, self.pools, self.block_tables, self.positions, self.cu_q, block_size=self.config.block_size
        )
        return out.reshape(len(self.query), -1)

    def run(self, kernels: CpuKernels, arrays: PoolArrays | None = None) -> np.ndarray:
        arrays = from_portable(self.config, self.pools) if arrays is None else arrays
        return attend(kernels, self.query, arrays, self.block_tables, self.positions, self.cu_q)


def attend(kernels, query, arrays, block_tables, positions, cu_q) -> np.ndarray:
    """Run the attention kernel on numpy arrays; returns ``[T, H * D]`` in the activation type."""
    query = np.ascontiguousarray(query)
    positions, cu_q = np.ascontiguousarray(positions, np.int32), np.ascontiguousarray(cu_q, np.int32)
    block_tables = np.ascontiguousarray(block_tables, np.int32)
    dtype = np.float32 if kernels.config.activation == "fp32" else ml_dtypes.bfloat16
    out = np.full((len(query), kernels.config.num_heads * kernels.config.head_dim), np.nan, dtype)
    plan = kernels.plan_attention(cu_q.ctypes.data, positions.ctypes.data, len(cu_q) - 1, len(query))
    kernels.paged_attention(
        query.ctypes.data,
        addresses(arrays),
        block_tables.ctypes.data,
        block_tables.shape[1],
        positions.ctypes.data,
        plan,
        out.ctypes.data,
    )
    return out


def addresses(arrays: PoolArrays) -> PoolAddresses:
    return PoolAddresses(**{name: array.ctypes.data for name, array in arrays.items()})


def garbage_pools(config: KernelConfig | PagedShape, num_blocks: int, rng: np.random.Generator) -> reference.KVPools:
    """What freed blocks may hold: any finite bits."""
    pools = reference.KVPools.zeros(
        config.kv_dtype, num_blocks * config.block_size, config.num_kv_heads, config.head_dim
    )
    for array in (pools.k, pools.v):
        raw = array.view(np.uint8)
        raw[:] = rng.integers(0, 256, raw.shape, np.uint8)
        if config.kv_dtype is KVDtype.FP8:
            raw[(raw & 0x7F) == 0x7F] = 0x7E
        elif config.kv_dtype is not KVDtype.INT8:
            array[~np.isfinite(array.astype(np.float32))] = 1.0
    for scales in (pools.k_scale, pools.v_scale):
        if scales is not None:
            scales[:] = rng.choice(np.array([0, 6.1e-5, 1, 65504], np.float16), scales.shape)
    return pools
