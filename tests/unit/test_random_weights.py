import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from trtcb.builder.presets import load_preset
from trtcb.builder.random_weights import RandomCheckpoint
from trtcb.spec import ModelSpec
from trtcb.tokenizer import Tokenizer

TINY = load_preset("tiny-random").spec
SEVEN = load_preset("llama-2-7b").spec


def test_weights_are_a_function_of_seed_and_name():
    first, again, other = (RandomCheckpoint(TINY, seed) for seed in (3, 3, 4))
    names = list(first.tensor_names())
    for name in reversed(names):  # the order of asking does not matter
        np.testing.assert_array_equal(first.tensor(name), again.tensor(name))
        assert not np.array_equal(first.tensor(name), other.tensor(name))
    bodies = {first.tensor(name).tobytes() for name in names}
    assert len(bodies) == len(names)
    assert first.digest == again.digest != other.digest


def test_values_do_not_change_between_versions():
    # Plans and published token sequences of random models depend on these.
    tensor = RandomCheckpoint(TINY, 0).tensor("model.layers.0.self_attn.q_proj.weight")
    assert tensor.dtype == np.float32
    np.testing.assert_allclose(tensor[0, :3], [-0.0139711797, -0.0767659396, 0.1133826673], rtol=1e-6)


def test_scales_keep_activations_near_one():
    checkpoint = RandomCheckpoint(TINY, 0)
    for name in checkpoint.tensor_names():
        tensor = checkpoint.tensor(name)
        if tensor.ndim == 1:
            assert abs(tensor.mean() - 1) < 0.05
            continue
        wanted = 1.0 if name == "model.embed_tokens.weight" else tensor.shape[1] ** -0.5
        assert tensor.std() == pytest.approx(wanted, rel=0.02)
        assert abs(tensor.mean()) < 0.05 * wanted


def test_big_shapes_are_bfloat16_and_cost_one_tensor():
    checkpoint = RandomCheckpoint(SEVEN, 0)
    assert checkpoint.weight_dtype == "bf16"
    assert RandomCheckpoint(load_preset("smollm2-135m").spec, 0).weight_dtype == "fp32"
    tracemalloc.start()
    tensor = checkpoint.tensor("model.layers.31.self_attn.o_proj.weight")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tensor.dtype == ml_dtypes.bfloat16
    assert tensor.shape == (4096, 4096)
    assert peak < tensor.nbytes + (16 << 20)


def test_chunks_leave_no_seam(monkeypatch):
    spec = ModelSpec("m", 64, 64, 1, 1, 1, 64, 50, 64)
    whole = RandomCheckpoint(spec, 1).tensor("model.embed_tokens.weight")
    monkeypatch.setattr("trtcb.builder.random_weights._CHUNK_ELEMENTS", 1000)
    np.testing.assert_array_equal(RandomCheckpoint(spec, 1).tensor("model.embed_tokens.weight"), whole)


def test_a_stand_in_tokenizer_is_announced():
    stand_in = RandomCheckpoint(SEVEN, 0)
    assert any("stand-in of 32000 entries" in note for note in stand_in.notes)
    assert not any("stand-in" in note for note in RandomCheckpoint(TINY, 0, tokenizer_is_stand_in=False).notes)
    tokenizer = Tokenizer(stand_in.assets)
    assert tokenizer.vocab_size == 32000
    assert tokenizer.eos_token_ids == {2}
