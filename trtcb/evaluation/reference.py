"""What a plan is compared with: another plan, or a model built as fp32 weights and fp32 KV for the time being."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from trtcb.builder.build import build, open_checkpoint
from trtcb.builder.report import OnProgress, OnStage, ignore_progress, ignore_stage
from trtcb.config import BuildConfig
from trtcb.errors import ModelNotFoundError, OutOfMemoryError, TrtcbError, UsageError
from trtcb.memory import available_memory, format_size
from trtcb.plan import Plan
from trtcb.plan_format import MAGIC, PlanHeader
from trtcb.tokenizer import Tokenizer, TokenizerAssets

_RANDOM = re.compile(r"(?P<model>.+) \(random weights, seed (?P<seed>\d+)\)")
_WAY_OUT = "name it with --against MODEL, or measure the plan alone with --against none"


def open_reference(
    plan: Plan,
    against: str | BuildConfig | None,
    *,
    on_note: Callable[[str], None] = lambda _: None,
    on_stage: OnStage = ignore_stage,
    on_progress: OnProgress = ignore_progress,
) -> Plan:
    """Open the plan to compare ``plan`` with; the caller closes it.

    ``against`` names a plan, or a model as ``trtcb build --model`` takes it, or is how to build one (its types and
    limits do not matter); None is the model that ``plan`` was built from. A model is built in the temporary folder, at
    four bytes a parameter, and leaves that folder as soon as it is open: its room on the disk is given back when the
    plan is closed or the process ends, however it ends.

    Raises :class:`ModelNotFoundError` if the source is not here, :class:`OutOfMemoryError` before building what would
    not fit, and ``UsageError`` if the source has changed or the reference is of another model.
    """
    if isinstance(against, str) and (is_plan(Path(against)) or against.endswith(".plan")):  # which says what is missing
        return _checked(plan, Plan.open(against))
    if against is None:
        against = _source(plan)
    config = (BuildConfig(model=against) if isinstance(against, str) else against).model_copy(
        update={
            "weight_dtype": "fp32",
            "kv_dtype": "fp32",
            "max_seq_len": plan.header.limits.max_seq_len,
            "max_num_tokens": plan.header.limits.max_num_tokens,
            "max_batch_size": plan.header.limits.max_batch_size,
            "block_size": plan.header.limits.block_size,
        }
    )
    size = 4 * plan.header.model.num_params
    _check_memory(plan, size)
    on_note(
        f"building {config.model} as fp32 to compare with: {format_size(size)} in {tempfile.gettempdir()} until it "
        "has been read, and kernels are compiled if fp32 was never built here"
    )
    with tempfile.TemporaryDirectory(prefix="trtcb-eval-") as folder:
        path = Path(folder) / "reference.plan"
        build(config.model_copy(update={"output": path}), on_stage, on_progress)
        reference = Plan.open(path, verify="header")  # it was written a moment ago
    return _checked(plan, reference)


def is_plan(path: Path) -> bool:
    """Whether a file begins as a plan does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def has_random_weights(header: PlanHeader) -> bool:
    """Whether a plan's weights were invented."""
    return _RANDOM.fullmatch(header.source.get("model", "")) is not None


def tokenizer_of(plan: Plan) -> Tokenizer:
    """The plan's tokenizer; raises ``UsageError`` if it has none."""
    if not plan.has_section("tokenizer") or not plan.has_section("tokenizer_config"):
        raise UsageError(
            f"{plan.path} has no tokenizer, and text cannot be scored without: build it with `trtcb build`"
        )
    sections = plan.section("tokenizer"), plan.section("tokenizer_config")
    return Tokenizer(TokenizerAssets.from_sections(*sections))


def _source(plan: Plan) -> BuildConfig:
    """How to open the model that ``plan`` was built from, once it is sure that it is the same."""
    source, digest = plan.header.source.get("model", ""), plan.header.source.get("digest")
    if not source or digest is None:
        raise ModelNotFoundError(f"{plan.path} does not tell what it was built from: {_WAY_OUT}")
    random = _RANDOM.fullmatch(source)
    config = (
        BuildConfig(model=source)
        if random is None
        else BuildConfig(model=random["model"], random_weights=True, seed=int(random["seed"]))
    )
    try:
        found = open_checkpoint(config).digest
    except TrtcbError as error:
        raise ModelNotFoundError(
            f"{plan.path} was built from '{source}', which cannot be opened here ({error}): {_WAY_OUT}"
        ) from error
    if found != digest:
        raise UsageError(f"'{source}' is no longer what {plan.path} was built from: rebuild the plan, or {_WAY_OUT}")
    return config


def _check_memory(plan: Plan, reference_bytes: int) -> None:
    available = available_memory()
    if reference_bytes > available:
        raise OutOfMemoryError(
            f"the weights of the fp32 reference of {plan.path} take {format_size(reference_bytes)}, and "
            f"{format_size(available)} are free: compare with a plan of narrower weights (--against PLAN), or measure "
            "the plan alone with --against none"
        )


def _checked(plan: Plan, reference: Plan) -> Plan:
    """Return ``reference`` if its token ids mean what the plan's do, and close it otherwise."""
    try:
        if not _same_vocabulary(tokenizer_of(plan), tokenizer_of(reference)):
            raise UsageError(
                f"{plan.path} and {reference.path.name} ({reference.header.model.name}) have different tokenizers, so "
                "their logits cannot be compared: name the model that the plan was built from with --against"
            )
        ours, theirs = plan.header.model.vocab_size, reference.header.model.vocab_size
        if ours != theirs:
            raise UsageError(
                f"{plan.path} has {ours} logits and {reference.header.model.name} {theirs}: "
                "name the model that the plan was built from with --against"
            )
    except BaseException:
        reference.close()
        raise
    return reference


def _same_vocabulary(ours: Tokenizer, theirs: Tokenizer) -> bool:
    if ours.vocab_size != theirs.vocab_size:
        return False
    return all(ours.id_to_token(token) == theirs.id_to_token(token) for token in range(ours.vocab_size))
