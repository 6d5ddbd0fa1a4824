from dataclasses import replace

import gguf
import numpy as np
import pytest

from tests.unit.tiny_gguf import SPEC, gguf_name, metadata_of, random_tensors, stored_tensors, write_gguf, write_tiny
from trtcb.builder.gguf_checkpoint import GgufCheckpoint
from trtcb.builder.gguf_spec import llama3_divisors
from trtcb.errors import PlanError, UsageError
from trtcb.plugins.cpu import grouped
from trtcb.spec import RopeScaling

QUANTISED = {
    "F16": 0.004,
    "BF16": 0.02,
    "Q8_0": 0.05,
    "Q4_0": 0.6,
    "Q4_1": 0.4,
}  # type -> largest error of N(0, 1) values
K_SCALES = {"Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}  # where the fp16 scales of a block lie


def quantised(tensor, kind):
    return gguf.quantize(tensor, gguf.GGMLQuantizationType[kind])


def random_blocks(shape, kind, rng):
    """Random bytes as blocks of a type that the gguf package cannot quantise to, with scales that are small numbers."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block, num_bytes), dtype=np.uint8)
    start, end = K_SCALES[kind]
    scales = rng.standard_normal((len(blocks), (end - start) // 2)).astype(np.float16)
    blocks[:, start:end] = scales.view(np.uint8).reshape(len(blocks), -1)
    return blocks.reshape(shape[0], -1)


def test_an_f32_file_gives_back_every_tensor_and_the_spec(tmp_path):
    checkpoint = GgufCheckpoint(write_tiny(tmp_path / "tiny.gguf"))
    assert checkpoint.spec == SPEC
    assert checkpoint.weight_dtype == "fp32"
    for name, tensor in random_tensors(SPEC).items():
        assert checkpoint.shape(name) == tensor.shape
        np.testing.assert_array_equal(checkpoint.tensor(name), tensor)
    assert list(checkpoint.tensor_names()) == list(random_tensors(SPEC))


def test_f32_tensors_are_views_of_the_file(tmp_path):
    checkpoint = GgufCheckpoint(write_tiny(tmp_path / "tiny.gguf"))
    tensor = checkpoint.tensor("model.layers.1.mlp.up_proj.weight")
    assert not tensor.flags.owndata
    assert not tensor.flags.writeable


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_file_round_trips(tmp_path, kind):
    wanted = random_tensors(SPEC)
    stored = {
        name: tensor if tensor.ndim == 1 else (quantised(tensor, kind), kind)
        for name, tensor in stored_tensors(SPEC, wanted).items()
    }
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "q.gguf", stored, metadata_of(SPEC)))
    assert checkpoint.weight_dtype == {"F16": "fp16", "BF16": "bf16"}.get(kind, kind.lower())
    for name, tensor in wanted.items():
        read = checkpoint.tensor(name)
        assert (read.dtype, read.shape) == (np.float32, tensor.shape)
        if tensor.ndim == 1:
            np.testing.assert_array_equal(read, tensor)
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            assert np.abs(read - tensor).max() < QUANTISED[kind]  # rows come back in their own places
        else:
            np.testing.assert_array_equal(
                read, gguf.dequantize(quantised(tensor, kind), gguf.GGMLQuantizationType[kind])
            )


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_blocks_of_four_bits_are_handed_over_as_they_are(tmp_path, kind):
    stored = {
        name: tensor if tensor.ndim == 1 else (quantised(tensor, kind), kind)
        for name, tensor in stored_tensors(SPEC, random_tensors(SPEC)).items()
    }
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "q.gguf", stored, metadata_of(SPEC)))
    matrices = [name for name in checkpoint.tensor_names() if checkpoint.is_int4(name)]
    assert matrices == [name for name, tensor in random_tensors(SPEC).items() if tensor.ndim == 2]
    for name in matrices:  # q and k among them, whose rows change places
        weight = checkpoint.int4(name)
        assert np.array_equal(grouped.dequantize(weight), checkpoint.tensor(name))
    blocks = stored["blk.0.ffn_up.weight"][0].reshape(512, 8, -1)
    weight = checkpoint.int4("model.layers.0.mlp.up_proj.weight")
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    assert np.array_equal(weight.scale, scale)
    assert np.array_equal(weight.codes.reshape(512, 8, 16), blocks[..., -16:])
    zero = -8 * scale if kind == "Q4_0" else np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
    assert np.array_equal(weight.zero, zero)


@pytest.mark.filterwarnings("error")
def test_a_scale_whose_zero_is_beyond_fp16_is_no_warning(tmp_path):
    """The build refuses it by name."""
    tensors = stored_tensors(SPEC, random_tensors(SPEC))
    blocks = quantised(tensors["blk.0.ffn_up.weight"], "Q4_0")
    blocks[0, :2] = np.array([60000], np.float16).view(np.uint8)
    tensors["blk.0.ffn_up.weight"] = (blocks, "Q4_0")
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "q.gguf", tensors, metadata_of(SPEC)))
    assert checkpoint.int4("model.layers.0.mlp.up_proj.weight").zero[0, 0] == -np.inf


def test_other_types_are_no_blocks_of_four_bits(tmp_path):
    tensors = stored_tensors(SPEC, random_tensors(SPEC))
    tensors["blk.0.ffn_up.weight"] = (quantised(tensors["blk.0.ffn_up.weight"], "Q8_0"), "Q8_0")
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "q.gguf", tensors, metadata_of(SPEC)))
    assert not any(map(checkpoint.is_int4, checkpoint.tensor_names()))


@pytest.mark.parametrize("kind", K_SCALES)
def test_k_types_agree_with_two_other_implementations(tmp_path, kind):
    torch = pytest.importorskip("torch")
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    type_id = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(7)
    stored = {
        gguf_name(name): tensor if tensor.ndim == 1 else (random_blocks(tensor.shape, kind, rng), kind)
        for name, tensor in random_tensors(SPEC).items()
    }
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "k.gguf", stored, metadata_of(SPEC)))
    for name in (
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
    ):
        blocks = stored[gguf_name(name)][0]
        read = checkpoint.tensor(name)
        np.testing.assert_array_equal(read, gguf.dequantize(blocks, type_id))
        other = dequant.dequantize(torch.from_numpy(blocks), int(type_id)).numpy().reshape(read.shape)
        np.testing.assert_allclose(read, other, rtol=1e-6, atol=1e-6)


def test_large_tensors_are_dequantised_in_chunks(tmp_path, monkeypatch):
    stored = stored_tensors(SPEC, random_tensors(SPEC))
    blocks = quantised(stored["token_embd.weight"], "Q8_0")
    stored["token_embd.weight"] = (blocks, "Q8_0")
    path = write_gguf(tmp_path / "q.gguf", stored, metadata_of(SPEC))
    whole = GgufCheckpoint(path).tensor("model.embed_tokens.weight")
    monkeypatch.setattr("trtcb.builder.gguf_checkpoint._CHUNK_ELEMENTS", 7 * SPEC.hidden_size)  # 300 rows: a rest of 6
    np.testing.assert_array_equal(GgufCheckpoint(path).tensor("model.embed_tokens.weight"), whole)


def test_a_missing_output_tensor_means_tied_embeddings(tmp_path):
    checkpoint = GgufCheckpoint(write_tiny(tmp_path / "tied.gguf", drop=("output.weight",)))
    assert checkpoint.spec == replace(SPEC, name="tied", tie_embeddings=True)
    assert "lm_head.weight" not in checkpoint.tensor_names()


def test_defaults_of_absent_keys(tmp_path):
    path = write_tiny(
        tmp_path / "old.gguf",
        **{"llama.rope.freq_base": None, "llama.rope.dimension_count": None},
        llama__vocab_size=300,
    )
    assert GgufCheckpoint(path, name="tiny").spec == SPEC


def test_digest_follows_the_bytes_and_names_its_method(tmp_path, monkeypatch):
    path = write_tiny(tmp_path / "tiny.gguf")
    before = GgufCheckpoint(path).digest
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    (tmp_path / "other.gguf").write_bytes(content)
    assert before.startswith("sha256:")
    assert GgufCheckpoint(tmp_path / "other.gguf").digest != before
    monkeypatch.setattr("trtcb.builder.checkpoint.FULL_DIGEST_BYTES", 1000)
    assert GgufCheckpoint(path).digest.startswith("sha256-headers:")


def with_rope_freqs(path, spec, divisors):
    tensors = stored_tensors(spec, random_tensors(spec)) | {"rope_freqs.weight": divisors.astype(np.float32)}
    return write_gguf(path, tensors, metadata_of(spec))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_freqs_become_llama3_scaling(tmp_path, factor):
    scaling = RopeScaling("llama3", factor)
    spec = replace(SPEC, rope_theta=500000.0, rope_scaling=scaling)
    path = with_rope_freqs(tmp_path / "tiny.gguf", spec, llama3_divisors(spec, scaling))
    assert GgufCheckpoint(path).spec == spec


def test_llama3_divisors_are_what_the_spec_computes():
    scaling = RopeScaling("llama3", 8.0)
    plain = replace(SPEC, rope_theta=500000.0)
    position = 1
    cos, _ = replace(plain, rope_scaling=scaling).rope_tables(position + 1)
    frequencies = plain.rope_theta ** -(np.arange(0, plain.head_dim, 2) / plain.head_dim)
    np.testing.assert_allclose(np.cos(frequencies / llama3_divisors(plain, scaling)), cos[position], rtol=1e-6)


def test_llama3_divisors_are_those_of_llama_cpps_converter():
    # LlamaModel.generate_extra_tensors of convert_hf_to_gguf.py, step by step.
    spec, (factor, low, high, context) = replace(SPEC, rope_theta=500000.0, head_dim=128), (8.0, 1.0, 4.0, 8192)
    expected = []
    for exponent in range(0, 128, 2):
        wavelength = 2 * np.pi * 500000.0 ** (exponent / 128)
        if wavelength < context / high:
            expected.append(1.0)
        elif wavelength > context / low:
            expected.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            expected.append(1 / ((1 - smooth) / factor + smooth))
    np.testing.assert_allclose(llama3_divisors(spec, RopeScaling("llama3", factor, low, high, context)), expected)


def test_rope_freqs_of_one_are_no_scaling(tmp_path):
    path = with_rope_freqs(tmp_path / "tiny.gguf", SPEC, np.ones(SPEC.head_dim // 2))
    assert GgufCheckpoint(path).spec == SPEC


@pytest.mark.parametrize(
    ("divisors", "error"),
    [
        (np.linspace(1, 8, SPEC.head_dim // 2), UsageError),  # another rule
        (np.ones(SPEC.head_dim // 2 - 1), PlanError),  # another length
        (np.full(SPEC.head_dim // 2, np.nan), PlanError),
        (-np.ones(SPEC.head_dim // 2), PlanError),
        (np.zeros(SPEC.head_dim // 2), PlanError),
    ],
)
def test_other_rope_freqs_are_refused(tmp_path, divisors, error):
    with pytest.raises(error):
        GgufCheckpoint(with_rope_freqs(tmp_path / "bad.gguf", SPEC, divisors))


def test_linear_scaling_is_read_from_metadata(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf", **{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert GgufCheckpoint(path).spec == replace(SPEC, rope_scaling=RopeScaling("linear", 4.0))


@pytest.mark.parametrize(
    ("metadata", "error", "named"),
    [
        ({"llama.expert_count": 8}, UsageError, "expert_count"),
        ({"llama.attention.sliding_window": 128}, UsageError, "sliding_window"),
        ({"llama.rope.dimension_count": 32}, UsageError, "rope.dimension_count"),
        ({"llama.attention.value_length": 32}, UsageError, "value_length"),
        ({"llama.rope.scaling.type": "yarn"}, UsageError, "'yarn'"),
        ({"llama.rope.scaling.factor": 4}, PlanError, "rope.scaling.factor"),
        ({"llama.block_count": None}, PlanError, "llama.block_count"),
        ({"llama.block_count": 2**32 - 1}, PlanError, "llama.block_count"),
        ({"llama.attention.head_count": 0}, PlanError, "llama.attention.head_count"),
        ({"llama.attention.head_count_kv": [2, 2]}, PlanError, "llama.attention.head_count_kv"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, PlanError, "layer_norm_rms_epsilon"),
        ({"llama.embedding_length": 512, "llama.attention.key_length": 64}, PlanError, "shape"),
        ({"llama.expert_count": [1, 2]}, PlanError, "llama.expert_count"),
        ({"llama.rope.scaling.type": [1, 2]}, PlanError, "llama.rope.scaling.type"),
        ({"tokenizer.ggml.bos_token_id": "0"}, PlanError, "bos_token_id"),
        ({"llama.vocab_size": 301}, PlanError, "token_embd.weight"),
        ({"tokenizer.ggml.eos_token_id": 300}, PlanError, "outside the vocabulary"),
    ],
)
def test_foreign_or_broken_metadata_is_refused_by_name(tmp_path, metadata, error, named):
    with pytest.raises(error, match=named.replace(".", r"\.")):
        GgufCheckpoint(write_tiny(tmp_path / "bad.gguf", **metadata))


def test_another_architecture_is_refused_by_name(tmp_path):
    path = write_gguf(
        tmp_path / "q.gguf", {"token_embd.weight": np.zeros((4, 4), np.float32)}, {}, architecture="qwen2"
    )
    with pytest.raises(UsageError, match="'qwen2'"):
        GgufCheckpoint(path)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.1.ffn_gate_exps.weight", "blk.0.attn_q_norm.weight"])
def test_a_tensor_without_a_place_is_refused_by_name(tmp_path, name):
    tensors = stored_tensors(SPEC, random_tensors(SPEC)) | {name: np.zeros(256, np.float32)}
    with pytest.raises(UsageError, match=name):
        GgufCheckpoint(write_gguf(tmp_path / "bad.gguf", tensors, metadata_of(SPEC)))


def test_a_missing_tensor_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"blk\.1\.ffn_up\.weight"):
        GgufCheckpoint(write_tiny(tmp_path / "bad.gguf", drop=("blk.1.ffn_up.weight",)))


def test_an_unsupported_block_type_is_named(tmp_path):
    stored = stored_tensors(SPEC, random_tensors(SPEC))
    stored["output.weight"] = (quantised(stored["output.weight"], "Q5_0"), "Q5_0")
    with pytest.raises(UsageError, match="Q5_0"):
        GgufCheckpoint(write_gguf(tmp_path / "bad.gguf", stored, metadata_of(SPEC)))
