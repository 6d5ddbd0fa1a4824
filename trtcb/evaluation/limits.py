"""How far a plan may drift before ``trtcb eval`` fails."""

from dataclasses import dataclass, fields

from trtcb.errors import UsageError, ValidationFailedError
from trtcb.evaluation.drift import CLEAR_GAP, Drift

INT4_MAX_KL = 0.008
"""Mean KL, in nats, that int4 weights taken over from blocks of 4 bits stay below."""


def int4_warning(drift: Drift) -> str | None:
    """What to tell of a plan of int4 weights that is too far from fp32; None if it is not."""
    if drift.mean_kl <= INT4_MAX_KL:
        return None
    return (
        f"with int4 weights this model is {drift.mean_kl:.3g} nats a token from fp32 and agrees on {drift.top1:.1%} of "
        f"the likeliest tokens, and above {INT4_MAX_KL:g} nats a loss is to be expected: use --weight-dtype int8."
    )


@dataclass(frozen=True, slots=True)
class DriftLimits:
    """Limits on a :class:`Drift`; None is no limit. ``max_kl`` is in nats, the agreements are shares from 0 to 1."""

    max_kl: float | None = None
    min_top1: float | None = None
    min_top1_clear: float | None = None
    max_perplexity_ratio: float | None = None

    @property
    def given(self) -> bool:
        """Whether there is any limit."""
        return any(getattr(self, field.name) is not None for field in fields(self))

    def require_reference(self, against: str | None) -> None:
        """Raise ``UsageError`` where a limit is given and nothing to compare with."""
        if self.given and against == "none":
            raise UsageError("limits judge the distance from a reference: leave --against none out, or the limits")

    def check(self, drift: Drift) -> None:
        """Raise :class:`ValidationFailedError` naming every limit that is passed over. NaN passes none."""
        clear = drift.top1_clear
        judged = (
            (self.max_kl, drift.mean_kl, "mean KL {:.3g} is above --max-kl {:g}", 1),
            (self.min_top1, drift.top1, "top-1 agreement {:.4f} is below --min-top1 {:g}", -1),
            (
                self.min_top1_clear,
                0.0 if clear is None else clear,
                f"top-1 agreement {{:.4f}} where the reference leads by {CLEAR_GAP} is below --min-top1-clear {{:g}}",
                -1,
            ),
            (
                self.max_perplexity_ratio,
                drift.perplexity_ratio,
                "perplexity ratio {:.6g} is above --max-perplexity-ratio {:g}",
                1,
            ),
        )
        passed = [
            text.format(value, limit)
            for limit, value, text, sign in judged
            if limit is not None and not sign * value <= sign * limit
        ]
        if passed:
            raise ValidationFailedError(
                f"the plan is too far from its reference: {'; '.join(passed)}: "
                "build with wider types (--weight-dtype, --kv-dtype), or widen the limit"
            )
