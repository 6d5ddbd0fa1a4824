import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from tests.unit.hf_folder import safetensors_bytes, to_bf16, write_folder
from tests.unit.tiny_gguf import SPEC, random_tensors
from trtcb.builder.hf import HfCheckpoint
from trtcb.builder.hf_config import spec_from_config
from trtcb.errors import ModelNotFoundError, PlanError, UsageError
from trtcb.spec import RopeScaling
from trtcb.tokenizer import Tokenizer

TENSORS = random_tensors(SPEC)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def spec_of(tmp_path, *, generation=None, drop=(), **config):
    folder = write_folder(tmp_path / "m", {}, config=config, generation=generation)
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key not in drop}))
    return spec_from_config(folder, "tiny")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_gives_back_every_tensor_and_the_spec(tmp_path, shards):
    checkpoint = HfCheckpoint(write_folder(tmp_path / "tiny", to_bf16(TENSORS), shards=shards))
    assert checkpoint.spec == SPEC
    assert checkpoint.weight_dtype == "bf16"
    assert list(checkpoint.tensor_names()) == list(TENSORS)
    for name, tensor in TENSORS.items():
        read = checkpoint.tensor(name)
        assert (read.dtype, checkpoint.shape(name)) == (ml_dtypes.bfloat16, tensor.shape)
        np.testing.assert_array_equal(read, tensor.astype(ml_dtypes.bfloat16))


def test_tensors_are_views_of_the_file(tmp_path):
    tensor = HfCheckpoint(write_folder(tmp_path / "tiny", TENSORS)).tensor("model.norm.weight")
    assert not tensor.flags.owndata
    assert not tensor.flags.writeable


def test_what_transformers_saves_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=100, rope_parameters={"rope_theta": 500000.0, **LLAMA3}, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path / "tiny", max_shard_size="20KB")
    checkpoint = HfCheckpoint(tmp_path / "tiny")
    assert checkpoint.spec.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert checkpoint.spec.rope_theta == 500000.0
    assert checkpoint.spec.eos_token_ids == (2, 7)
    assert checkpoint.spec.tie_embeddings
    for name in checkpoint.tensor_names():
        wanted = model.state_dict()[name].float().numpy()
        np.testing.assert_array_equal(checkpoint.tensor(name).astype(np.float32), wanted)


def test_tied_embeddings_need_no_head_and_ignore_one(tmp_path):
    headless = {name: tensor for name, tensor in TENSORS.items() if name != "lm_head.weight"}
    for tensors in (headless, TENSORS):
        checkpoint = HfCheckpoint(write_folder(tmp_path / "tiny", tensors, config={"tie_word_embeddings": True}))
        assert "lm_head.weight" not in checkpoint.tensor_names()
        with pytest.raises(KeyError):
            checkpoint.tensor("lm_head.weight")


def test_old_checkpoints_may_store_rotary_frequencies(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32)}
    assert HfCheckpoint(write_folder(tmp_path / "tiny", TENSORS | extra)).spec == SPEC


def test_every_eos_id_counts(tmp_path):
    spec = spec_of(tmp_path, generation={"eos_token_id": [5, 6], "bos_token_id": 3}, eos_token_id=[6, 1])
    assert (spec.eos_token_ids, spec.bos_token_id) == ((5, 6, 1), 3)


def test_old_and_new_rope_layouts_mean_the_same(tmp_path):
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    wanted = replace(SPEC, rope_theta=500000.0, rope_scaling=scaling)
    assert spec_of(tmp_path, rope_theta=500000.0, rope_scaling=LLAMA3) == wanted
    new = {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}}
    assert spec_of(tmp_path, drop=("rope_theta", "rope_scaling"), **new) == wanted
    linear = spec_of(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    assert linear == replace(SPEC, rope_scaling=RopeScaling("linear", 2.0))
    plain = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    assert spec_of(tmp_path, drop=("rope_theta", "rope_scaling"), **plain) == SPEC


def test_absent_keys_take_transformers_defaults(tmp_path):
    drop = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings", "hidden_act")
    spec = spec_of(tmp_path, drop=(*drop, "tie_word_embeddings", "architectures"))
    assert (spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps) == (4, 64, 1e-6)
    assert (spec.rope_theta, spec.max_position, spec.tie_embeddings) == (10000.0, 2048, False)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "qwen2"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": ["linear"]}}, "linear"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "rope_parameters.factor"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"eos_token_id": 300}, "outside the vocabulary"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
        ({"eos_token_id": [[1], {"a": 1}]}, "eos_token_id"),
        ({"eos_token_id": list(range(257))}, "eos_token_id"),
        ({"rope_theta": 0.5}, "rope_theta"),
        ({"rope_theta": 1e300}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "factor"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(tmp_path, config, named):
    with pytest.raises(UsageError, match=named.replace(".", r"\.")):
        spec_of(tmp_path, **config)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe"])
def test_an_unreadable_config_is_a_plan_error(tmp_path, content):
    folder = write_folder(tmp_path / "m", TENSORS)
    (folder / "config.json").write_bytes(content)
    with pytest.raises(PlanError, match=r"config\.json"):
        HfCheckpoint(folder)


def test_incomplete_folders_name_what_is_missing(tmp_path):
    folder = write_folder(tmp_path / "a", TENSORS)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        HfCheckpoint(folder)
    folder = write_folder(tmp_path / "b", TENSORS, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PlanError, match="model-00002-of-00002"):
        HfCheckpoint(folder)
    without = {name: tensor for name, tensor in TENSORS.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(PlanError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        HfCheckpoint(write_folder(tmp_path / "c", without))
    misshapen = TENSORS | {"model.norm.weight": np.zeros(7, np.float32)}
    with pytest.raises(PlanError, match=r"model\.norm\.weight"):
        HfCheckpoint(write_folder(tmp_path / "d", misshapen))
    biased = TENSORS | {"model.layers.0.self_attn.q_proj.bias": np.zeros(256, np.float32)}
    with pytest.raises(UsageError, match=r"q_proj\.bias"):
        HfCheckpoint(write_folder(tmp_path / "e", biased))


@pytest.mark.parametrize("name", ["../m.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_cannot_leave_its_folder(tmp_path, name):
    folder = write_folder(tmp_path / "m", TENSORS, shards=2)
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(TENSORS))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(PlanError, match="outside its folder"):
        HfCheckpoint(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_must_have_a_weight_map(tmp_path, index):
    folder = write_folder(tmp_path / "m", TENSORS, shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PlanError, match="weight_map"):
        HfCheckpoint(folder)


def test_two_shards_may_not_hold_the_same_tensor(tmp_path):
    folder = write_folder(tmp_path / "m", TENSORS, shards=2)
    (folder / "model-00002-of-00002.safetensors").write_bytes(
        (folder / "model-00001-of-00002.safetensors").read_bytes()
    )
    with pytest.raises(PlanError, match="repeats"):
        HfCheckpoint(folder)


def test_digest_covers_config_and_every_shard(tmp_path):
    folder = write_folder(tmp_path / "m", TENSORS, shards=2)
    digests = {HfCheckpoint(folder).digest}
    path = folder / "model-00002-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    digests.add(HfCheckpoint(folder).digest)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    digests.add(HfCheckpoint(folder).digest)
    assert len(digests) == 3
    assert all(digest.startswith("sha256:") for digest in digests)


def assets_of(tmp_path, **files):
    folder = write_folder(tmp_path / "m", TENSORS, generation={"temperature": 0.7, "eos_token_id": [1, 4]})
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return HfCheckpoint(folder).assets


def test_tokenizer_files_of_a_folder(tmp_path):
    assets = assets_of(
        tmp_path,
        tokenizer_config__json={"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>", "chat_template": "old"},
    )
    assert assets.chat_template == "old"
    assert assets.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    assert assets.generation_config == {"temperature": 0.7, "bos_token_id": 0, "eos_token_id": [1, 4]}
    assert Tokenizer(assets).eos_token_ids == {1, 4}


def test_the_template_file_wins_and_named_templates_have_a_default(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert assets_of(tmp_path, tokenizer_config__json={"chat_template": named}).chat_template == "d"
    both = assets_of(tmp_path, tokenizer_config__json={"chat_template": "old"}, chat_template__jinja="new")
    assert both.chat_template == "new"


@pytest.mark.parametrize("add_bos", [True, False])
def test_add_bos_token_overrules_the_post_processor(tmp_path, add_bos):
    tokenizer = Tokenizer(assets_of(tmp_path, tokenizer_config__json={"add_bos_token": add_bos}))
    assert tokenizer.adds_bos == add_bos
    assert tokenizer.encode("a")[:1] == ([0] if add_bos else tokenizer.encode("a", add_special_tokens=False))


def test_add_bos_token_can_switch_bos_on(tmp_path):
    folder = write_folder(tmp_path / "m", TENSORS)
    document = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(document | {"post_processor": None}))
    assert not Tokenizer(HfCheckpoint(folder).assets).adds_bos
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    assert Tokenizer(HfCheckpoint(folder).assets).encode("a")[0] == 0


def test_a_folder_without_tokenizer_says_how_to_make_one(tmp_path):
    folder = write_folder(tmp_path / "m", TENSORS)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match="save_pretrained"):
        _ = HfCheckpoint(folder).assets
