"""Which plan a command means."""

from pathlib import Path

from trtcb.config import BuildConfig
from trtcb.config_sources import did_you_mean
from trtcb.errors import ModelNotFoundError, UsageError


def find_plan(plan: Path | None, model: str | None = None) -> Path:
    """Return ``plan``, or where ``trtcb build --model MODEL`` puts its plan. Raises if it is not there."""
    if (plan is None) == (model is None):
        raise UsageError("name one plan: a file, or --model NAME for the plan that `trtcb build --model NAME` wrote")
    path = plan if plan is not None else BuildConfig(model=str(model)).plan_path
    if path.is_file():
        return path
    near = did_you_mean(path.name, sorted(file.name for file in path.parent.glob("*.plan")))
    fix = near or f": run `trtcb build --model {model or 'NAME'}` first"
    raise ModelNotFoundError(f"there is no plan {path}{fix}")
