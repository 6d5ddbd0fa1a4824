"""The operators of a program on the CPU: oneDNN products for ``linear``, compiled kernels for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trtcb.errors import PlanError
from trtcb.executor.call_list import BindOp, Op, Step, Values
from trtcb.executor.linear import as_tensor, pack_linear, padded_rows
from trtcb.plugins.cpu.arena import Arena
from trtcb.plugins.cpu.rows import QUANTIZED

if TYPE_CHECKING:
    import torch

    from trtcb.plan import Plan
    from trtcb.plugins.cpu.kernels import AttentionPlan, CpuKernels, PoolAddresses
    from trtcb.program import Call, Program, Rows


class PortableOps:
    """Binds calls to kernels. Keeps what the bound calls point at: weights, pools and the step's attention plan."""

    def __init__(self, plan: Plan, kernels: CpuKernels, pools: list[PoolAddresses]) -> None:
        self._plan = plan
        self._kernels = kernels
        self._pools = pools
        self._tables: dict[str, torch.Tensor] = {}
        self._memory = Arena()
        self.attention: AttentionPlan | None = None  # of the step that is running

    def table(self) -> Mapping[str, BindOp]:
        """Every operator a program for this target may call."""
        return {
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

    def close(self) -> None:
        """Let go of the plan's mapping. Bound calls must not run afterwards."""
        self._tables.clear()

    def _weight(self, name: str, width: int) -> torch.Tensor:
        """A tensor that stays mapped in the plan; its pages are read as they are touched."""
        if name not in self._tables:
            self._tables[name] = as_tensor(self._plan.tensor(name))
            self._plan.release(name)  # those that were touched to verify it
        tensor = self._tables[name]
        if tensor.shape[-1] != width:
            raise PlanError(f"tensor {name!r} of the plan is {tensor.shape[-1]} wide, not {width}: rebuild the plan")
        return tensor

    def _embedding(self, call: Call, program: Program, values: Values) -> Op:
        out = program.value(call.outputs[0])
        table = self._weight(call.weights[0], out.width)
        address, is_bf16 = table.data_ptr(), table.element_size() == 2
        residual, embed = values[out.name].data_ptr(), self._kernels.embedding
        return lambda step: embed(step.input_ids, address, residual, step.num_tokens, table_is_bf16=is_bf16)

    def _rms_norm(self, call: Call, program: Program, values: Values) -> Op:
        source, out = program.value(call.inputs[0]), program.value(call.outputs[0])
        gain = self._weight(call.weights[0], out.width).data_ptr()
        residual, hidden = values[source.name].data_ptr(), values[out.name].data_ptr()
        eps, rows, norm = call.attributes["eps"], out.rows, self._kernels.rms_norm
        return lambda step: norm(residual, gain, hidden, step.num_rows(rows), eps)

    def _add_rms_norm(self, call: Call, program: Program, values: Values) -> Op:
        source, delta = call.inputs
        out = program.value(call.outputs[0])
        gain = self._weight(call.weights[0], out.width).data_ptr()
        residual, hidden = values[source].data_ptr(), values[out.name].data_ptr()
        eps, norm = call.attributes["eps"], self._kernels.add_rms_norm
        is_bf16 = program.value(delta).dtype == "bf16"

        def run(step: Step) -> None:
            added = values[delta].data_ptr()
            norm(residual, added, gain, hidden, step.num_tokens, eps, delta_is_bf16=is_bf16)

        return run

    def _linear(self, call: Call, program: Program, values: Values) -> Op:
        source, out = program.value(call.inputs[0]), program.value(call.outputs[0])
        name = call.weights[0]
        if source.dtype in QUANTIZED:
            return self._quantized_linear(call, values[source.name], values[out.name], source.rows)
        if out.name == "logits" and self._plan.tensors[name].dtype == "bf16":
            return self._head(name, values[source.name], values[out.name])
        multiply = pack_linear(as_tensor(self._plan.tensor(name)))
        self._plan.release(name)
        x, rows = values[source.name], source.rows

        def run(step: Step) -> None:
            values[out.name] = multiply(x[: padded_rows(step.num_rows(rows))])

        return run

    def _quantize(self, call: Call, program: Program, values: Values) -> Op:
        from trtcb.plugins.cpu.quantizer import Quantizer

        out = program.value(call.outputs[0])
        x, y = values[call.inputs[0]].data_ptr(), values[out.name].data_ptr()
        quantizer = Quantizer(out.width, out.dtype)
        return lambda step: quantizer.quantize(x, y, step.num_rows(out.rows))

    def _quantized_linear(self, call: Call, source: torch.Tensor, out: torch.Tensor, rows: Rows) -> Op:
        from trtcb.plugins.cpu.linear import PackedLinear

        linear = PackedLinear(*map(self._plan.tensor, call.weights), memory=self._memory)
        for name in call.weights:
            self._plan.release(name)
        x, y = source.data_ptr(), out.data_ptr()
        return lambda step: linear.multiply(x, y, step.num_rows(rows))

    def _head(self, name: str, hidden: torch.Tensor, logits: torch.Tensor) -> Op:
        """The product whose result must not be rounded to the type of its weights."""
        from trtcb.plugins.cpu.linear import PackedLinear

        head, address = PackedLinear(self._plan.tensor(name), memory=self._memory), logits.data_ptr()
        self._plan.release(name)

        def run(step: Step) -> None:
            rows = hidden[: step.num_logits].float()
            head.multiply(rows.data_ptr(), address, step.num_logits)

        return run

    def _rope_kv_write(self, call: Call, program: Program, values: Values) -> Op:
        [qkv], query = call.inputs, values[call.outputs[0]].data_ptr()
        half = self._kernels.config.head_dim // 2
        cos, sin = (self._weight(name, half).data_ptr() for name in call.weights)
        pools, write = self._pools[int(call.attributes["layer"])], self._kernels.rope_kv_write

        def run(step: Step) -> None:
            fused = values[qkv].data_ptr()
            write(fused, pools, cos, sin, step.positions, step.slot_mapping, query, step.num_tokens)

        return run

    def _paged_attention(self, call: Call, program: Program, values: Values) -> Op:
        query, context = values[call.inputs[0]].data_ptr(), values[call.outputs[0]].data_ptr()
        pools, attend = self._pools[int(call.attributes["layer"])], self._kernels.paged_attention

        def run(step: Step) -> None:
            if self.attention is None:
                raise RuntimeError("attention runs inside a step that planned it")
            attend(query, pools, step.block_tables, step.table_width, step.positions, self.attention, context)

        return run

    def _swiglu(self, call: Call, program: Program, values: Values) -> Op:
        [gate_up], hidden, swiglu = call.inputs, values[call.outputs[0]].data_ptr(), self._kernels.swiglu
        return lambda step: swiglu(values[gate_up].data_ptr(), hidden, step.num_tokens)

    def _gather_rows(self, call: Call, program: Program, values: Values) -> Op:
        source, delta = call.inputs
        residual, gathered = values[source].data_ptr(), values[call.outputs[0]].data_ptr()
        is_bf16, gather = program.value(delta).dtype == "bf16", self._kernels.gather_rows

        def run(step: Step) -> None:
            added = values[delta].data_ptr()
            gather(residual, added, step.logit_index, gathered, step.num_logits, delta_is_bf16=is_bf16)

        return run
