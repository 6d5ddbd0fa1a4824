"""The needle test: facts hidden in a long text, asked for at its end, scored by how likely the right answer is.

A small model need not *say* the answer to pass: its log-likelihood, given all the text before it, is compared with
those of the other hidden facts' answers. That the wrong answers stand in the text as well makes it a test of finding
the right place, not of remembering a word.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean

import numpy as np

from trtcb.errors import UsageError
from trtcb.evaluation.drift import Likelihood
from trtcb.evaluation.scorer import Scorer
from trtcb.tokenizer import Tokenizer

LENGTHS = (2048, 4096, 8192)

FACT = "Note: the password of {name} is {word}."
QUESTION = "Question: what is the password of {name}?\nAnswer: the password of {name} is"
ANSWERS = {
    "Martha": "lemon",
    "Victor": "river",
    "Sophie": "hammer",
    "Daniel": "velvet",
    "Helen": "tiger",
    "Oscar": "window",
    "Clara": "pepper",
    "Simon": "castle",
}


@dataclass(frozen=True, slots=True)
class Haystack:
    """A text of filler with every fact in it, evenly spread, and what is asked about it; all as token ids."""

    length: int
    text: list[int]
    depths: dict[str, float]  # where each name's fact begins, as a share of the text
    questions: dict[str, list[int]]
    answers: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class NeedleScore:
    """How a model fared with one haystack.

    ``margins``: nats by which each fact's right answer leads the best wrong one, in order of depth; below 0 it was not
    found.
    """

    length: int
    margins: tuple[float, ...]

    @property
    def num_right(self) -> int:
        """Facts whose own answer is the likeliest."""
        return sum(margin > 0 for margin in self.margins)

    @property
    def mean_margin(self) -> float:
        """Mean lead of the right answer in nats."""
        return fmean(self.margins)


def make_haystack(tokenizer: Tokenizer, filler: str, length: int) -> Haystack:
    """Fill exactly ``length`` tokens, the longest question and answer included; short filler is repeated.

    The facts stand in the middles of equal parts. Raises ``UsageError`` if not even they fit.
    """
    questions = {name: tokenizer.encode("\n\n" + QUESTION.format(name=name), False) for name in ANSWERS}
    answers = {name: tokenizer.encode(f" {word}", False) for name, word in ANSWERS.items()}
    facts = {
        name: tokenizer.encode(f"\n\n{FACT.format(name=name, word=word)}\n\n", False) for name, word in ANSWERS.items()
    }
    text = tokenizer.encode("")  # what the model begins every text with
    room = length - max(map(len, questions.values())) - max(map(len, answers.values()))
    num_filler = room - len(text) - sum(map(len, facts.values()))
    if num_filler < len(facts):
        raise UsageError(f"the needle test's facts take more than {length} tokens of this tokenizer: use --no-needle")
    stream = cycle(tokenizer.encode(filler, False))
    depths: dict[str, float] = {}
    used = 0
    for index, (name, fact) in enumerate(facts.items()):
        until = num_filler * (2 * index + 1) // (2 * len(facts))
        text += islice(stream, until - used)
        used = until
        depths[name] = len(text) / room
        text += fact
    text += islice(stream, num_filler - used)
    return Haystack(length, text, depths, questions, answers)


def score_needles(scorer: Scorer, haystack: Haystack, on_tokens: Callable[[int], None]) -> NeedleScore:
    """Read the text once, then ask for each fact in its place after the text."""
    for begin in range(0, len(haystack.text), scorer.chunk):
        part = haystack.text[begin : begin + scorer.chunk]
        scorer.read(part, begin)
        on_tokens(len(part))
    margins = []
    for name in haystack.depths:
        found = _log_likelihoods(scorer, haystack, haystack.questions[name])
        margins.append(found[name] - max(value for other, value in found.items() if other != name))
    return NeedleScore(haystack.length, tuple(margins))


def _log_likelihoods(scorer: Scorer, haystack: Haystack, question: Sequence[int]) -> dict[str, float]:
    """Nats of every answer after text and question; what an earlier call left behind the text is overwritten."""
    start = len(haystack.text)
    for rows in scorer.logits(question, start):
        last = rows[-1:].copy()
    found = {}
    for name, answer in haystack.answers.items():
        likelihood = Likelihood()
        likelihood.add(last, np.array(answer[:1]))
        at = 1
        for rows in scorer.logits(answer[:-1], start + len(question)):
            likelihood.add(rows, np.array(answer[at : at + len(rows)]))
            at += len(rows)
        found[name] = -likelihood.nll
    return found
