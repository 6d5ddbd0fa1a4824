"""The CPU target's operators: compiled kernels behind methods that take addresses and sizes.

All arrays are row-major and belong to the caller; an address is that of element 0 (``array.ctypes.data``,
``tensor.data_ptr()``). *Activation* and *result* mean the types of the configuration. Nothing is checked: wrong
addresses or indices corrupt memory, so whoever builds the batch must be right. Methods run on the calling thread and
its team; one thread may use an object at a time.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from trtcb.plugins.cpu import matrix_unit
from trtcb.plugins.cpu.isa import accumulators, has_feature, isa_fingerprint
from trtcb.plugins.cpu.kernel_config import KernelConfig
from trtcb.plugins.cpu.matrix_attention_tile import BF16_SCALE, FEATURES, WIDTH
from trtcb.plugins.cpu.pools import PoolAddresses, allocate_pools, pool_nbytes_per_block, pool_shapes
from trtcb.plugins.cpu.specialize import Progress, compile_kernels, compile_launcher, load_module

__all__ = [
    "AttentionPlan",
    "CpuKernels",
    "KernelConfig",
    "PoolAddresses",
    "allocate_pools",
    "attends_on_matrix_unit",
    "float_bits",
    "isa_fingerprint",
    "load_kernels",
    "pool_nbytes_per_block",
    "pool_shapes",
]

SERIAL_BYTES = 1 << 18
"""Memory traffic below which a row kernel runs in the calling thread: waking the team costs some microseconds."""

SERIAL_KV_BYTES = 1 << 17
"""The same for attention, in bytes of keys and values a launch reads per KV head and row, all together."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A batch cut into work items; the same for every layer, valid until the next ``plan_attention``."""

    items: int
    num_items: int
    parts: int


class CpuKernels:
    """All operators of one configuration. Made by :func:`load_kernels`."""

    def __init__(
        self, config: KernelConfig, functions: dict[str, Any], launcher: Any, scratch_bytes: int, num_threads: int
    ) -> None:
        self.config = config
        self.num_threads = num_threads
        self._functions = functions  # owns the machine code
        self._address: dict[str, int] = {name: function.address for name, function in functions.items()}
        self._launch = launcher
        self._scratch = np.zeros(num_threads * scratch_bytes + 4096, np.uint8)
        self._scratch_address = -(-self._scratch.ctypes.data // 4096) * 4096
        self._items = np.zeros(0, np.int32)
        self._result = np.zeros(2, np.int64)
        self._eps_bits: dict[float, int] = {}
        self._block_bytes = pool_nbytes_per_block(config)

    @property
    def scratch(self) -> int:
        """Address of what attention scribbles on."""
        return self._scratch_address

    def address(self, kernel: str) -> int:
        """Address of a kernel's machine code, for as long as this object lives."""
        return self._address[kernel]

    def _run(self, kernel: str, parts: int, *arguments: int) -> None:
        self._launch(self._address[kernel], parts, *arguments, *(0,) * (12 - len(arguments)))

    def _parts(self, num_rows: int, bytes_per_row: int) -> int:
        return min(num_rows, self.num_threads) if num_rows * bytes_per_row > SERIAL_BYTES else 1

    def _eps(self, eps: float) -> int:
        if eps not in self._eps_bits:
            self._eps_bits[eps] = float_bits(eps)
        return self._eps_bits[eps]

    def embedding(self, ids: int, table: int, residual: int, num_rows: int, *, table_is_bf16: bool) -> None:
        """``residual[i] = table[ids[i]]``: ids int32 ``[T]``, table ``[V, hidden]`` bf16 or fp32, residual fp32."""
        parts = self._parts(num_rows, 6 * self.config.hidden_size)
        self._run("embedding", parts, ids, table, table_is_bf16, residual, num_rows)

    def rms_norm(self, residual: int, gain: int, hidden: int, num_rows: int, eps: float) -> None:
        """Normalise: residual fp32 ``[T, hidden]``, gain fp32 ``[hidden]``, hidden activation ``[T, hidden]``."""
        parts = self._parts(num_rows, 8 * self.config.hidden_size)
        self._run("rms_norm", parts, residual, gain, self._eps(eps), hidden, num_rows)

    def add_rms_norm(
        self, residual: int, delta: int, gain: int, hidden: int, num_rows: int, eps: float, *, delta_is_bf16: bool
    ) -> None:
        """``residual += delta`` in place, then as :meth:`rms_norm`; delta bf16 or fp32 ``[T, hidden]``."""
        parts = self._parts(num_rows, 14 * self.config.hidden_size)
        self._run("add_rms_norm", parts, residual, delta, delta_is_bf16, gain, self._eps(eps), hidden, num_rows)

    def rope_kv_write(
        self,
        qkv: int,
        pools: PoolAddresses,
        cos: int,
        sin: int,
        positions: int,
        slot_mapping: int,
        query: int,
        num_rows: int,
    ) -> None:
        """Rotate queries and keys of fused rows and store keys and values.

        qkv result ``[T, (H + 2 HK) D]``; cos, sin fp32 ``[positions, D / 2]``; positions, slot_mapping int32
        ``[T]`` (slots of one call must differ); query fp32 ``[T, H, D]``, written, scaled by ``1 / sqrt(D)``.
        """
        self._run(
            "rope_kv_write",
            self._parts(num_rows, 16 * self.config.qkv_size),
            *(qkv, pools.k, pools.v, pools.k_scale, pools.v_scale, cos, sin, positions, slot_mapping, query, num_rows),
        )

    def plan_attention(self, cu_q: int, positions: int, num_sequences: int, num_rows: int) -> AttentionPlan:
        """Cut a batch into work items, once per step: cu_q int32 ``[B + 1]``, positions int32 ``[T]``, T = num_rows."""
        if self._items.size < 3 * num_rows:
            self._items = np.zeros(3 * num_rows, np.int32)
        items, result = self._items.ctypes.data, self._result.ctypes.data
        self._run("plan_attention", 1, cu_q, positions, num_sequences, items, result)
        num_items, context = (int(x) for x in self._result)
        kv_bytes = context * self._block_bytes // self.config.block_size
        work_items = num_items * self.config.num_kv_heads
        parts = min(work_items, self.num_threads) if kv_bytes > SERIAL_KV_BYTES else 1
        return AttentionPlan(items, num_items, max(1, parts))

    def paged_attention(
        self,
        query: int,
        pools: PoolAddresses,
        block_tables: int,
        table_width: int,
        positions: int,
        plan: AttentionPlan,
        context: int,
    ) -> None:
        """Causal attention of a ragged batch over the pool.

        query fp32 ``[T, H, D]``, already scaled; block_tables int32 ``[B, table_width]``; positions int32 ``[T]``;
        context activation ``[T, H * D]``, written.
        """
        self._run(
            "paged_attention",
            plan.parts,
            *(query, pools.k, pools.v, pools.k_scale, pools.v_scale, block_tables, table_width, positions),
            *(plan.items, plan.num_items, context, self._scratch_address),
        )

    def swiglu(self, gate_up: int, hidden: int, num_rows: int) -> None:
        """``silu(gate) * up``: result ``[T, 2 * intermediate]``, hidden activation ``[T, intermediate]``."""
        self._run("swiglu", self._parts(num_rows, 16 * self.config.intermediate_size), gate_up, hidden, num_rows)

    def gather_rows(
        self, residual: int, delta: int, index: int, gathered: int, num_rows: int, *, delta_is_bf16: bool
    ) -> None:
        """``gathered[i] = residual[index[i]] + delta[index[i]]``: index int32 ``[num_rows]``, gathered fp32."""
        parts = self._parts(num_rows, 12 * self.config.hidden_size)
        self._run("gather_rows", parts, residual, delta, delta_is_bf16, index, gathered, num_rows)


def float_bits(number: float) -> int:
    """The bits of a number as an int64: how it travels in an argument block."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def attends_on_matrix_unit(config: KernelConfig) -> bool:
    """Whether attention is computed there: where keys and values are exact in bf16."""
    exact = config.kv_dtype.value in BF16_SCALE and config.head_dim % WIDTH == 0
    return exact and matrix_unit.is_usable() and all(map(has_feature, FEATURES))


def load_kernels(
    config: KernelConfig, *, num_threads: int | None = None, on_progress: Progress | None = None
) -> CpuKernels:
    """Compile the kernels on first use (some seconds), else load them from the user's cache folder (well under one).

    Call ``threads.configure`` first; ``num_threads`` defaults to what it set. ``on_progress`` gets each kernel's name.
    """
    constants = {
        "NUM_HEADS": config.num_heads,
        "NUM_KV_HEADS": config.num_kv_heads,
        "HEAD_DIM": config.head_dim,
        "BLOCK_SIZE": config.block_size,
        "KV_FORMAT": config.kv_dtype.value,
    }
    rows = {
        "HIDDEN_SIZE": config.hidden_size,
        "INTERMEDIATE_SIZE": config.intermediate_size,
        "ACTIVATION": config.activation,
        "RESULTS": config.results,
    }
    source, attention = "kernel_attention", {**constants, "ACTIVATION": config.activation}
    if attends_on_matrix_unit(config):
        source = "kernel_matrix_attention"
    else:
        attention["ACCUMULATORS"] = accumulators()
    tokens_per_item: int = load_module(source, attention).TOKENS_PER_ITEM
    functions = {
        **compile_kernels("kernel_rows", rows, on_progress),
        **compile_kernels("kernel_rope", {**constants, "RESULTS": config.results}, on_progress),
        **compile_kernels("kernel_plan", {"TOKENS_PER_ITEM": tokens_per_item}, on_progress),
        **compile_kernels(source, attention, on_progress),
    }
    scratch_bytes: int = load_module(source, attention).SCRATCH_BYTES
    threads = numba.get_num_threads() if num_threads is None else num_threads
    return CpuKernels(config, functions, compile_launcher(), scratch_bytes, threads)
