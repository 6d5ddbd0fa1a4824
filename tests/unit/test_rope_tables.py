"""Rotary tables against transformers' own, with and without Llama 3.1's frequency scaling."""

import numpy as np
import pytest

from trtcb.spec import ModelSpec, RopeScaling

LLAMA3 = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
CASES = {
    "plain": (500000.0, None, {"rope_type": "default"}),
    "linear": (10000.0, RopeScaling("linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        500000.0,
        LLAMA3,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_tables_equal_those_of_transformers(case):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theta, scaling, parameters = CASES[case]
    num_positions = 2048
    spec = ModelSpec("s", 4096, 14336, 1, 32, 8, 128, 128256, 131072, rope_theta=theta, rope_scaling=scaling)
    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(num_positions)[None])
    ours_cos, ours_sin = spec.rope_tables(num_positions)
    assert ours_cos.shape == ours_sin.shape == (num_positions, 64)
    # Every frequency on its own, from the angle at position 1; then the tables within what fp32 angles allow.
    np.testing.assert_allclose(np.arctan2(ours_sin[1], ours_cos[1]), rotary.inv_freq.numpy(), rtol=1e-6)
    np.testing.assert_allclose(ours_cos, cos[0, :, :64].numpy(), atol=num_positions * 2e-7)
    np.testing.assert_allclose(ours_sin, sin[0, :, :64].numpy(), atol=num_positions * 2e-7)
    if scaling is not None:
        unscaled = ModelSpec("s", 4096, 14336, 1, 32, 8, 128, 128256, 131072, rope_theta=theta).rope_tables(2)[1]
        assert (ours_sin[1] < unscaled[1] * 0.99).any()
