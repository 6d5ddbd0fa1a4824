"""Runs an evaluation: a text through both plans side by side, then the needles, then greedy text."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from trtcb.builder.report import OnProgress, OnStage, ignore_progress, ignore_stage
from trtcb.evaluation.divergence import NUM_NEW_TOKENS, Divergence, continuations, diverge
from trtcb.evaluation.drift import Drift, Likelihood
from trtcb.evaluation.needle import LENGTHS, Haystack, NeedleScore, make_haystack, score_needles
from trtcb.evaluation.reference import tokenizer_of
from trtcb.evaluation.scorer import Scorer, chunk_tokens
from trtcb.evaluation.text import Window, cut_windows, shipped_prompts, shipped_text
from trtcb.plan import Plan
from trtcb.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 8192
DEFAULT_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What to measure. ``text`` None is the shipped one; ``window`` tokens are scored with nothing before them."""

    text: str | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    window: int = DEFAULT_WINDOW
    needles: bool = True
    greedy: bool = True
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Needle:
    """One length of the needle test; ``reference`` is None if there is none."""

    plan: NeedleScore
    reference: NeedleScore | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was found. ``drift`` and ``divergence`` are None without a reference, or where they were not asked for."""

    likelihood: Likelihood
    drift: Drift | None
    needles: tuple[Needle, ...]
    divergence: Divergence | None


@dataclass(frozen=True, slots=True)
class _Material:
    """Everything that will be fed to the plans, as token ids."""

    windows: list[Window]
    haystacks: list[Haystack]
    prompts: Mapping[str, Sequence[int]]
    eos_ids: frozenset[int]

    @property
    def num_pool_tokens(self) -> int:
        """Tokens that one call holds in the cache at most, whole blocks of up to 1,024 not counted."""
        windows = max(len(window.inputs) for window in self.windows)
        haystacks = max((haystack.length for haystack in self.haystacks), default=0)
        return max(windows, haystacks)


def evaluate(
    plan: Plan,
    reference: Plan | None,
    options: EvalOptions,
    on_stage: OnStage = ignore_stage,
    on_progress: OnProgress = ignore_progress,
) -> Evaluation:
    """Measure ``plan`` against ``reference``; takes both over and closes them. Progress is counted in tokens.

    Raises :class:`~trtcb.errors.TrtcbError`: for a text that is too short, a target that cannot run here, memory that
    is not there, and logits that are not numbers.
    """
    with ExitStack() as stack:
        plans = [plan] if reference is None else [plan, reference]
        for each in plans:
            stack.callback(each.close)  # idempotent; a scorer closes its own
        limits = [each.header.limits for each in plans]
        longest = min(limit.max_seq_len for limit in limits)
        material = _material(tokenizer_of(plan), longest, options, has_reference=reference is not None)
        # Both walk through the text in step, so that no more than one chunk of logits is held.
        chunk = min(chunk_tokens(limit) for limit in limits)
        scorers = [
            stack.enter_context(
                Scorer(each, num_tokens=_pool_tokens(each, material), chunk=chunk, threads=options.threads)
            )
            for each in plans
        ]
        run = _Run(scorers[0], scorers[1] if reference is not None else None, on_stage, on_progress)
        likelihood, drift = run.score(material.windows)
        return Evaluation(likelihood, drift, run.find_needles(material.haystacks), run.compare_greedy(material))


def _material(tokenizer: Tokenizer, longest: int, options: EvalOptions, *, has_reference: bool) -> _Material:
    text = shipped_text() if options.text is None else options.text
    ids = tokenizer.encode(text, add_special_tokens=False)
    windows = cut_windows(tokenizer, ids, window=min(options.window, longest), max_tokens=options.max_tokens)
    lengths = [length for length in LENGTHS if length <= longest] if options.needles else []
    haystacks = [make_haystack(tokenizer, shipped_text(), length) for length in lengths]
    prompts = {
        name: prompt
        for name, prompt in (shipped_prompts(tokenizer) if options.greedy and has_reference else {}).items()
        if len(prompt) + NUM_NEW_TOKENS <= longest
    }
    return _Material(windows, haystacks, prompts, tokenizer.eos_token_ids)


def _pool_tokens(plan: Plan, material: _Material) -> int:
    """Size of a pool that holds the longest sequence, and all prompts with their continuations at once."""
    block_size = plan.header.limits.block_size
    blocks = sum(-(-(len(prompt) + NUM_NEW_TOKENS) // block_size) for prompt in material.prompts.values())
    return max(blocks * block_size, material.num_pool_tokens)


class _Run:
    """The parts of an evaluation, on runtimes that are open."""

    def __init__(self, plan: Scorer, reference: Scorer | None, on_stage: OnStage, on_progress: OnProgress) -> None:
        self._plan = plan
        self._reference = reference
        self._on_stage = on_stage
        self._on_progress = on_progress

    def score(self, windows: Sequence[Window]) -> tuple[Likelihood, Drift | None]:
        """Score the text; with a reference, both at once."""
        self._on_stage("text", sum(len(window.inputs) for window in windows))
        likelihood, drift = Likelihood(), Drift.start()
        for window in windows:
            at = 0
            ours = self._plan.logits(window.inputs)
            theirs = iter(()) if self._reference is None else self._reference.logits(window.inputs)
            for rows in ours:
                targets = window.targets[at : at + len(rows)]
                if self._reference is None:
                    likelihood.add(rows, targets)
                else:
                    drift.add(next(theirs), rows, targets)
                at += len(rows)
                self._on_progress(len(rows))
        return (likelihood, None) if self._reference is None else (drift.plan, drift)

    def find_needles(self, haystacks: Sequence[Haystack]) -> tuple[Needle, ...]:
        """Put the needle test to the plan, and to the reference after it."""
        found = []
        models = 1 if self._reference is None else 2
        for haystack in haystacks:
            self._on_stage(f"needle {haystack.length // 1024}k", models * len(haystack.text))
            ours = score_needles(self._plan, haystack, self._on_progress)
            theirs = None if self._reference is None else score_needles(self._reference, haystack, self._on_progress)
            found.append(Needle(ours, theirs))
        return tuple(found)

    def compare_greedy(self, material: _Material) -> Divergence | None:
        """Let the reference write, and see where the plan would have parted from it."""
        if self._reference is None or not material.prompts:
            return None
        prompts = material.prompts
        total = sum(len(prompt) + 2 * NUM_NEW_TOKENS for prompt in prompts.values())
        self._on_stage("greedy text", total)
        texts = continuations(self._reference, prompts, material.eos_ids, self._on_progress)
        return diverge(self._plan, prompts, texts, self._on_progress)
