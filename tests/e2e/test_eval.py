"""``trtcb eval`` on real engines: small random plans as processes, and the real model against the accepted limits."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden.array_checkpoint import TINY, random_checkpoint
from tests.golden.cpu_plan import write_cpu_plan
from trtcb.builder.build import build
from trtcb.config import BuildConfig
from trtcb.errors import OutOfMemoryError, TargetUnavailableError
from trtcb.evaluation.evaluation import EvalOptions, Evaluation, evaluate
from trtcb.evaluation.limits import INT4_MAX_KL, DriftLimits
from trtcb.plan import Plan
from trtcb.spec import BuildLimits, KVDtype, WeightDtype

QUICK = ("--max-tokens", "200", "--no-needle", "--no-greedy")


def trtcb(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtcb", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plans")
    settings = {
        "fp8": {"kv_dtype": "fp8", "max_seq_len": 2048},
        "fp32": {"kv_dtype": "fp32", "max_seq_len": 2048},
        "seeded": {"random_weights": True, "seed": 7, "max_seq_len": 256},
    }
    for name, values in settings.items():
        build(BuildConfig(model="tiny-random", output=folder / f"{name}.plan", **values))
    return {name: folder / f"{name}.plan" for name in settings}


def measured(plan: Path, reference: Path | None, **options: object) -> Evaluation:
    return evaluate(
        Plan.open(plan),
        None if reference is None else Plan.open(reference),
        EvalOptions(**options),
    )


def test_a_plan_is_no_distance_from_itself(plans: dict[str, Path]) -> None:
    found = measured(plans["fp8"], plans["fp8"], max_tokens=700, window=300)
    assert found.drift is not None
    assert found.divergence is not None
    assert (found.drift.mean_kl, found.drift.top1, found.drift.perplexity_ratio) == (0.0, 1.0, 1.0)
    assert found.drift.num_tokens == 700
    assert found.divergence.num_never == len(found.divergence.firsts) >= 12
    [needle] = found.needles
    assert needle.plan == needle.reference


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the runtimes of an evaluation in this process, in order: ``open NAME`` and ``close NAME``."""
    from trtcb.evaluation import scorer

    events: list[str] = []

    class Watched(scorer.CpuRuntime):
        def __init__(self, plan: Plan, **settings: int) -> None:
            self.name = plan.path.name
            super().__init__(plan, **settings)
            events.append(f"open {self.name}")

        def close(self) -> None:
            super().close()
            events.append(f"close {self.name}")

    monkeypatch.setattr(scorer, "CpuRuntime", Watched)
    return events


def test_one_runtime_is_open_at_a_time(plans: dict[str, Path], runtimes: list[str]) -> None:
    assert measured(plans["fp8"], plans["fp32"], max_tokens=50, needles=False, greedy=False).drift is not None
    assert runtimes == ["open fp32.plan", "close fp32.plan", "open fp8.plan", "close fp8.plan"]


def test_both_plans_run_on_the_engine_that_was_asked_for(
    plans: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtcb.executor import cpu_runtime

    opened: list[str] = []
    open_engine = cpu_runtime._open_engine

    def watched(name: str, plan: Plan, **settings: int) -> cpu_runtime.CpuEngine:
        opened.append(name)
        return open_engine(name, plan, **settings)

    monkeypatch.setattr(cpu_runtime, "_open_engine", watched)
    measured(plans["fp8"], plans["fp32"], max_tokens=50, needles=False, greedy=False, cpu_engine="whole_step")
    assert opened == ["whole_step", "whole_step"]


def test_an_engine_that_does_not_exist_is_refused_before_anything_runs(plans: dict[str, Path]) -> None:
    done = trtcb("eval", plans["fp8"], "--cpu-engine", "whole-step")
    assert done.returncode == 2
    assert done.stderr.startswith("error: cpu_engine 'whole-step' is unknown: did you mean 'whole_step'?")


def test_what_cannot_run_is_told_before_the_other_is_scored(
    plans: dict[str, Path], runtimes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, reference = Plan.open(plans["fp8"]), Plan.open(plans["fp32"])
    plan.header = replace(plan.header, target="other")
    with pytest.raises(TargetUnavailableError, match=r"fp8\.plan is for the target 'other'"):
        evaluate(plan, reference, EvalOptions(max_tokens=50))
    monkeypatch.setattr("trtcb.executor.open_runtime.available_memory", lambda: 1 << 16)
    with pytest.raises(OutOfMemoryError):
        measured(plans["fp8"], plans["fp32"], max_tokens=50)
    assert runtimes == []


def test_a_reference_that_fails_is_closed(plans: dict[str, Path], runtimes: list[str]) -> None:
    """Ctrl-C in the middle of the text: the plan is never opened."""

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    plan, reference = Plan.open(plans["fp8"]), Plan.open(plans["fp32"])
    with pytest.raises(KeyboardInterrupt):
        evaluate(plan, reference, EvalOptions(max_tokens=50), on_progress=interrupt)
    assert runtimes == ["open fp32.plan", "close fp32.plan"]
    for each in (plan, reference):
        with pytest.raises(ValueError, match="released"):
            each.section("program")


def test_greedy_text_parts_where_the_engine_says_it_does(plans: dict[str, Path]) -> None:
    """Reading the reference's text at once finds the place that letting both plans write finds."""
    from trtcb import LLM, SamplingParams
    from trtcb.evaluation.reference import tokenizer_of
    from trtcb.evaluation.text import shipped_prompts

    found = measured(plans["fp8"], plans["fp32"], max_tokens=50, needles=False).divergence
    assert found is not None
    with Plan.open(plans["fp8"]) as plan:
        tokenizer = tokenizer_of(plan)
        prompts = shipped_prompts(tokenizer)
    texts = []
    for name in ("fp8", "fp32"):
        with LLM(plans[name], max_batch_size=20) as llm:
            params = SamplingParams(max_tokens=64, temperature=0)
            texts.append([c.token_ids for c in llm.generate([prompts[name] for name in found.firsts], params)])
    for first, ours, theirs in zip(found.firsts.values(), *texts, strict=True):
        same = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        assert first == same
    assert any(first is not None for first in found.firsts.values())


def test_the_reference_is_rebuilt_from_the_source(plans: dict[str, Path], tmp_path: Path) -> None:
    """fp32 weights and KV of the same seed are the same model."""
    out = tmp_path / "eval.json"
    result = trtcb("eval", plans["seeded"], *QUICK, "--max-kl", "0", "--min-top1", "1", "--json", out)
    assert result.returncode == 0, result.stderr
    assert "random" in result.stderr
    assert "reference: text (200 tok)" in result.stderr.splitlines()
    assert "plan: text (200 tok)" in result.stderr.splitlines()
    report = json.loads(out.read_text())
    assert report["drift"]["mean_kl"] == 0.0
    assert report["reference"]["kv_dtype"] == "fp32"
    assert report["num_tokens"] == 200
    assert report["plan"]["path"] == str(plans["seeded"])


def test_drift_past_a_limit_is_exit_code_6_after_the_table(plans: dict[str, Path]) -> None:
    result = trtcb("eval", plans["fp8"], "--against", plans["fp32"], *QUICK, "--max-kl", "1e-9")
    assert result.returncode == 6
    assert "mean KL" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("error: the plan is too far from its reference: mean KL")


def test_perplexity_alone(plans: dict[str, Path]) -> None:
    result = trtcb("eval", plans["fp8"], "--against", "none", "--max-tokens", "100")
    assert result.returncode == 0, result.stderr
    assert "perplexity" in result.stdout
    assert "reference" not in result.stdout
    refused = trtcb("eval", plans["fp8"], "--against", "none", "--max-kl", "1")
    assert refused.returncode == 2
    assert "--against none" in refused.stderr


def test_another_tokenizer_or_a_lost_source_is_one_sentence(plans: dict[str, Path], tmp_path: Path) -> None:
    checkpoint, limits = random_checkpoint(TINY, seed=1), BuildLimits(max_seq_len=TINY.max_position)
    bare = write_cpu_plan(tmp_path / "bare.plan", checkpoint, WeightDtype.FP32, KVDtype.FP32, limits)
    lost = {"model": str(tmp_path / "gone.gguf"), "digest": "sha256:0"}
    gone = _rewrite(plans["fp8"], tmp_path / "gone.plan", source=lost)
    other = {"model": "tiny-random (random weights, seed 1)", "digest": "sha256:0"}
    changed = _rewrite(plans["fp8"], tmp_path / "changed.plan", source=other)
    foreign = _rewrite(plans["fp8"], tmp_path / "foreign.plan", old=b"<|bos|>", new=b"<|top|>")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    cases = (
        ((bare,), 2, "no tokenizer"),
        ((gone,), 3, "--against MODEL"),
        ((changed,), 2, "no longer what"),
        ((plans["fp8"], "--against", "no-such-model"), 3, "no-such-model"),
        ((plans["fp8"], "--against", foreign), 2, "different tokenizers"),
        ((plans["fp8"], "--text", empty), 2, "is empty"),
        ((tmp_path / "missing.plan",), 3, "missing.plan"),
        ((plans["fp8"], "--json", tmp_path), 2, "regular file"),
    )
    for arguments, code, message in cases:
        result = trtcb("eval", *arguments, *QUICK)
        assert result.returncode == code, (arguments, result.stderr)
        assert message in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr


def test_ctrl_c_ends_it_and_leaves_no_file(plans: dict[str, Path], tmp_path: Path) -> None:
    handler = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a background job ignores it
    code = f"{handler}; from trtcb.cli.main import main; main()"
    command = [sys.executable, "-c", code, "eval", str(plans["fp8"]), "--max-tokens", "100000", "--window", "32"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert process.stdout is not None
    assert "tiny-random" in process.stdout.readline() + process.stdout.readline()  # the runtimes open next
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_a_build_of_random_weights_says_why_it_is_not_measured(tmp_path: Path) -> None:
    result = trtcb("build", "--model", "tiny-random", "--eval", "-o", tmp_path / "x.plan")
    assert result.returncode == 0, result.stderr
    assert "not measured, because the weights are random" in result.stdout


@pytest.mark.model
def test_a_build_of_the_real_model_prints_the_short_form(smollm2_gguf: Path, tmp_path: Path) -> None:
    types = ("--weight-dtype", "int4", "--kv-dtype", "bf16")
    result = trtcb("build", "--model", smollm2_gguf, *types, "--eval", "-o", tmp_path / "x.plan")
    assert result.returncode == 0, result.stderr
    assert "against fp32 top-1 9" in result.stdout
    assert "over 512 tokens" in result.stdout
    assert "warning" not in result.stderr  # the blocks of the file are taken over


# Perplexity, KL (design: int8 +0.1 % and 0.002, fp8 +0.5 % and 0.008, against fp32 KV with the same weights).
ACCEPTED = {
    "int8": DriftLimits(max_kl=0.002, min_top1=0.97, min_top1_clear=0.99, max_perplexity_ratio=1.001),
    "fp8": DriftLimits(max_kl=0.008, min_top1=0.94, min_top1_clear=0.97, max_perplexity_ratio=1.005),
}


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ACCEPTED)
def test_quantised_kv_is_within_the_accepted_limits(smollm2_plan, kv_dtype: str) -> None:
    found = measured(smollm2_plan("fp32", kv_dtype), smollm2_plan("fp32", "fp32"), max_tokens=4096, greedy=False)
    assert found.drift is not None
    ACCEPTED[kv_dtype].check(found.drift)
    for needle in found.needles:
        assert needle.reference is not None
        assert needle.reference.num_right >= 3  # of 8, where guessing finds 1
        assert abs(needle.plan.num_right - needle.reference.num_right) <= 1


@pytest.mark.model
@pytest.mark.slow
def test_int8_weights_are_within_the_accepted_limits(smollm2_plan) -> None:
    found = measured(smollm2_plan("int8", "bf16"), smollm2_plan("fp32", "fp32"), max_tokens=4096, greedy=False)
    assert found.drift is not None
    DriftLimits(max_kl=0.006, min_top1=0.955, min_top1_clear=0.993).check(found.drift)


@pytest.mark.model
@pytest.mark.slow
def test_int4_weights_of_a_4_bit_file_are_within_the_accepted_limits(smollm2_plan) -> None:
    found = measured(smollm2_plan("int4", "bf16"), smollm2_plan("fp32", "fp32"), max_tokens=4096, greedy=False)
    assert found.drift is not None
    DriftLimits(max_kl=INT4_MAX_KL, min_top1=0.955, min_top1_clear=0.99).check(found.drift)


@pytest.mark.model
def test_bf16_weights_with_fp8_kv_stay_near_fp32(smollm2_plan) -> None:
    options = {"max_tokens": 512, "needles": False, "greedy": False}
    found = measured(smollm2_plan("bf16", "fp8"), smollm2_plan("fp32", "fp32"), **options)
    assert found.drift is not None
    # bf16 weights may add 0.002 of KL to fp8's 0.008.
    DriftLimits(max_kl=0.010, min_top1=0.92, min_top1_clear=0.97, max_perplexity_ratio=1.02).check(found.drift)


def _rewrite(plan: Path, to: Path, *, source: dict[str, str] | None = None, old: bytes = b"", new: bytes = b"") -> Path:
    """The same plan, said to be built from somewhere else, or with ``old`` replaced in its tokenizer."""
    from trtcb.plan import Section, TensorSource, write_plan

    with Plan.open(plan) as opened:
        header = opened.header if source is None else replace(opened.header, source=source)
        bodies = {
            s.name: bytes(opened.section(s.name)) for s in opened.sections if s.name not in ("tensors", "weights")
        }
        if old:
            assert old in bodies["tokenizer"]
            bodies["tokenizer"] = bodies["tokenizer"].replace(old, new)
        sections = [Section.of_bytes(name, body) for name, body in bodies.items()]
        tensors = [
            TensorSource(i.name, i.dtype, i.shape, lambda name=i.name: opened.tensor(name))
            for i in opened.tensors.values()
        ]
        write_plan(to, header, sections, tensors)
    return to
