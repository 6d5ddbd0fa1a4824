"""How two models' logits differ over a text, summed up in float64 as they come; none are kept."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtcb.executor.runtime import Float32

# Where the reference's best two logits are closer than this, rounding may choose between them.
CLEAR_GAP = 0.25

_ROWS = 16  # rows treated at a time: 6 MiB of float64 a copy with a vocabulary of 49,152

Float64 = npt.NDArray[np.float64]
Targets = npt.NDArray[np.integer[Any]]


@dataclass(slots=True)
class Likelihood:
    """What a model gives the tokens of a text. ``nll`` is the sum of their negative log-likelihoods in nats."""

    num_tokens: int = 0
    nll: float = 0.0

    def add(self, logits: Float32, targets: Targets) -> None:
        """Count rows ``[n, vocab]`` whose next tokens are ``targets [n]``."""
        for rows, wanted in _blocks(logits, targets):
            self._add(_Rows.of(rows), wanted)

    def _add(self, rows: "_Rows", targets: Targets) -> None:
        self.num_tokens += len(targets)
        self.nll += float(np.sum(rows.log_sum - rows.shifted[np.arange(len(targets)), targets]))

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean negative log-likelihood; infinite where that overflows."""
        mean = self.nll / self.num_tokens
        return math.exp(mean) if mean < 700 else math.inf


@dataclass(slots=True)
class Drift:
    """What two models make of one text. ``kl`` sums KL(reference || plan) in nats over all of its tokens.

    A token is clear where the reference's best logit leads by :data:`CLEAR_GAP` or more; the others are near-ties.
    """

    plan: Likelihood
    reference: Likelihood
    kl: float = 0.0
    num_agree: int = 0
    num_clear: int = 0
    num_clear_agree: int = 0

    @classmethod
    def start(cls) -> "Drift":
        """Nothing seen yet."""
        return cls(Likelihood(), Likelihood())

    def add(self, reference: Float32, plan: Float32, targets: Targets) -> None:
        """Count rows ``[n, vocab]`` of both models after the same tokens, whose next tokens are ``targets [n]``."""
        for (ours, wanted), (theirs, _) in zip(_blocks(plan, targets), _blocks(reference, targets), strict=True):
            self._add(_Rows.of(theirs), _Rows.of(ours), wanted)

    def _add(self, reference: "_Rows", plan: "_Rows", targets: Targets) -> None:
        self.reference._add(reference, targets)
        self.plan._add(plan, targets)
        # sum of p_r * (log p_r - log p_p), with log p = shifted - log_sum
        weighted = np.einsum("nv,nv->n", reference.exp, reference.shifted - plan.shifted) / reference.sum
        self.kl += float(np.sum(weighted - reference.log_sum + plan.log_sum))
        best = reference.best
        agree = best == plan.best
        clear = reference.lead() >= CLEAR_GAP
        self.num_agree += int(agree.sum())
        self.num_clear += int(clear.sum())
        self.num_clear_agree += int((agree & clear).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens that were scored."""
        return self.plan.num_tokens

    @property
    def mean_kl(self) -> float:
        """Nats a token."""
        return self.kl / self.num_tokens

    @property
    def top1(self) -> float:
        """Share of the tokens after which both find the same one likeliest."""
        return self.num_agree / self.num_tokens

    @property
    def top1_clear(self) -> float | None:
        """The same among the clear tokens; None if there are none."""
        return self.num_clear_agree / self.num_clear if self.num_clear else None

    @property
    def near_ties(self) -> float:
        """Share of the tokens that are not clear."""
        return 1 - self.num_clear / self.num_tokens

    @property
    def perplexity_ratio(self) -> float:
        """The plan's perplexity over the reference's."""
        return math.exp(min(700.0, (self.plan.nll - self.reference.nll) / self.num_tokens))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of logits in float64, shifted so that the largest is 0."""

    shifted: Float64  # [n, vocab]
    exp: Float64  # [n, vocab]
    sum: Float64  # [n]
    best: npt.NDArray[np.intp]  # [n], of equals the lowest

    @classmethod
    def of(cls, logits: Float32) -> "_Rows":
        best = logits.argmax(axis=1)
        shifted = logits.astype(np.float64)
        shifted -= shifted[np.arange(len(best)), best][:, None]
        exp = np.exp(shifted)
        return cls(shifted, exp, exp.sum(axis=1), best)

    @property
    def log_sum(self) -> Float64:
        result: Float64 = np.log(self.sum)
        return result

    def lead(self) -> Float64:
        """How far the best logit is above the second, ``[n]``; infinite in a vocabulary of one."""
        rows = np.arange(len(self.best))
        self.shifted[rows, self.best] = -np.inf
        second = self.shifted.max(axis=1)
        self.shifted[rows, self.best] = 0.0
        lead: Float64 = -second
        return lead


def _blocks(logits: Float32, targets: Targets) -> "list[tuple[Float32, Targets]]":
    return [(logits[at : at + _ROWS], targets[at : at + _ROWS]) for at in range(0, len(targets), _ROWS)]
