"""Runs an evaluation: text, needles and greedy text, first through the reference, then through the plan."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from trtcb.builder.report import OnProgress, OnStage, ignore_progress, ignore_stage
from trtcb.evaluation.divergence import NUM_NEW_TOKENS, Divergence, continuations, diverge
from trtcb.evaluation.drift import Drift, Likelihood
from trtcb.evaluation.logit_file import LogitFile
from trtcb.evaluation.needle import LENGTHS, Haystack, NeedleScore, make_haystack, score_needles
from trtcb.evaluation.reference import tokenizer_of
from trtcb.evaluation.scorer import Scorer
from trtcb.evaluation.text import Window, cut_windows, shipped_prompts, shipped_text
from trtcb.executor.config import EngineConfig
from trtcb.executor.runtime import Float32, Int32
from trtcb.plan import Plan
from trtcb.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 8192
DEFAULT_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What to measure, and on what. ``text`` None is the shipped one; ``window`` tokens are scored with nothing before.

    ``threads`` and ``cpu_engine`` are those of :class:`EngineConfig`, for plan and reference alike. Raises
    ``UsageError`` for values it does not take.
    """

    text: str | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    window: int = DEFAULT_WINDOW
    needles: bool = True
    greedy: bool = True
    threads: int | None = None
    cpu_engine: str = "auto"

    def __post_init__(self) -> None:
        EngineConfig(threads=self.threads, cpu_engine=self.cpu_engine)  # before a reference is built for nothing


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
    def num_scored(self) -> int:
        """Tokens of the text that are scored."""
        return sum(len(window.targets) for window in self.windows)

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

    Only one of them is open at a time: two would fight for the cores and need memory for both. What the reference makes
    of the text lies in the temporary folder meanwhile (:class:`LogitFile`).

    Raises :class:`~trtcb.errors.TrtcbError`: for a text that is too short, a target that cannot run here, memory or
    disk that is not there, and logits that are not numbers.
    """
    with ExitStack() as stack:
        plans = [plan] if reference is None else [plan, reference]
        for each in plans:
            stack.callback(each.close)  # idempotent; a scorer closes its own
        longest = min(each.header.limits.max_seq_len for each in plans)
        material = _material(tokenizer_of(plan), longest, options, has_reference=reference is not None)
        ours, *theirs = [
            _Pass(
                name,
                Scorer(
                    each,
                    num_tokens=_pool_tokens(each, material),
                    threads=options.threads,
                    cpu_engine=options.cpu_engine,
                ),
                material,
                on_stage,
                on_progress,
            )
            for each, name in zip(plans, ("plan", "reference"), strict=False)
        ]
        if not theirs:
            return ours.alone()
        logits = stack.enter_context(LogitFile(material.num_scored, plan.header.model.vocab_size))
        return ours.against(theirs[0].baseline(logits))


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


@dataclass(frozen=True, slots=True)
class _Baseline:
    """What the reference made of the material; ``texts`` are the greedy continuations of the prompts, by name."""

    logits: LogitFile
    needles: tuple[NeedleScore, ...]
    texts: Mapping[str, Sequence[int]]


class _Pass:
    """One model's way through the material. Its runtime is open within :meth:`alone` and the like, and not before."""

    def __init__(
        self, name: str, scorer: Scorer, material: _Material, on_stage: OnStage, on_progress: OnProgress
    ) -> None:
        self._name = name
        self._scorer = scorer
        self._material = material
        self._on_stage = on_stage
        self._on_progress = on_progress

    def alone(self) -> Evaluation:
        """Measure the model by itself."""
        likelihood = Likelihood()
        with self._scorer:
            for rows, targets in self._logits():
                likelihood.add(rows, targets)
            needles = self._needles()
        return Evaluation(likelihood, None, tuple(Needle(score, None) for score in needles), None)

    def baseline(self, logits: LogitFile) -> _Baseline:
        """Find what another model will be compared with; its logits go to ``logits``."""
        with self._scorer:
            for rows, _ in self._logits():
                logits.append(rows)
            return _Baseline(logits, self._needles(), self._texts())

    def against(self, baseline: _Baseline) -> Evaluation:
        """Compare the model with another, whose logits are read once."""
        drift = Drift.start()
        with self._scorer:
            for rows, targets in self._logits():
                drift.add(baseline.logits.read(len(rows)), rows, targets)
            needles = tuple(Needle(*scores) for scores in zip(self._needles(), baseline.needles, strict=True))
            divergence = self._divergence(baseline.texts)
        return Evaluation(drift.plan, drift, needles, divergence)

    def _logits(self) -> Iterator[tuple[Float32, Int32]]:
        """Logits ``[n, vocab]`` over the text, and the tokens that follow there; the next ones overwrite them."""
        self._begin("text", self._material.num_scored)
        for window in self._material.windows:
            at = 0
            for rows in self._scorer.logits(window.inputs):
                yield rows, window.targets[at : at + len(rows)]
                at += len(rows)
                self._on_progress(len(rows))

    def _needles(self) -> tuple[NeedleScore, ...]:
        """Put the needle test to the model, at every length."""
        scores = []
        for haystack in self._material.haystacks:
            self._begin(f"needle {haystack.length // 1024}k", len(haystack.text))
            scores.append(score_needles(self._scorer, haystack, self._on_progress))
        return tuple(scores)

    def _texts(self) -> Mapping[str, Sequence[int]]:
        """Let the model write."""
        prompts = self._material.prompts
        if not prompts:
            return {}
        self._begin("greedy text", len(prompts) * NUM_NEW_TOKENS)
        return continuations(self._scorer, prompts, self._material.eos_ids, self._on_progress)

    def _divergence(self, texts: Mapping[str, Sequence[int]]) -> Divergence | None:
        """See where the model would have parted from these texts."""
        prompts = self._material.prompts
        if not prompts:
            return None
        self._begin("greedy text", sum(len(prompt) + len(texts[name]) for name, prompt in prompts.items()))
        return diverge(self._scorer, prompts, texts, self._on_progress)

    def _begin(self, stage: str, num_tokens: int) -> None:
        self._on_stage(f"{self._name}: {stage}", num_tokens)
