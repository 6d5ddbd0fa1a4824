import dataclasses
import json
import math

import pytest

from trtcb.builder.compiler import CompileOptions
from trtcb.builder.cpu import CpuCompiler
from trtcb.builder.estimate import estimate
from trtcb.builder.random_weights import RandomCheckpoint
from trtcb.plan_format import ITEM_BYTES
from trtcb.plugins.cpu.rows import row_bytes
from trtcb.program import Program
from trtcb.spec import BuildLimits, KVDtype, ModelSpec, WeightDtype

LLAMA_2_7B = ModelSpec("llama-2-7b", 4096, 11008, 32, 32, 32, 128, 32000, 4096)
SMOLLM2 = ModelSpec("smollm2-135m", 576, 1536, 30, 9, 3, 64, 49152, 8192, tie_embeddings=True)
GIB = 1 << 30


def of(spec: ModelSpec, kv: KVDtype, **changes: object):
    arguments = {"limits": BuildLimits(), "weight_dtype": WeightDtype.BF16, "available_bytes": 64 * GIB, **changes}
    return estimate(spec, kv_dtype=kv, **arguments)


def test_llama_2_7b() -> None:
    fp16 = of(LLAMA_2_7B, KVDtype.FP16, kv_memory_bytes=16 * GIB)
    assert fp16.num_params == 6_738_415_616
    norms = (2 * 32 + 1) * 4096 * 2  # are fp32, twice the size
    assert fp16.weight_bytes == 13_476_831_232 + norms + 4096 * 128 * 4  # weights and rotary tables
    assert fp16.kv_bytes_per_token == 524_288
    assert fp16.kv_share_of_fp16 == 1.0
    assert fp16.block_bytes == 16 << 20
    assert (fp16.num_blocks, fp16.num_sequences) == (1024, 8)
    assert of(LLAMA_2_7B, KVDtype.FP32).kv_bytes_per_token == 1_048_576


@pytest.mark.parametrize("kv", [KVDtype.FP8, KVDtype.INT8])
def test_scales_are_counted(kv: KVDtype) -> None:
    llama = of(LLAMA_2_7B, kv, kv_memory_bytes=16 * GIB)
    assert llama.kv_bytes_per_token == 266_240
    assert round(llama.kv_share_of_fp16, 3) == 0.508
    assert (llama.num_blocks, llama.num_sequences) == (2016, 15)
    smol = of(SMOLLM2, kv)
    assert smol.kv_bytes_per_token == 2 * 30 * 3 * (64 + 2)
    assert round(smol.kv_share_of_fp16, 3) == 0.516


def test_smollm2_parameters() -> None:
    assert of(SMOLLM2, KVDtype.BF16).num_params == 134_515_008
    assert of(SMOLLM2, KVDtype.BF16, weight_dtype=WeightDtype.FP32).weight_bytes == 538_060_032 + 4096 * 64 * 4


def test_pool_is_what_the_fraction_leaves() -> None:
    result = of(LLAMA_2_7B, KVDtype.FP16, kv_memory_fraction=0.5)
    assert result.pool_bytes == 32 * GIB - result.weight_bytes - result.activation_bytes
    assert result.num_blocks == result.pool_bytes // result.block_bytes
    assert result.resident_bytes <= 32 * GIB


def test_too_little_memory_holds_nothing() -> None:
    result = of(LLAMA_2_7B, KVDtype.FP16, available_bytes=8 * GIB)
    assert (result.pool_bytes, result.num_blocks, result.num_sequences) == (0, 0, 0)


def test_a_sequence_that_is_no_multiple_of_a_block_needs_a_whole_one() -> None:
    limits = dataclasses.replace(BuildLimits(), max_seq_len=33)
    block = 524_288 * 32
    assert of(LLAMA_2_7B, KVDtype.FP16, limits=limits, kv_memory_bytes=3 * block).num_sequences == 1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weight_dtype", WeightDtype)
def test_weights_and_activations_are_those_of_the_plan(weight_dtype: WeightDtype, tied: bool) -> None:
    hidden, inner = (96, 160) if weight_dtype is WeightDtype.INT4 else (80, 112)
    spec = ModelSpec("tiny", hidden, inner, 3, 4, 2, 32, 250, 128, tie_embeddings=tied)
    limits = BuildLimits(max_batch_size=5, max_num_tokens=48, max_seq_len=96)
    options = CompileOptions(weight_dtype, KVDtype.FP8, limits)
    compiled = CpuCompiler().compile(RandomCheckpoint(spec, seed=0), options)
    found = of(spec, KVDtype.FP8, weight_dtype=weight_dtype, limits=limits)
    assert found.weight_bytes == sum(math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in compiled.tensors)
    [program] = [section for section in compiled.sections if section.name == "program"]
    values = Program.from_json(json.loads(b"".join(program.chunks()))).values
    arrays = {"tokens": 48, "logits": 5}
    assert found.activation_bytes == sum(arrays[v.rows] * row_bytes(v.dtype, v.width) for v in values)


def test_int4_weights_are_five_eighths_of_a_byte() -> None:
    int8, int4 = (
        of(LLAMA_2_7B, KVDtype.BF16, weight_dtype=w).weight_bytes for w in (WeightDtype.INT8, WeightDtype.INT4)
    )
    layers = 32 * 4096 * (4 * 4096 + 3 * 11008)
    scales = 32 * (5 * 4096 + 2 * 11008) * 4
    assert int8 - int4 == layers * 3 // 8 + scales
