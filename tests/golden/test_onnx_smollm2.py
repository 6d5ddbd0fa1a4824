"""SmolLM2-135M in onnxruntime against transformers: ragged chunked prefill mixed with decode, in every cache format."""

import dataclasses

import numpy as np
import pytest
import tokenizers

from tests.golden.ort_runner import export_runner, run_packed
from tests.golden.transformers_llama import greedy, llama_from_gguf, logits_of
from trtcb.builder.checkpoint import Checkpoint
from trtcb.builder.sources import resolve
from trtcb.spec import KVDtype

NUM_NEW = 16
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village near the sea, there lived an old fisherman who told the children stories",
    "def fibonacci(n):\n    if n < 2:\n",
)
# Largest deviation of any of 48 x 49,152 logits (they reach about 35), and mean Kullback-Leibler divergence.
# Quantisation noise is amplified from layer to layer, so a quantised cache is judged by its divergence; the first
# number only catches what is plainly wrong. Measured: 7e-5 1e-11, 0.02 7e-7, 0.12 3e-5, 1.0 8e-4, 2.5 6e-3.
TOLERANCES = {
    KVDtype.FP32: (5e-4, 1e-9),
    KVDtype.FP16: (0.1, 1e-5),
    KVDtype.BF16: (0.5, 2e-4),
    KVDtype.INT8: (2.5, 2e-3),
    KVDtype.FP8: (5.0, 1.2e-2),
}


@dataclasses.dataclass(frozen=True)
class RealModel:
    checkpoint: Checkpoint
    sequences: list  # prompt and greedy continuation, as transformers generates it
    expected: list  # its logits for all of it
    num_prompt: list


@pytest.fixture(scope="module")
def real(smollm2_gguf):
    """SmolLM2, and what transformers makes of the same file with its own GGUF reader."""
    checkpoint = resolve("smollm2-135m")
    model = llama_from_gguf(checkpoint.spec, str(smollm2_gguf))
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.assets.tokenizer_json.decode())
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    sequences = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
    expected = [logits_of(model, tokens) for tokens in sequences]
    return RealModel(checkpoint, sequences, expected, [len(prompt) for prompt in prompts])


def packing_of(num_prompt):
    """The first prompt whole; the second in chunks of 7, beside the others' decode; then decode until all are done."""
    left = [count + NUM_NEW - 1 for count in num_prompt]
    prompt = list(num_prompt)
    packing = []
    while any(left):
        counts = []
        for row in range(3):
            chunk = min(prompt[row], 7 if row == 1 else prompt[row]) or 1
            counts.append(min(chunk, left[row]))
            prompt[row] -= min(chunk, prompt[row])
            left[row] -= counts[-1]
        packing.append(tuple(counts))
    return packing


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.model
@pytest.mark.parametrize("kv_dtype", TOLERANCES)
def test_packed_steps_follow_transformers(tmp_path, real, kv_dtype):
    runner = export_runner(tmp_path, real.checkpoint, kv_dtype, num_blocks=40, block_size=16)
    tables = np.random.default_rng(3).permutation(40)[:18].reshape(3, 6)
    found = run_packed(runner, real.sequences, tables, packing_of(real.num_prompt))
    rows = [key for key in found if key[1] >= real.num_prompt[key[0]] - 1]
    assert len(rows) == 3 * NUM_NEW
    ours = np.stack([found[key] for key in rows])
    theirs = np.stack([real.expected[row][position] for row, position in rows])
    assert np.isfinite(ours).all()
    worst, divergence = TOLERANCES[kv_dtype]
    p, q = log_softmax(theirs), log_softmax(ours)
    kl = (np.exp(p) * (p - q)).sum(-1).mean()
    print(f"{kv_dtype.value}: largest deviation {np.abs(ours - theirs).max():.2e}, KL {kl:.2e}")
    assert np.abs(ours - theirs).max() <= worst
    assert kl <= divergence
    same = ours.argmax(-1) == theirs.argmax(-1)
    assert same.mean() >= 0.9
    if kv_dtype is KVDtype.FP32:  # hence greedy generation is the same, token by token
        assert same.all()
        assert [int(i) for i in ours.argmax(-1)] == [real.sequences[row][position + 1] for row, position in rows]
