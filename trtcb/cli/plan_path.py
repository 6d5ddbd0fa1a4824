"""Which plan a command means."""

from pathlib import Path

from trtcb.config import BuildConfig
from trtcb.errors import UsageError


def plan_path(plan: Path | None, model: str | None) -> Path:
    """Return ``plan``, or where ``trtcb build --model MODEL`` puts its plan. Opening it tells whether it is there."""
    if plan is not None and model is None:
        return plan
    if model is not None and plan is None:
        return BuildConfig(model=model).plan_path
    raise UsageError("name one plan: a file, or --model NAME for the plan that `trtcb build --model NAME` wrote")
