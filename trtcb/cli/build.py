"""``trtcb build``: from a model to a plan file."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtcb.config import BuildConfig
from trtcb.config_sources import resolve
from trtcb.errors import OutOfMemoryError, UsageError
from trtcb.memory import available_memory, format_size, parse_size

if TYPE_CHECKING:
    from trtcb.builder.estimate import MemoryEstimate
    from trtcb.builder.report import BuildReport
    from trtcb.spec import ModelSpec

# `--eval` is for a first look, within seconds; `trtcb eval` measures more and has no such bounds.
_EVAL_MAX_PARAMS = 1_000_000_000
_EVAL_TOKENS = 512

_MODEL_HELP = "A folder of safetensors, a .gguf file, a preset (see `trtcb models`) or a hub id."


def build(
    model: Annotated[str | None, typer.Option("--model", "-m", help=_MODEL_HELP, show_default=False)] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The plan to write. [engines/<model>.plan]")
    ] = None,
    target: Annotated[str | None, typer.Option(help="auto, cpu or tensorrt-rtx. [auto: cpu]")] = None,
    weight_dtype: Annotated[
        str | None,
        typer.Option("--weight-dtype", "--dtype", help="auto, fp32, bf16, int8 or int4. [auto: the checkpoint's]"),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype", "--kv-cache-dtype", help="auto, fp32, bf16, fp16, int8 or fp8. [auto: the weights', or bf16]"
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option("--max-batch-size", "--max-num-seqs", help="Sequences in one step. [64]")
    ] = None,
    max_num_tokens: Annotated[
        int | None, typer.Option("--max-num-tokens", "--max-num-batched-tokens", help="Tokens in one step. [512]")
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option("--max-seq-len", "--max-model-len", help="Prompt and output tokens. [the model's, at most 4096]"),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", "--tokens-per-block", help="Tokens in one KV block. [32]")
    ] = None,
    random_weights: Annotated[
        bool | None, typer.Option("--random-weights", help="Invent the weights: any preset's shape, no download.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of --random-weights. [0]")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.", show_default=False)] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of these settings.", show_default=False)
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option("--kv-memory", help="Pool to count blocks for, such as 2GiB.", show_default=False)
    ] = None,
    kv_memory_fraction: Annotated[
        float,
        typer.Option("--kv-memory-fraction", min=0.01, max=1.0, help="Share of the free memory for weights and pool."),
    ] = 0.9,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what it would take, and build nothing.")] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print every setting with its origin, and build nothing.")
    ] = False,
    evaluate: Annotated[
        bool, typer.Option("--eval", help="Also build the model as fp32, and tell how far the plan is from it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "--tp-size", hidden=True)
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None, typer.Option("--pipeline-parallel-size", "--pp-size", hidden=True)
    ] = None,
) -> None:
    """Compile a model into one plan file, which is all that `trtcb serve` needs."""
    flags = {
        "model": model,
        "output": output,
        "target": target,
        "weight_dtype": weight_dtype,
        "kv_dtype": kv_dtype,
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "max_seq_len": max_seq_len,
        "block_size": block_size,
        "random_weights": random_weights,
        "seed": seed,
        "revision": revision,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
    }
    resolved = resolve(BuildConfig, flags=flags, config_file=config)
    pool = None if kv_memory is None else parse_size(kv_memory)
    target = resolved.config.resolved_target()
    if evaluate and target != "cpu":
        raise UsageError(f"--eval runs the plan, and this version cannot run those for {target}: leave it out.")
    if show_config:
        print("\n".join(resolved.lines()))
    elif dry_run:
        _dry_run(resolved.config, pool, kv_memory_fraction, as_json=as_json)
    else:
        _build(resolved.config, pool, kv_memory_fraction, evaluate=evaluate, as_json=as_json)


def _build(config: BuildConfig, pool: int | None, fraction: float, *, evaluate: bool, as_json: bool) -> None:
    from trtcb.builder.build import build as run_build
    from trtcb.cli.progress import stage_display

    with stage_display(size=_stage_size) as display:
        report = run_build(config, display.on_stage, display.on_progress)
    estimate = _estimate_of_plan(report.path, pool, fraction)
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    distance = _distance(config, report) if evaluate else None
    if as_json:
        _print_json(
            {**asdict(report), "path": str(report.path), "estimate": asdict(estimate), "against_fp32": distance}
        )
        return
    _print_rows({**_report_rows(report, estimate), **({} if distance is None else {"against fp32": distance})})
    if config.resolved_target() == "cpu":
        print(f"\nRun it with: trtcb serve {report.path}")
    else:
        print(f"\nThis version of trtcb builds plans for {config.target}, and cannot run them yet.")


def _stage_size(total: int) -> str:
    """A stage's size: weights are counted in bytes, the phases of an engine's build in steps."""
    return format_size(total) if total >= 1000 else f"{total} steps"


def _distance(config: BuildConfig, report: "BuildReport") -> str:
    """How far the new plan is from fp32, in one line, or why that was not measured."""
    if report.num_params > _EVAL_MAX_PARAMS:
        return f"not measured above {_EVAL_MAX_PARAMS / 1e9:g} B parameters, see trtcb eval {report.path}"
    from trtcb.evaluation.evaluation import EvalOptions, evaluate
    from trtcb.evaluation.limits import int4_warning
    from trtcb.evaluation.reference import has_random_weights, open_reference
    from trtcb.evaluation.report import short_form
    from trtcb.plan import Plan

    with Plan.open(report.path, verify="header") as plan:
        if has_random_weights(plan.header):
            return "not measured, because the weights are random"
        reference = open_reference(plan, config, on_note=lambda text: print(text, file=sys.stderr))
        options = EvalOptions(max_tokens=_EVAL_TOKENS, window=_EVAL_TOKENS, needles=False, greedy=False)
        is_int4 = plan.header.weight_dtype == "int4"
        drift = evaluate(plan, reference, options).drift
    if is_int4 and drift is not None and (warning := int4_warning(drift)) is not None:
        print(f"warning: {warning}", file=sys.stderr)
    return short_form(drift)


def _dry_run(config: BuildConfig, pool: int | None, fraction: float, *, as_json: bool) -> None:
    from trtcb.builder.build import compile_options
    from trtcb.builder.estimate import estimate

    spec, checkpoint_dtype = _shape(config)
    options = compile_options(config, spec, checkpoint_dtype)
    limits = options.limits
    result = estimate(
        spec,
        weight_dtype=options.weight_dtype,
        kv_dtype=options.kv_dtype,
        limits=limits,
        available_bytes=available_memory(),
        kv_memory_bytes=pool,
        kv_memory_fraction=fraction,
    )
    if as_json:
        _print_json({"path": str(config.plan_path), **asdict(result)})
        return
    rows = {
        "model": f"{spec.name}, {result.num_params / 1e6:,.1f} M parameters",
        "types": f"weights {options.weight_dtype.value}, KV {options.kv_dtype.value}",
        "limits": f"batch {limits.max_batch_size}, {limits.max_num_tokens} tokens a step, "
        f"sequences of {limits.max_seq_len} tokens, blocks of {limits.block_size}",
        "plan": f"{config.plan_path}, about {format_size(result.plan_bytes)}",
        "activations": format_size(result.activation_bytes),
        **_pool_rows(result),
    }
    _print_rows(rows)
    print("\nDry run: nothing was written.")
    if result.num_blocks < 1:
        raise OutOfMemoryError(
            f"serving this needs {format_size(result.resident_bytes + result.block_bytes)} and more, "
            f"but {format_size(available_memory())} are free here: use a smaller model or a machine with more memory"
        )


def _shape(config: BuildConfig) -> "tuple[ModelSpec, str]":
    """Return the model's spec and its weights' type. A preset whose files are not here is not fetched for this."""
    from trtcb.builder.build import open_checkpoint
    from trtcb.builder.preset_files import local_path
    from trtcb.builder.presets import load_preset, preset_names

    if config.model in preset_names():
        preset = load_preset(config.model)
        if not preset.random_weights and local_path(preset) is None:
            return preset.spec, "bf16"
    checkpoint = open_checkpoint(config)
    return checkpoint.spec, checkpoint.weight_dtype


def _estimate_of_plan(path: Path, pool: int | None, fraction: float) -> "MemoryEstimate":
    from trtcb.builder.estimate import estimate
    from trtcb.plan import Plan
    from trtcb.spec import WeightDtype

    with Plan.open(path, verify="header") as plan:
        header = plan.header
    return estimate(
        header.model,
        weight_dtype=WeightDtype(header.weight_dtype),
        kv_dtype=header.kv_dtype,
        limits=header.limits,
        available_bytes=available_memory(),
        kv_memory_bytes=pool,
        kv_memory_fraction=fraction,
    )


def _report_rows(report: "BuildReport", result: "MemoryEstimate") -> dict[str, str]:
    stages = {f"  {stage.name}": f"{stage.seconds:.2f} s" for stage in report.stages}
    return {
        "plan": f"{report.path}, {format_size(report.plan_bytes)}",
        "parameters": f"{report.num_params / 1e6:,.1f} M",
        **_pool_rows(result),
        "time": f"{sum(stage.seconds for stage in report.stages):.2f} s",
        **stages,
    }


def _pool_rows(result: "MemoryEstimate") -> dict[str, str]:
    return {
        "KV cache": f"{result.kv_bytes_per_token:,} bytes a token ({result.kv_share_of_fp16:.3f} of fp16)",
        "KV pool": f"{format_size(result.pool_bytes)}, "
        f"{result.num_blocks:,} blocks of {format_size(result.block_bytes)}",
        "fits here": f"{result.num_sequences:,} sequences of full length",
    }


def _print_rows(rows: dict[str, str]) -> None:
    for name, value in rows.items():
        print(f"{name:<12} {value}")


def _print_json(data: dict[str, Any]) -> None:
    json.dump(data, sys.stdout, indent=2)
    print()
