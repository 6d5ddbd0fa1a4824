"""The cpu target against onnxruntime on the same graph, and against itself in other packings."""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import numba
import numpy as np
import pytest

from tests.golden.array_checkpoint import TINY, on_int4_grid, random_checkpoint
from tests.golden.cpu_plan import CpuRunner, write_cpu_plan
from tests.golden.ort_runner import export_runner, run_packed
from trtcb.errors import OutOfMemoryError, UsageError
from trtcb.evaluation.piece import Piece, pack
from trtcb.executor.cpu_runtime import CpuRuntime
from trtcb.executor.linear import padded_rows
from trtcb.plan import Plan
from trtcb.plugins.cpu import arena
from trtcb.spec import BuildLimits, KVDtype, RopeScaling, WeightDtype

SPEC = dataclasses.replace(
    TINY,
    head_dim=32,
    max_position=512,
    rope_scaling=RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32),
)
LIMITS = BuildLimits(max_batch_size=16, max_num_tokens=512, max_seq_len=512, block_size=32)
NUM_BLOCKS = 40
# Tokens of each of three sequences, step by step; the second crosses the attention's 256-token tile.
PACKING = [(5, 70, 11), (1, 160, 0), (1, 33, 1), *[(1, 1, 1)] * 9]
ALONE = [(16, 0, 0), (0, 272, 0), (0, 0, 21)]
SMALL_CHUNKS = [(1, 0, 0)] * 16 + [(0, 32, 0)] * 8 + [(0, 8, 0)] * 2 + [(0, 0, 21)]


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(0)
    return [rng.integers(0, SPEC.vocab_size, total).tolist() for total in np.sum(PACKING, axis=0)]


@pytest.fixture(scope="module")
def tables():
    return np.random.default_rng(3).permutation(NUM_BLOCKS)[:30].reshape(3, 10)


ENGINES = ("portable", "whole_step")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_blocks", [1 << 40, 1 << 62])
def test_a_pool_that_cannot_be_allocated_is_told_with_the_way_out(tmp_path, engine, num_blocks):
    path = write_cpu_plan(tmp_path / "tiny.plan", random_checkpoint(SPEC), WeightDtype.FP32, KVDtype.FP32, LIMITS)
    with pytest.raises(OutOfMemoryError, match=r"blocks, .* cannot be allocated: lower --num-blocks, --kv-memory"):
        CpuRunner(path, num_blocks=num_blocks, engine=engine)


def cpu_runner(folder, engine, weight_dtype, kv_dtype, spec=SPEC, checkpoint=None):
    path = folder / "tiny.plan"
    write_cpu_plan(path, checkpoint or random_checkpoint(spec, seed=1), weight_dtype, kv_dtype, LIMITS)
    return CpuRunner(path, num_blocks=NUM_BLOCKS, engine=engine)


@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"), [("fp32", 2e-5), ("bf16", 0.01), ("fp16", 0.002), ("int8", 0.02), ("fp8", 0.06)]
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_steps_equal_the_graph_in_onnxruntime(tmp_path, engine, kv_dtype, tolerance, tied, sequences, tables):
    spec = dataclasses.replace(SPEC, tie_embeddings=tied)
    checkpoint = random_checkpoint(spec, seed=1)
    oracle = export_runner(tmp_path, checkpoint, KVDtype(kv_dtype), num_blocks=NUM_BLOCKS, block_size=32)
    expected = run_packed(oracle, sequences, tables, PACKING)
    found = run_packed(
        cpu_runner(tmp_path, engine, WeightDtype.FP32, KVDtype(kv_dtype), spec), sequences, tables, PACKING
    )
    assert found.keys() == expected.keys()
    scale = max(float(np.abs(logits).max()) for logits in expected.values())
    worst = max(float(np.abs(found[key] - expected[key]).max()) for key in expected)
    assert worst <= tolerance * scale


@pytest.mark.parametrize(("weight_dtype", "tolerance"), [(WeightDtype.INT8, 0.06), (WeightDtype.INT4, 0.06)])
@pytest.mark.parametrize("tied", [False, True])
def test_quantised_weights_are_near_fp32_and_the_same_bits_in_both_engines(
    tmp_path, tied, weight_dtype, tolerance, sequences, tables
):
    spec = dataclasses.replace(SPEC, tie_embeddings=tied)
    checkpoint = random_checkpoint(spec, seed=1)
    if weight_dtype is WeightDtype.INT4:
        checkpoint = on_int4_grid(checkpoint)  # of random weights rounded to 4 bits too little is left to compare
    exact = cpu_runner(tmp_path, "whole_step", WeightDtype.FP32, KVDtype.FP32, spec, checkpoint)
    expected = run_packed(exact, sequences, tables, PACKING)
    found = [
        run_packed(
            cpu_runner(tmp_path, engine, weight_dtype, KVDtype.FP32, spec, checkpoint),
            *(sequences, tables, PACKING),
        )
        for engine in ENGINES
    ]
    scale = max(float(np.abs(logits).max()) for logits in expected.values())
    worst = max(float(np.abs(found[0][key] - expected[key]).max()) for key in expected)
    assert 0 < worst <= tolerance * scale  # a scale of another row would be off by 0.5 and more
    assert all(np.array_equal(found[0][key], found[1][key]) for key in expected)


@pytest.mark.parametrize(
    ("weight_dtype", "kv_dtype"),
    [
        *((weights, kv) for weights in (WeightDtype.FP32, WeightDtype.BF16) for kv in KVDtype),
        (WeightDtype.INT8, KVDtype.FP8),
        (WeightDtype.INT4, KVDtype.INT8),
        (WeightDtype.INT4, KVDtype.FP32),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_packing_never_changes_a_bit(tmp_path, engine, weight_dtype, kv_dtype, sequences, tables):
    """Row invariance: alone or among others, whole or in chunks, a row's logits are the same bits."""
    packed = run_packed(cpu_runner(tmp_path, engine, weight_dtype, kv_dtype), sequences, tables, PACKING)
    other_tables = np.random.default_rng(4).permutation(NUM_BLOCKS)[:30].reshape(3, 10)
    for packing in (ALONE, SMALL_CHUNKS):
        found = run_packed(cpu_runner(tmp_path, engine, weight_dtype, kv_dtype), sequences, other_tables, packing)
        shared = found.keys() & packed.keys()
        assert len(shared) >= 3
        for key in shared:
            assert np.array_equal(found[key], packed[key]), f"sequence {key[0]}, position {key[1]}"


@pytest.mark.parametrize("weight_dtype", WeightDtype)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_may_want_no_logits(tmp_path, engine, weight_dtype, sequences, tables):
    runner = cpu_runner(tmp_path, engine, weight_dtype, KVDtype.FP8)
    logits = runner.step(pack([Piece(sequences[1][:40], 0, tables[1], "none")], 32))
    assert logits.shape == (0, SPEC.vocab_size)
    assert len(runner.tokens) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_are_the_greedy_choice_of_the_logits(tmp_path, engine, sequences, tables):
    runner = cpu_runner(tmp_path, engine, WeightDtype.FP32, KVDtype.FP32)
    logits = runner.step(pack([Piece(sequences[i], 0, tables[i], "last") for i in (0, 1)], 32))
    assert runner.tokens.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_of_nan_fails_alone(tmp_path, engine, sequences, tables):
    checkpoint = random_checkpoint(SPEC, seed=1)
    embedding = checkpoint.tensors["model.embed_tokens.weight"].copy()
    poisoned = sequences[0][0]
    embedding[poisoned] = np.nan
    checkpoint = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, "model.embed_tokens.weight": embedding})
    path = write_cpu_plan(tmp_path / "nan.plan", checkpoint, WeightDtype.FP32, KVDtype.INT8, LIMITS)
    runner = CpuRunner(path, num_blocks=NUM_BLOCKS, engine=engine)
    clean = [token for token in sequences[1] if token != poisoned]
    runner.step(pack([Piece([poisoned], 0, tables[0], "last"), Piece(clean, 0, tables[1], "last")], 32))
    first, second = runner.tokens.tolist()
    assert first == -1
    assert second >= 0
    # The page that held the poisoned token serves its next owner as if it had never been there.
    reused = runner.step(pack([Piece(clean, 0, tables[0], "last")], 32))
    fresh = CpuRunner(path, num_blocks=NUM_BLOCKS, engine=engine).step(pack([Piece(clean, 0, tables[2], "last")], 32))
    assert np.array_equal(reused, fresh)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_packed_weights_lie_in_one_piece_of_memory_and_values_in_another(tmp_path, engine, monkeypatch):
    """Each in huge pages of its own would take megabytes beside what it holds."""
    mapped = []
    reserve = arena._map
    monkeypatch.setattr(arena, "_map", lambda num_bytes: mapped.append(num_bytes) or reserve(num_bytes))
    cpu_runner(tmp_path, engine, WeightDtype.INT4, KVDtype.FP8)
    assert len(mapped) == {"portable": 1, "whole_step": 2}[engine]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weight_dtype", [WeightDtype.BF16, WeightDtype.INT8], ids=str)
def test_weights_are_not_held_twice(tmp_path, engine, weight_dtype):
    """Of the plan, whose pages were read to verify and to pack it, none stays in memory, the embedding's included."""
    spec = dataclasses.replace(SPEC, vocab_size=1 << 14, tie_embeddings=True)
    runner = cpu_runner(tmp_path, engine, weight_dtype, KVDtype.FP8, spec)
    mapping, resident = "", 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith(str(tmp_path / "tiny.plan")):
            mapping = line
        elif mapping and line.startswith("Rss:"):
            resident, mapping = resident + int(line.split()[1]) * 1024, ""
    embedding = spec.vocab_size * spec.hidden_size * 2
    assert resident < embedding / 4
    runner.runtime.close()


def test_an_engine_that_does_not_exist_is_no_other_one(tmp_path):
    with pytest.raises(UsageError, match="no CPU engine 'hole_step': use auto"):
        cpu_runner(tmp_path, "hole_step", WeightDtype.FP32, KVDtype.FP32)


def test_a_step_takes_the_threads_it_was_given_wherever_it_runs(tmp_path):
    path = tmp_path / "tiny.plan"
    write_cpu_plan(path, random_checkpoint(SPEC, seed=1), WeightDtype.FP32, KVDtype.FP32, LIMITS)
    runtime = CpuRuntime(Plan.open(path), num_blocks=4, max_num_tokens=64, max_num_logits=4, num_threads=1)
    seen = []

    def step():
        runtime.launch(pack([Piece([1, 2, 3], 0, range(4), "last")], LIMITS.block_size))
        runtime.wait()
        seen.append(numba.get_num_threads())

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    runtime.close()
    assert seen == [1]


SERVE_WITHOUT_TORCH = """
import sys
from pathlib import Path
from trtcb.executor.cpu_runtime import CpuRuntime
from trtcb.plan import Plan
plan = Plan.open(Path(sys.argv[1]))
CpuRuntime(plan, num_blocks=4, max_num_tokens=64, max_num_logits=4, engine="whole_step").close()
sys.exit("torch" in sys.modules)
"""


def test_the_whole_step_engine_needs_no_torch(tmp_path):
    path = tmp_path / "tiny.plan"
    write_cpu_plan(path, random_checkpoint(SPEC, seed=1), WeightDtype.BF16, KVDtype.FP8, LIMITS)
    subprocess.run([sys.executable, "-c", SERVE_WITHOUT_TORCH, path], check=True)


ROWS_OF_PACKED_PRODUCTS = """
import torch
from trtcb.executor.linear import pack_linear, padded_rows
for depth, width in ((512, 512), (576, 960), (1536, 576)):
    torch.manual_seed(0)
    multiply, x = pack_linear(torch.randn(width, depth).bfloat16()), torch.randn(512, depth).bfloat16()
    whole = multiply(x)
    for count in sorted({padded_rows(count) for count in range(1, 512)}):
        assert torch.equal(multiply(x[:count]), whole[:count]), (depth, width, count)
"""


def test_a_row_of_a_packed_bf16_product_does_not_depend_on_the_others():
    """In a process of its own: oneDNN chooses its instructions once."""
    done = subprocess.run([sys.executable, "-c", ROWS_OF_PACKED_PRODUCTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_row_counts_are_few_and_never_one():
    counts = {padded_rows(n) for n in range(1, 2049)}
    assert min(counts) == 2
    assert len(counts) < 100
    assert all(padded_rows(n) >= n for n in range(1, 2049))
