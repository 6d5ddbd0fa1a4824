"""Where a plan's greedy text first leaves the reference's: what a user sees of rounding."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from trtcb.evaluation.scorer import Scorer

NUM_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Divergence:
    """``firsts``: by prompt, how many tokens both wrote alike before they parted; None if they did not.

    ``num_new`` tokens were compared, fewer where the reference ended its text before.
    """

    num_new: int
    firsts: dict[str, int | None]

    @property
    def num_never(self) -> int:
        """Prompts that both continued alike."""
        return sum(first is None for first in self.firsts.values())

    def quantile(self, share: float) -> int | None:
        """The least number of equal tokens that this share of the prompts does not exceed; None stands for "all"."""
        ordered = sorted(math.inf if first is None else first for first in self.firsts.values())
        value = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
        return None if math.isinf(value) else int(value)


def continuations(
    scorer: Scorer, prompts: Mapping[str, Sequence[int]], eos_ids: frozenset[int], on_tokens: Callable[[int], None]
) -> dict[str, list[int]]:
    """The greedy text of every prompt, up to :data:`NUM_NEW_TOKENS` tokens or its end token."""
    rows: list[list[int]] = []
    for tokens in scorer.greedy(list(prompts.values()), NUM_NEW_TOKENS):
        rows.append(tokens)
        on_tokens(len(tokens))
    texts = {}
    for name, column in zip(prompts, zip(*rows, strict=True), strict=True):
        end = next((at + 1 for at, token in enumerate(column) if token in eos_ids), len(column))
        texts[name] = list(islice(column, end))
    return texts


def diverge(
    scorer: Scorer,
    prompts: Mapping[str, Sequence[int]],
    texts: Mapping[str, Sequence[int]],
    on_tokens: Callable[[int], None],
) -> Divergence:
    """Compare a plan with the reference's ``texts``.

    Up to the first difference both models see the same tokens, and a row's logits depend on nothing else; so feeding
    the reference's text at once finds the very place where the plan, left alone, would have parted from it.
    """
    firsts: dict[str, int | None] = {}
    for name, prompt in prompts.items():
        text = texts[name]
        best = [rows.argmax(axis=1) for rows in scorer.logits([*prompt, *text[:-1]])]
        drawn = np.concatenate(best)[len(prompt) - 1 :]
        differs = np.flatnonzero(drawn != np.asarray(text))
        firsts[name] = int(differs[0]) if len(differs) else None
        on_tokens(len(prompt) + len(text))
    return Divergence(NUM_NEW_TOKENS, firsts)
