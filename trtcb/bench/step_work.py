"""What the calls of a step have to do: the bytes they cannot do without, and their operations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trtcb.plan_format import PlanHeader, TensorInfo
from trtcb.program import Call, Program, Rows

if TYPE_CHECKING:
    from trtcb.executor.step_profile import StepProfile  # with numba, before its threads are set up

GEMM = "GEMM"
ATTENTION = "attention"
_GROUPS = {
    "linear": GEMM,
    "paged_attention": ATTENTION,
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "rope_kv_write": "rope, KV write",
    "swiglu": "activation",
    "quantize": "quantisation",
    "embedding": "embedding, gather",
    "gather_rows": "embedding, gather",
}


@dataclass(slots=True)
class WorkLoad:
    """What some steps computed, all together. Rows of a call are the steps' tokens, or the rows that wanted logits.

    ``steps_with`` counts the steps in which there were any. For contexts and attended tokens see
    :class:`~trtcb.executor.step_profile.StepProfile`.
    """

    rows: dict[Rows, int] = field(default_factory=lambda: {"tokens": 0, "logits": 0})
    steps_with: dict[Rows, int] = field(default_factory=lambda: {"tokens": 0, "logits": 0})
    context_tokens: int = 0
    attended_tokens: int = 0

    def add(self, profile: "StepProfile") -> None:
        """Take in a step."""
        rows: dict[Rows, int] = {"tokens": profile.load.tokens, "logits": profile.num_logits}
        for kind, count in rows.items():
            self.rows[kind] += count
            self.steps_with[kind] += count > 0
        self.context_tokens += profile.load.context_tokens
        self.attended_tokens += profile.attended_tokens


@dataclass(frozen=True, slots=True)
class CallWork:
    """One call of a program: what it is counted under, and its work as a function of the load.

    ``label`` tells products apart by weight and shape and is empty for other calls. Weights are read once a step, keys
    and values once a sequence. A multiply-add is two operations; those of a softmax do not count.
    """

    group: str
    label: str
    rows: Rows
    weight_bytes: int = 0
    flops_per_row: int = 0
    bytes_per_context_token: int = 0
    flops_per_attended_token: int = 0

    def num_bytes(self, load: WorkLoad) -> int:
        """Bytes of weights, or of keys and values; 0 for calls that only move what the one before them wrote."""
        weights = self.weight_bytes * load.steps_with[self.rows]
        return weights + self.bytes_per_context_token * load.context_tokens

    def flops(self, load: WorkLoad) -> int:
        """Operations of products and attention; 0 for other calls."""
        return self.flops_per_row * load.rows[self.rows] + self.flops_per_attended_token * load.attended_tokens


def work_of_calls(program: Program, header: PlanHeader, tensors: Mapping[str, TensorInfo]) -> list[CallWork]:
    """Return the work of each call of a plan's program, in order. An operator unknown here is a group of its own."""
    return [_work(call, program, header, tensors) for call in program.calls]


def _work(call: Call, program: Program, header: PlanHeader, tensors: Mapping[str, TensorInfo]) -> CallWork:
    out = program.value(call.outputs[0])
    group = _GROUPS.get(call.op, call.op)
    if group == GEMM:
        depth = program.value(call.inputs[0]).width
        name = "logits" if out.name == "logits" else call.weights[0].rpartition(".")[2]
        return CallWork(
            group,
            f"{name} {out.width} x {depth}",
            out.rows,
            weight_bytes=sum(tensors[weight].num_bytes for weight in call.weights),
            flops_per_row=2 * out.width * depth,
        )
    if group == ATTENTION:
        model = header.model
        return CallWork(
            group,
            "",
            out.rows,
            bytes_per_context_token=model.kv_bytes_per_token(header.kv_dtype) // model.num_layers,
            flops_per_attended_token=4 * model.q_size,
        )
    return CallWork(group, "", out.rows)
