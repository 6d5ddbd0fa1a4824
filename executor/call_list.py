"""Binds a :class:`~trtcb.program.Program` to memory: one closure per call, run in order, nothing resolved in between.

The same list serves every target that runs its calls one by one; what differs is the table of operators it is bound
with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtcb.errors import PlanError
from trtcb.program import Call, Program

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Step:
    """What the calls of one step share. Addresses are of int32 arrays that outlive the step."""

    num_tokens: int
    num_logits: int
    num_sequences: int
    table_width: int
    input_ids: int
    positions: int
    slot_mapping: int
    cu_q: int
    block_tables: int
    logit_index: int

    def num_rows(self, rows: str) -> int:
        """Live rows of a value: ``rows`` is ``"tokens"`` or ``"logits"``."""
        return self.num_tokens if rows == "tokens" else self.num_logits


Op = Callable[[Step], None]
Values = dict[str, "torch.Tensor"]
"""Every value of the program by name. A call may replace its output; rows past the live ones are stale but finite."""

BindOp = Callable[[Call, Program, Values], Op]


def allocate_values(program: Program, max_num_tokens: int, max_num_logits: int) -> Values:
    """Zeroed storage for every value, wide enough for the largest step."""
    import torch

    from trtcb.plugins.cpu.rows import QUANTIZED

    rows = {"tokens": max_num_tokens, "logits": max_num_logits}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, **dict.fromkeys(QUANTIZED, torch.uint8)}
    widths = {v.name: QUANTIZED[v.dtype](v.width) if v.dtype in QUANTIZED else v.width for v in program.values}
    return {v.name: torch.zeros(rows[v.rows], widths[v.name], dtype=dtypes[v.dtype]) for v in program.values}


def bind_program(program: Program, values: Values, operators: Mapping[str, BindOp]) -> tuple[Op, ...]:
    """Resolve every call once. A call without an operator means the plan is newer than this trtcb: ``PlanError``."""
    bound = []
    for call in program.calls:
        if call.op not in operators:
            raise PlanError(f"the plan calls {call.op!r}, which this trtcb does not know: rebuild it")
        bound.append(operators[call.op](call, program, values))
    return tuple(bound)
