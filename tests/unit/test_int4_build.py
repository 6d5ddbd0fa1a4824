"""Int4 and int8 weights at a build: blocks taken over or weights rounded, what is told of it, and what is refused."""

import dataclasses

import gguf
import numpy as np
import pytest

from tests.golden.array_checkpoint import TINY, random_checkpoint
from tests.unit.hf_folder import write_folder
from tests.unit.tiny_gguf import SPEC, metadata_of, random_tensors, stored_tensors, write_gguf
from trtcb.builder.build import compile_options
from trtcb.builder.compiler import Compiled, CompileOptions
from trtcb.builder.cpu import CpuCompiler
from trtcb.builder.gguf_checkpoint import GgufCheckpoint
from trtcb.cli import main as cli
from trtcb.config import BuildConfig
from trtcb.errors import UsageError
from trtcb.evaluation.drift import Drift, Likelihood
from trtcb.evaluation.limits import INT4_MAX_KL, int4_warning
from trtcb.plugins.cpu import grouped
from trtcb.plugins.cpu.grouped import Int4Weight
from trtcb.spec import BuildLimits, KVDtype, WeightDtype

OPTIONS = CompileOptions(WeightDtype.INT4, KVDtype.BF16, BuildLimits(max_seq_len=64))


def compiled(checkpoint, options: CompileOptions = OPTIONS) -> Compiled:
    return CpuCompiler().compile(checkpoint, options)


def weight_of(plan: Compiled, name: str) -> Int4Weight:
    arrays = {tensor.name: tensor.load() for tensor in plan.tensors if tensor.name.startswith(name)}
    return Int4Weight(arrays[name], arrays[f"{name}.scale"], arrays[f"{name}.zero"])


def q4_1(tmp_path, **other: np.ndarray) -> GgufCheckpoint:
    """A file of Q4_1 matrices, but for ``other`` ones."""
    kind = gguf.GGMLQuantizationType.Q4_1
    tensors = {
        name: tensor if tensor.ndim == 1 else (gguf.quantize(tensor, kind), "Q4_1")
        for name, tensor in stored_tensors(SPEC, random_tensors(SPEC)).items()
    }
    return GgufCheckpoint(write_gguf(tmp_path / "q.gguf", {**tensors, **other}, metadata_of(SPEC)))


def test_blocks_of_a_file_are_taken_over_stacked(tmp_path):
    checkpoint = q4_1(tmp_path)
    plan = compiled(checkpoint)
    assert plan.notes == ()
    weight = weight_of(plan, "layers.1.self_attn.q_k_v_proj")
    parts = [checkpoint.tensor(f"model.layers.1.self_attn.{part}_proj.weight") for part in "qkv"]
    assert np.array_equal(grouped.dequantize(weight), np.concatenate(parts))


def test_weights_of_more_bits_are_rounded_and_told(tmp_path):
    wide = random_tensors(SPEC)["model.layers.0.mlp.up_proj.weight"]
    plan = compiled(q4_1(tmp_path, **{"blk.0.ffn_up.weight": wide}))
    [note] = plan.notes
    assert note.startswith("1 of 14 matrices are not stored in blocks of 4 bits")
    up = grouped.dequantize(weight_of(plan, "layers.0.mlp.gate_up_proj"))[SPEC.intermediate_size :]
    assert np.array_equal(up, grouped.dequantize(grouped.quantize(wide)))
    [note] = compiled(random_checkpoint(TINY)).notes
    assert note.startswith("14 of 14")
    assert compiled(random_checkpoint(TINY), dataclasses.replace(OPTIONS, weight_dtype=WeightDtype.INT8)).notes == ()


def test_a_depth_of_no_whole_groups_is_refused_with_a_way_out():
    odd, config = dataclasses.replace(TINY, intermediate_size=112), BuildConfig(model="tiny", weight_dtype="int4")
    with pytest.raises(UsageError, match=r"tiny has a depth of 112: use --weight-dtype int8"):
        compile_options(config, odd, "bf16")
    compile_options(config.model_copy(update={"weight_dtype": "int8"}), odd, "bf16")


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_a_dry_run_refuses_what_a_build_does(tmp_path, capsys, flags):
    tensors = random_tensors(dataclasses.replace(SPEC, intermediate_size=112))
    folder = write_folder(tmp_path / "odd", tensors, config={"intermediate_size": 112})
    output = tmp_path / "x.plan"
    with pytest.raises(SystemExit) as end:
        cli.main(["build", "-m", str(folder), "-o", str(output), "--weight-dtype", "int4", *flags])
    assert end.value.code == UsageError.exit_code
    assert "has a depth of 112: use --weight-dtype int8" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("bad", [1e7, np.nan])
def test_numbers_beyond_fp16_scales_are_refused_by_name(bad):
    checkpoint = random_checkpoint(TINY)
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = checkpoint.tensors[name].copy()
    tensor[3, 40] = bad
    plan = compiled(dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, name: tensor}))
    with pytest.raises(UsageError, match=f"{name} has numbers .* use --weight-dtype bf16"):
        weight_of(plan, "layers.1.mlp.down_proj")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("weight_dtype", "stored", "name"),
    [
        (WeightDtype.INT8, "model.layers.1.self_attn.k_proj.weight", "layers.1.self_attn.q_k_v_proj"),
        (WeightDtype.INT4, "lm_head.weight", "lm_head"),  # of int4 plans, too, the head is int8
    ],
)
def test_int8_weights_that_are_no_numbers_are_refused_by_name(bad, weight_dtype, stored, name):
    checkpoint = random_checkpoint(TINY)
    tensor = checkpoint.tensors[stored].copy()
    tensor[3, 40:42] = bad
    checkpoint = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, stored: tensor})
    plan = compiled(checkpoint, dataclasses.replace(OPTIONS, weight_dtype=weight_dtype))
    [codes, scale] = [tensor for tensor in plan.tensors if tensor.name in (name, f"{name}.scale")]
    for tensor in (codes, scale):
        with pytest.raises(UsageError, match=f"{stored} has weights that are not finite numbers"):
            tensor.load()


def test_a_plan_far_from_fp32_is_warned_of():
    near, far = (Drift(Likelihood(100), Likelihood(100), kl=100 * kl) for kl in (INT4_MAX_KL, 0.3))
    assert int4_warning(near) is None
    assert "0.3 nats a token from fp32 and agrees on 0.0%" in (int4_warning(far) or "")
