"""How long a step takes as a function of what is in it, and the fit of that function to measured steps."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import combinations

import numpy as np
import numpy.typing as npt

from trtcb.errors import UsageError
from trtcb.executor.runtime import Batch

MIN_FIT_STEPS = 8
MAX_COEFFICIENTS_S = 1e6  # all together


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step's time depends on: tokens computed, sequences, and the keys that all sequences attend to together."""

    tokens: int
    sequences: int
    context_tokens: int

    @staticmethod
    def of(batch: Batch) -> "StepLoad":
        """Measure a batch."""
        last_rows = batch.cu_q[1:] - 1
        context = int(batch.positions[last_rows].sum()) + len(last_rows)
        return StepLoad(len(batch.input_ids), len(last_rows), context)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, linear in its load. With ``base_s`` alone every step takes the same time.

    ``host_s`` is what the engine itself takes for a step, to schedule it, pack it and take its tokens in. It is not in
    :meth:`seconds`, which are the device's.
    """

    base_s: float
    per_token_s: float = 0.0
    per_sequence_s: float = 0.0
    per_context_token_s: float = 0.0
    host_s: float = 0.0

    def __post_init__(self) -> None:
        if min(astuple(self)) < 0 or not 0 < sum(astuple(self)) <= MAX_COEFFICIENTS_S:
            given = ", ".join(f"{field.name} {getattr(self, field.name):g}" for field in fields(self))
            raise UsageError(
                "A step takes time: give coefficients of at least 0 seconds, one of them above it, and of no more than "
                f"{MAX_COEFFICIENTS_S:g} together, not {given}."
            )

    def seconds(self, load: StepLoad) -> float:
        """Time of one step on the device."""
        return (
            self.base_s
            + self.per_token_s * load.tokens
            + self.per_sequence_s * load.sequences
            + self.per_context_token_s * load.context_tokens
        )


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """A fitted model, and how far off it is: median and 95th percentile of ``|predicted / measured - 1|``."""

    model: StepTime
    num_steps: int
    median_error: float
    p95_error: float


def fit_step_time(loads: Sequence[StepLoad], seconds: Sequence[float]) -> StepTimeFit:
    """Fit :class:`StepTime` by least squares of the relative error, with no coefficient below 0.

    Raises ``UsageError`` for fewer than ``MIN_FIT_STEPS`` steps.
    """
    if len(loads) < MIN_FIT_STEPS:
        raise UsageError(f"{len(loads)} steps are too few to fit a step time: measure at least {MIN_FIT_STEPS}.")
    measured = np.asarray(seconds, np.float64)
    features = np.array([(1, load.tokens, load.sequences, load.context_tokens) for load in loads], np.float64)
    coefficients = _non_negative_least_squares(features / measured[:, None], np.ones(len(measured)))
    errors = np.abs(features @ coefficients / measured - 1)
    return StepTimeFit(
        StepTime(*(float(f"{value:.4g}") for value in coefficients)),
        len(loads),
        float(np.median(errors)),
        float(np.percentile(errors, 95)),
    )


def _non_negative_least_squares(
    features: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Solve by trying every subset of columns: the optimum is the plain solution on the columns it uses."""
    width = features.shape[1]
    best, least = np.zeros(width), float(target @ target)
    for size in range(1, width + 1):
        for columns in map(list, combinations(range(width), size)):
            part = np.linalg.lstsq(features[:, columns], target, rcond=None)[0]
            residual = features[:, columns] @ part - target
            if (part >= 0).all() and float(residual @ residual) < least:
                least = float(residual @ residual)
                best = np.zeros(width)
                best[columns] = part
    return best
