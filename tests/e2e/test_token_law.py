"""The law that finds most bugs: a request's tokens are those of its solo run, whatever else the engine does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trtcb import LLM, SamplingParams

pytestmark = pytest.mark.model

PROMPTS = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_reference.json").read_text())["prompts"]
SHARED = PROMPTS[0]["prompt_ids"] + [id for prompt in PROMPTS for id in prompt["prompt_ids"]][:96]
OFF = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": (),
    "min_tokens": 0,
}
LOGIT_PARAMS = [
    {},
    {"repetition_penalty": 1.3, "min_tokens": 6},
    {"frequency_penalty": 0.8, "presence_penalty": 0.4},
    {},
    {"logit_bias": ((28, 3.0), (198, -100.0)), "min_tokens": 3, "frequency_penalty": 0.2},
]


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests that differ in length, share prefixes, stop differently, are greedy or drawn, and edit their logits."""
    prompts = [prompt["prompt_ids"] for prompt in PROMPTS[:12]]
    prompts += [SHARED + prompt["prompt_ids"][:5] for prompt in PROMPTS[:4]]  # three whole blocks in common
    prompts += [SHARED, SHARED]
    params = [
        SamplingParams(
            max_tokens=8 + 5 * (i % 7),
            temperature=0.0 if i % 3 else 0.9,
            top_p=0.95,
            top_k=50 * (i % 2),
            seed=i,
            ignore_eos=bool(i % 2),
            stop=("\n\n",) if i % 4 == 0 else (),
            logprobs=(None, 0, 5)[i % 3],
            **LOGIT_PARAMS[i % len(LOGIT_PARAMS)],
        )
        for i in range(len(prompts))
    ]
    return prompts, params


SETTINGS = {
    "pauses, chunk 64, no reuse": {
        "scheduler_policy": "max_utilization",
        "num_blocks": 8,
        "max_num_tokens": 64,
        "prefix_caching": False,
    },
    "overlap, pauses": {"overlap_depth": 1, "scheduler_policy": "max_utilization", "num_blocks": 10},
}
MORE_SETTINGS = {
    "chunk 64, reuse": {"max_num_tokens": 64},
    "static batch": {"scheduler_policy": "static_batch", "max_batch_size": 5},
    "chunk 32": {"max_num_tokens": 32, "prefix_caching": False},
    "chunk 512, reuse": {"max_num_tokens": 512},
    "chunk 512": {"max_num_tokens": 512, "prefix_caching": False},
    "equal progress": {"max_num_tokens": 96, "chunk_policy": "equal_progress"},
    "pauses": {"scheduler_policy": "max_utilization", "num_blocks": 10},
    "overlap": {"overlap_depth": 1},
}


@pytest.mark.timeout(1200)  # slow processors are welcome
@pytest.mark.parametrize("all_settings", [SETTINGS, pytest.param(MORE_SETTINGS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("engine", "weight_dtype", "kv_dtype"),
    [
        ("whole_step", "bf16", "fp8"),
        ("whole_step", "int4", "int8"),  # whose head is int8
        pytest.param("whole_step", "int8", "bf16", marks=pytest.mark.slow),
        pytest.param("whole_step", "fp32", "fp32", marks=pytest.mark.slow),
        pytest.param("portable", "fp32", "fp8", marks=pytest.mark.slow),
        pytest.param("portable", "int8", "bf16", marks=pytest.mark.slow),
    ],
)
def test_tokens_equal_the_solo_run(smollm2_plan, engine, weight_dtype, kv_dtype, all_settings):
    plan = smollm2_plan(weight_dtype, kv_dtype)
    prompts, params = workload()
    with LLM(plan, cpu_engine=engine, max_batch_size=1, prefix_caching=False, max_seq_len=1024) as llm:
        solo = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
        edited = [i for i, one in enumerate(params) if replace(one, **OFF) != one][:4]
        plain = llm.generate([prompts[i] for i in edited], [replace(params[i], **OFF) for i in edited])
    assert any(completion.text for completion in solo)
    assert any(solo[i].token_ids != one.token_ids for i, one in zip(edited, plain, strict=True))
    for name, settings in all_settings.items():
        steps = []
        with LLM(
            plan, cpu_engine=engine, on_step=steps.append, **{"max_batch_size": 16, "max_seq_len": 700, **settings}
        ) as llm:
            together = llm.generate(prompts, params)
        pauses = sum(step.num_pauses for step in steps)
        for i, (mine, alone) in enumerate(zip(together, solo, strict=True)):
            assert mine.token_ids == alone.token_ids, f"{name}: request {i}"
            assert (mine.text, mine.finish_reason) == (alone.text, alone.finish_reason), f"{name}: request {i}"
            assert mine.logprobs == alone.logprobs, f"{name}: request {i}"
        if "pauses" in name:
            assert pauses > 0, name
        if settings.get("prefix_caching", True) and settings.get("scheduler_policy") is None:
            assert sum(completion.num_cached_tokens for completion in together) >= 96, name
