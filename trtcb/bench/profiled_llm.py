"""A plan on an engine whose steps are profiled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtcb.bench.step_breakdown import StepBreakdown
from trtcb.bench.step_work import work_of_calls
from trtcb.errors import UsageError
from trtcb.executor.config import EngineConfig
from trtcb.executor.cpu_runtime import NOT_PROFILABLE, CpuRuntime
from trtcb.executor.llm import LLM
from trtcb.executor.program_check import checked_program
from trtcb.executor.served_model import ServedModel
from trtcb.executor.stats import StepStats
from trtcb.plan import Plan


def empty_breakdown(path: Path) -> StepBreakdown:
    """Make the breakdown of a plan's steps, before there are any."""
    with Plan.open(path, verify="header") as plan:
        return StepBreakdown(work_of_calls(checked_program(plan), plan.header, plan.tensors))


def open_profiled(path: Path, breakdown: StepBreakdown, on_step: Callable[[StepStats], None], **settings: Any) -> LLM:
    """Open a plan as ``LLM(path, ...)`` does, on a whole-step engine that tells ``breakdown`` of its steps.

    Raises ``UsageError`` for another engine, and for settings that let steps overlap.
    """
    config = EngineConfig(**settings)
    if config.overlap_depth:
        raise UsageError("A profile takes steps one at a time: leave --overlap-depth out.")
    if config.cpu_engine == "portable":  # before a plan is loaded for nothing
        raise UsageError(NOT_PROFILABLE)
    served = ServedModel.from_plan(path, config)
    try:
        if not isinstance(served.runtime, CpuRuntime):
            raise UsageError("Only plans for the target cpu can be profiled: rebuild it with --target cpu.")
        served.runtime.profile(breakdown.profile)
        return LLM(runtime=served.runtime, tokenizer=served.tokenizer, model=served.model, on_step=on_step, **settings)
    except BaseException:
        served.runtime.close()
        raise
