"""Binds a program to kernels that run in one region: each call becomes a row of the step's table."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy.typing as npt
from ml_dtypes import bfloat16

from trtcb.errors import PlanError
from trtcb.plan import Plan
from trtcb.plugins.cpu.arena import Arena
from trtcb.plugins.cpu.kernels import CpuKernels, PoolAddresses, float_bits
from trtcb.plugins.cpu.linear import PackedLinear
from trtcb.plugins.cpu.quantizer import Quantizer
from trtcb.plugins.cpu.step import KernelCall, StepWord
from trtcb.program import Call, Program, Rows, Value

_ROWS = {"tokens": StepWord.NUM_TOKENS, "logits": StepWord.NUM_LOGITS}
_PARTS = {"tokens": StepWord.TOKEN_PARTS, "logits": StepWord.LOGIT_PARTS}
_PART_BYTES = 1 << 15  # of weights: what a part of a product is worth claiming for, even for a single row
_PARTS_PER_THREAD = 4  # at most: a thread that is late leaves the rest of its share to others


class StepOps:
    """Weights, as the kernels want them, and the calls that use them. Must outlive the calls.

    Between kernels everything is fp32 or quantised rows, ``values`` by name: the program's bf16 ones are fp32 here, but
    for those that products take as bf16.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        kernels: CpuKernels,
        pools: list[PoolAddresses],
        values: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        self._plan = plan
        self._program = program
        self._kernels = kernels
        self._pools = pools
        self._values = values
        self._mapped: dict[str, npt.NDArray[Any]] = {}  # what kernels read in the plan itself
        self._memory = Arena()
        self._kept: list[PackedLinear | Quantizer] = []

    def bind(self) -> list[KernelCall]:
        """Make the calls of a step."""
        operators = {
            "embedding": self._embedding,
            "rms_norm": self._rms_norm,
            "add_rms_norm": self._add_rms_norm,
            "linear": self._linear,
            "quantize": self._quantize,
            "rope_kv_write": self._rope_kv_write,
            "paged_attention": self._paged_attention,
            "swiglu": self._swiglu,
            "gather_rows": self._gather_rows,
        }
        unknown = {call.op for call in self._program.calls} - operators.keys()
        if unknown:
            raise PlanError(f"the plan calls {min(unknown)!r}, which this trtcb does not know: rebuild it")
        return [operators[call.op](call, self._program.value(call.outputs[0])) for call in self._program.calls]

    def close(self) -> None:
        """Let go of the plan's mapping. Calls must not run afterwards."""
        self._mapped.clear()
        self._kept.clear()

    def _by_rows(self, kernel: str, rows: Rows, *arguments: int | StepWord) -> KernelCall:
        """Call a kernel that treats rows alone; their number is its last argument."""
        return KernelCall(self._kernels.address(kernel), _PARTS[rows], (*arguments, _ROWS[rows]))

    def _at(self, value: str) -> int:
        return self._values[value].ctypes.data

    def _weight(self, name: str) -> int:
        """Address of a tensor that stays mapped in the plan; its pages are read as they are touched."""
        if name not in self._mapped:
            self._mapped[name] = self._plan.tensor(name)
            self._plan.release(name)  # those that were touched to verify it
        return self._mapped[name].ctypes.data

    def _embedding(self, call: Call, out: Value) -> KernelCall:
        table = self._weight(call.weights[0])
        is_bf16 = self._mapped[call.weights[0]].dtype.itemsize == 2
        return self._by_rows("embedding", out.rows, StepWord.INPUT_IDS, table, is_bf16, self._at(out.name))

    def _rms_norm(self, call: Call, out: Value) -> KernelCall:
        gain, eps = self._weight(call.weights[0]), float_bits(call.attributes["eps"])
        return self._by_rows("rms_norm", out.rows, self._at(call.inputs[0]), gain, eps, self._at(out.name))

    def _add_rms_norm(self, call: Call, out: Value) -> KernelCall:
        residual, delta = map(self._at, call.inputs)
        gain, eps = self._weight(call.weights[0]), float_bits(call.attributes["eps"])
        return self._by_rows("add_rms_norm", out.rows, residual, delta, False, gain, eps, self._at(out.name))

    def _linear(self, call: Call, out: Value) -> KernelCall:
        rows = self._values[call.inputs[0]]
        kind: Literal["bf16"] | None = "bf16" if rows.dtype == bfloat16 else None
        linear = PackedLinear(*map(self._plan.tensor, call.weights), rows=kind, memory=self._memory)
        self._kept.append(linear)
        for name in call.weights:
            self._plan.release(name)
        parts = min(max(linear.num_bytes // _PART_BYTES, 1), _PARTS_PER_THREAD * self._kernels.num_threads)
        x, y = self._at(call.inputs[0]), self._at(out.name)
        return KernelCall(linear.kernel, parts, (x, linear.panels, y, _ROWS[out.rows]))

    def _quantize(self, call: Call, out: Value) -> KernelCall:
        quantizer = Quantizer(out.width, out.dtype)
        self._kept.append(quantizer)
        arguments = (self._at(call.inputs[0]), self._at(out.name), _ROWS[out.rows])
        return KernelCall(quantizer.kernel, _PARTS[out.rows], arguments)

    def _rope_kv_write(self, call: Call, out: Value) -> KernelCall:
        pools, tables = self._pools[int(call.attributes["layer"])], map(self._weight, call.weights)
        return self._by_rows(
            *("rope_kv_write", out.rows),
            *(self._at(call.inputs[0]), pools.k, pools.v, pools.k_scale, pools.v_scale, *tables),
            *(StepWord.POSITIONS, StepWord.SLOT_MAPPING, self._at(out.name)),
        )

    def _paged_attention(self, call: Call, out: Value) -> KernelCall:
        pools = self._pools[int(call.attributes["layer"])]
        arguments = (
            *(self._at(call.inputs[0]), pools.k, pools.v, pools.k_scale, pools.v_scale),
            *(StepWord.BLOCK_TABLES, StepWord.TABLE_WIDTH, StepWord.POSITIONS, StepWord.ITEMS, StepWord.NUM_ITEMS),
            *(self._at(out.name), self._kernels.scratch),
        )
        return KernelCall(self._kernels.address("paged_attention"), self._kernels.num_threads, arguments)

    def _swiglu(self, call: Call, out: Value) -> KernelCall:
        return self._by_rows("swiglu", out.rows, self._at(call.inputs[0]), self._at(out.name))

    def _gather_rows(self, call: Call, out: Value) -> KernelCall:
        residual, delta = map(self._at, call.inputs)
        return self._by_rows("gather_rows", out.rows, residual, delta, False, StepWord.LOGIT_INDEX, self._at(out.name))
