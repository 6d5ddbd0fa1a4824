"""``trtcb eval``: how far a plan is from the model it was built from."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtcb.cli.engine_flags import CPU_ENGINE_HELP

if TYPE_CHECKING:
    from trtcb.evaluation.evaluation import EvalOptions, Evaluation
    from trtcb.evaluation.limits import DriftLimits
    from trtcb.plan_format import PlanHeader

_NAME_WIDTH = len("reference: greedy text")  # of the longest stage


def evaluate(
    plan: Annotated[Path, typer.Argument(help="The plan to judge.", show_default=False)],
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare with this plan, or with this model built as fp32; none: perplexity alone. "
            "[the plan's own model, built as fp32 weights and KV]"
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to score. [the shipped one]")] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the text to score at most; the shipped one has about 33,000.")
    ] = 8192,
    window: Annotated[int, typer.Option(min=1, help="Tokens scored in one go, with nothing before them.")] = 1024,
    needle: Annotated[bool, typer.Option("--needle/--no-needle", help="Ask for facts hidden in long texts.")] = True,
    greedy: Annotated[
        bool, typer.Option("--greedy/--no-greedy", help="Find where greedy text leaves the reference's.")
    ] = True,
    max_kl: Annotated[float | None, typer.Option(min=0.0, help="Fail above this mean KL, in nats.")] = None,
    min_top1: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Fail below this share of equal likeliest tokens.")
    ] = None,
    min_top1_clear: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="The same where the reference's best leads by 0.25.")
    ] = None,
    max_perplexity_ratio: Annotated[
        float | None, typer.Option(min=0.0, help="Fail above this perplexity relative to the reference's.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the engines. [one a core]")] = None,
    cpu_engine: Annotated[str, typer.Option(help=CPU_ENGINE_HELP, show_default=False)] = "auto",
) -> None:
    """Score text with a plan and with an fp32 reference, and tell how far apart they are.

    Ends with exit code 6 if a limit is passed over.
    """
    from trtcb.atomic_file import check_replaceable
    from trtcb.evaluation.evaluation import EvalOptions
    from trtcb.evaluation.limits import DriftLimits
    from trtcb.evaluation.report import text_report
    from trtcb.evaluation.text import read_text

    limits = DriftLimits(max_kl, min_top1, min_top1_clear, max_perplexity_ratio)
    limits.require_reference(against)
    if json_file is not None:
        check_replaceable(json_file)
    options = EvalOptions(
        text=None if text is None else read_text(text),
        max_tokens=max_tokens,
        window=window,
        needles=needle,
        greedy=greedy,
        threads=threads,
        cpu_engine=cpu_engine,
    )
    found, header, reference = _run(plan, against, options)
    print(text_report(found))
    if json_file is not None:
        _write_json(json_file, plan, text, options, found, header, reference, limits)
    if found.drift is not None:
        limits.check(found.drift)


def _run(path: Path, against: str | None, options: "EvalOptions") -> "tuple[Evaluation, PlanHeader, PlanHeader | None]":
    from trtcb.cli.progress import stage_display
    from trtcb.evaluation.evaluation import evaluate as run_evaluation
    from trtcb.evaluation.reference import has_random_weights, open_reference, tokenizer_of
    from trtcb.evaluation.report import types_of
    from trtcb.plan import Plan

    with Plan.open(path) as plan:
        header = plan.header
        tokenizer_of(plan)  # before a reference is built for nothing
        print(f"{path}: {header.model.name}, {types_of(header)}")
        if has_random_weights(header):
            print(
                "note: its weights are random, so only the distance from its reference means anything", file=sys.stderr
            )
        reference = None
        if against != "none":
            with stage_display(name_width=_NAME_WIDTH) as shown:
                reference = open_reference(
                    plan, against, on_note=_note, on_stage=shown.on_stage, on_progress=shown.on_progress
                )
            print(f"against {against or 'its own model'}: {types_of(reference.header)}")
        print(flush=True)
        compared = None if reference is None else reference.header
        with stage_display(size=lambda tokens: f"{tokens:,} tok", name_width=_NAME_WIDTH) as shown:
            return run_evaluation(plan, reference, options, shown.on_stage, shown.on_progress), header, compared


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _write_json(
    file: Path,
    plan: Path,
    text: Path | None,
    options: "EvalOptions",
    found: "Evaluation",
    header: "PlanHeader",
    reference: "PlanHeader | None",
    limits: "DriftLimits",
) -> None:
    from dataclasses import asdict

    from trtcb.atomic_file import atomic_file
    from trtcb.evaluation.report import to_json

    def described(header: "PlanHeader") -> dict[str, object]:
        types = {"weight_dtype": header.weight_dtype, "kv_dtype": header.kv_dtype.value}
        return {"model": header.model.name, **types, "source": header.source, "versions": header.versions}

    report = {
        "plan": {"path": str(plan), **described(header)},
        "reference": None if reference is None else described(reference),
        "text": "shipped" if text is None else str(text),
        "window": options.window,
        "limits": asdict(limits),
        **to_json(found),
    }
    with atomic_file(file) as out:
        out.write((json.dumps(report, indent=1) + "\n").encode())
