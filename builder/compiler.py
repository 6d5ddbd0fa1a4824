"""What a target's compiler takes and gives. One implementation per target; it meets its runtime in the plan file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trtcb.spec import BuildLimits, KVDtype, WeightDtype

if TYPE_CHECKING:
    from trtcb.builder.checkpoint import Checkpoint
    from trtcb.builder.report import OnProgress, OnStage
    from trtcb.plan_writer import Section, TensorSource


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """The choices that shape an engine."""

    weight_dtype: WeightDtype
    kv_dtype: KVDtype
    limits: BuildLimits


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the target adds to the plan. Tensors are loaded one at a time, while the plan is written.

    ``notes`` are sentences that a user should see.
    """

    fingerprint: dict[str, str]
    sections: tuple[Section, ...]
    tensors: tuple[TensorSource, ...]
    versions: dict[str, str]
    notes: tuple[str, ...] = ()


class Compiler(Protocol):
    """Turns a checkpoint into the sections of one target's plan."""

    target: str

    def compile(
        self, checkpoint: Checkpoint, options: CompileOptions, on_stage: OnStage, on_progress: OnProgress
    ) -> Compiled:
        """Export and compile. Raises :class:`~trtcb.errors.TrtcbError`.

        Weights that are in ``tensors`` are not read yet. What takes long is a stage of its own.
        """

    def prepare(self, checkpoint: Checkpoint, options: CompileOptions, on_progress: Callable[[str], None]) -> None:
        """Build what the runtime would otherwise build at its first start on this machine (kernels)."""
