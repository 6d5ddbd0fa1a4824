"""SmolLM2-135M on the cpu target against transformers' own reading of the same file (golden/make_reference.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from trtcb import LLM, SamplingParams
from trtcb.evaluation.piece import Piece, pack
from trtcb.executor.cpu_runtime import CpuRuntime
from trtcb.plan import Plan

pytestmark = pytest.mark.model

REFERENCE = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_reference.json").read_text())
CHUNK = 512


def teacher_forced_argmax(path: Path, windows: list[list[int]]) -> np.ndarray:
    """The best token after every token of each window; windows share nothing."""
    with Plan.open(path) as plan:
        runtime = CpuRuntime(plan, num_blocks=64, max_num_tokens=CHUNK, max_num_logits=CHUNK)
        table = list(range(64))
        best = []
        for tokens in windows:
            for start in range(0, len(tokens), CHUNK):
                chunk = tokens[start : start + CHUNK]
                runtime.launch(pack([Piece(chunk, start, table, "all")], runtime.block_size))
                best.append(runtime.wait().tokens)
        return np.concatenate(best)


def agreement(path: Path, windows, expected: np.ndarray) -> float:
    found = teacher_forced_argmax(path, windows)
    share = float(np.mean(found == expected))
    print(f"{path.stem}: argmax agreement {share:.2%} over {len(expected)} tokens")
    return share


@pytest.fixture(scope="module")
def windows():
    return [window["token_ids"] for window in REFERENCE["windows"]]


def test_fp32_generates_exactly_what_transformers_does(smollm2_plan):
    """20 prompts, 64 greedy tokens each, all of them in flight together."""
    cases = REFERENCE["prompts"]
    assert len(cases) == 20
    with LLM(smollm2_plan("fp32", "fp32"), max_batch_size=20) as llm:
        params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
        completions = llm.generate([case["prompt_ids"] for case in cases], params)
    for case, completion in zip(cases, completions, strict=True):
        assert completion.token_ids == tuple(case["token_ids"]), case["name"]


def test_fp32_argmax_is_transformers(smollm2_plan, windows):
    """Teacher-forced over the first window; where it differs, transformers' own two best are a hair apart."""
    window = REFERENCE["windows"][0]
    found = teacher_forced_argmax(smollm2_plan("fp32", "fp32"), windows[:1])
    differs = found != np.array(window["argmax"])
    gaps = np.array(window["gaps"])[differs]
    assert differs.sum() <= 2
    assert (gaps < 1e-3).all()


@pytest.mark.parametrize(("kv_dtype", "least"), [("int8", 0.98), ("fp8", 0.95)])
def test_quantised_kv_keeps_the_argmax(smollm2_plan, windows, kv_dtype, least):
    expected = np.array(REFERENCE["windows"][0]["argmax"])
    assert agreement(smollm2_plan("fp32", kv_dtype), windows[:1], expected) >= least - 0.01  # a quarter of the text


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_quantised_weights_keep_the_argmax(smollm2_plan, windows, weight_dtype):
    expected = np.array(REFERENCE["windows"][0]["argmax"])
    assert agreement(smollm2_plan(weight_dtype, "bf16"), windows[:1], expected) >= 0.94  # a quarter of the text


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "least"), [("bf16", 0.98), ("fp16", 0.98), ("int8", 0.98), ("fp8", 0.95)])
def test_kv_formats_over_the_whole_text(smollm2_plan, windows, kv_dtype, least):
    """Against our own fp32 KV with the same weights, over 4,000 tokens and more."""
    expected = teacher_forced_argmax(smollm2_plan("fp32", "fp32"), windows)
    assert len(expected) >= 4000
    assert agreement(smollm2_plan("fp32", kv_dtype), windows, expected) >= least
