"""``build``: from what the user asked for to a plan on disk, stage by stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtcb import __version__
from trtcb.atomic_file import check_replaceable
from trtcb.builder.compiler import Compiled, CompileOptions, Compiler
from trtcb.builder.report import BuildReport, OnProgress, OnStage, StageClock, ignore_progress, ignore_stage
from trtcb.builder.sources import resolve
from trtcb.errors import PlanError, UsageError
from trtcb.plan_format import MAGIC, PlanHeader
from trtcb.plan_writer import Section, plan_size, write_plan
from trtcb.plugins.cpu.grouped import GROUP
from trtcb.spec import WeightDtype
from trtcb.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trtcb.builder.checkpoint import Checkpoint
    from trtcb.config import BuildConfig
    from trtcb.spec import ModelSpec
    from trtcb.tokenizer import TokenizerAssets


def build(
    config: BuildConfig, on_stage: OnStage = ignore_stage, on_progress: OnProgress = ignore_progress
) -> BuildReport:
    """Build ``config.model`` into ``config.plan_path``. Weights pass through one tensor at a time.

    Raises :class:`~trtcb.errors.TrtcbError`. On any exception, Ctrl-C included, no partial plan is left behind.
    """
    _refuse_foreign(config.plan_path)
    clock = StageClock(on_stage)
    compiler = _compiler(config.resolved_target())
    clock.start("model")
    checkpoint = open_checkpoint(config, lambda text: on_stage(text, 0))
    options = compile_options(config, checkpoint.spec, checkpoint.weight_dtype)

    clock.start("graph")
    compiled = compiler.compile(checkpoint, options, clock.start, on_progress)
    clock.start("tokenizer")
    header = _header(config, compiler.target, checkpoint, options, compiled)
    assets = checkpoint.assets
    _check_tokenizer(assets, checkpoint.spec)
    sections = (
        *compiled.sections,
        Section.of_bytes("tokenizer", assets.tokenizer_json),
        Section.of_bytes("tokenizer_config", assets.config_json()),
    )
    clock.start("kernels")
    compiler.prepare(checkpoint, options, lambda _: on_progress(1))

    size = plan_size(header, sections, compiled.tensors)
    path = config.plan_path
    clock.start("weights", size)
    write_plan(path, header, sections, compiled.tensors, on_progress)
    return BuildReport(
        path=path,
        plan_bytes=size,
        kv_bytes_per_token=checkpoint.spec.kv_bytes_per_token(options.kv_dtype),
        num_params=checkpoint.spec.num_params,
        stages=clock.finish(),
        warnings=(*checkpoint.notes, *compiled.notes),
    )


def open_checkpoint(config: BuildConfig, report: Callable[[str], None] = lambda _: None) -> Checkpoint:
    """Find the model the configuration names; reads headers only. ``report`` is told of downloads before they start."""
    return resolve(
        config.model,
        random_weights=config.random_weights,
        seed=config.seed,
        revision=config.revision,
        report=report,
    )


def compile_options(config: BuildConfig, spec: ModelSpec, checkpoint_dtype: str) -> CompileOptions:
    """Resolve everything that is ``auto`` against a model and the type its checkpoint has.

    Raises ``UsageError`` for what that model cannot be built with.
    """
    weight_dtype = config.weight_type(checkpoint_dtype)
    if weight_dtype is WeightDtype.INT4:
        _check_depths(spec)
    if config.resolved_target() == "tensorrt-rtx" and weight_dtype is not WeightDtype.BF16:
        raise UsageError(
            f"The target tensorrt-rtx takes bf16 weights and not {weight_dtype.value}: use --weight-dtype bf16."
        )
    return CompileOptions(weight_dtype, config.kv_type(checkpoint_dtype), config.limits(spec))


def _check_depths(spec: ModelSpec) -> None:
    """Refuse what has no whole number of int4's groups."""
    for depth in sorted(depth for _, depth in spec.layer_shapes):
        if depth % GROUP:
            raise UsageError(
                f"Int4 weights have a scale for each {GROUP} of a product's depth, and {spec.name} has a depth "
                f"of {depth}: use --weight-dtype int8."
            )


def _check_tokenizer(assets: TokenizerAssets, spec: ModelSpec) -> None:
    """What a server could not load, or what names tokens the model does not have, is found now and not there."""
    size = Tokenizer(assets).vocab_size
    if size > spec.vocab_size:
        raise PlanError(
            f"the tokenizer has {size} entries and the model {spec.vocab_size}: "
            "they do not belong together, fetch both again"
        )


def _refuse_foreign(path: Path) -> None:
    """A plan may be replaced by a new one; anything else in its place is somebody's file."""
    check_replaceable(path)
    if path.is_file() and path.stat().st_size > 0:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise UsageError(f"{path} is not a plan and will not be overwritten: choose another --output")


def _compiler(target: str) -> Compiler:
    if target == "cpu":
        from trtcb.builder.cpu import CpuCompiler

        return CpuCompiler()
    if target == "tensorrt-rtx":
        from trtcb.builder.rtx import RtxCompiler

        return RtxCompiler()
    raise KeyError(target)


def _header(
    config: BuildConfig, target: str, checkpoint: Checkpoint, options: CompileOptions, compiled: Compiled
) -> PlanHeader:
    return PlanHeader(
        target=target,
        fingerprint=compiled.fingerprint,
        model=checkpoint.spec,
        weight_dtype=options.weight_dtype.value,
        kv_dtype=options.kv_dtype,
        limits=options.limits,
        source={"model": checkpoint.source, "digest": checkpoint.digest},
        versions={"trtcb": __version__, **compiled.versions},
    )
