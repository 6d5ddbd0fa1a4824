"""Paged attention of the CPU target: equal to the numpy reference, and each row's bits a function of its own inputs."""

from itertools import pairwise

import numpy as np
import pytest

from tests.conformance.ragged_batch import RaggedBatch, attend, config
from trtcb.plugins.cpu.kernels import attends_on_matrix_unit, load_kernels
from trtcb.plugins.cpu.pools import from_portable, to_portable

# format, heads, kv heads, head_dim, block size: groups of 1, 3, 4 and 8, and head sizes that are no power of two
SHAPES = [
    ("fp32", 3, 3, 64, 32),
    ("fp32", 8, 1, 128, 64),
    ("bf16", 9, 3, 64, 32),
    ("bf16", 4, 4, 80, 32),
    ("bf16", 4, 4, 96, 64),
    ("fp16", 8, 2, 32, 96),
    ("int8", 9, 3, 64, 32),
    ("int8", 8, 1, 128, 32),
    ("fp8", 9, 3, 64, 32),
    ("fp8", 8, 2, 128, 32),
    ("fp8", 2, 2, 96, 64),
]
# (cached, new) per sequence: decode and chunked prefill at and around the edges of blocks, tiles and work items
MIX = [(0, 1), (255, 1), (256, 1), (37, 70), (0, 33), (600, 3), (700, 1), (250, 2), (0, 130), (511, 2)]


def shape_config(shape, **changes):
    kv, heads, kv_heads, dim, block_size = shape
    return config(kv, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, **changes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_ragged_mix_equals_the_reference(kernels, shape):
    batch = RaggedBatch.make(shape_config(shape), MIX)
    result = batch.run(kernels(batch.config))
    expected = batch.expected()
    # the stored bytes are common ground, so the formats need no different tolerance: this is rounding in fp32,
    # or on the matrix unit that of weights to bf16
    tolerance = 2e-3 * np.abs(expected).max() if attends_on_matrix_unit(batch.config) else 2e-5
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
def test_the_matrix_unit_is_close_to_vectors(kernels, kv, monkeypatch):
    cfg = shape_config((kv, 9, 3, 64, 32))
    if not attends_on_matrix_unit(cfg):
        pytest.skip("this CPU has no matrix unit that multiplies bf16")
    batch = RaggedBatch.make(cfg, MIX, seed=7)
    on_unit = batch.run(kernels(cfg))
    monkeypatch.setattr("trtcb.plugins.cpu.kernels.attends_on_matrix_unit", lambda config: False)
    in_vectors = batch.run(load_kernels(cfg))
    assert 0 < np.sqrt(np.mean((on_unit - in_vectors) ** 2) / np.mean(in_vectors**2)) < 1.5e-3


def test_one_token_is_its_own_value_exactly(kernels):
    for kv in ("bf16", "int8", "fp8"):  # whatever its weight is rounded to
        batch = RaggedBatch.make(shape_config((kv, 9, 3, 64, 32)), [(0, 1)])
        np.testing.assert_allclose(batch.run(kernels(batch.config)), batch.expected(), rtol=2e-7)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_a_value_scale_of_zero_still_counts(kernels, kv):
    batch = RaggedBatch.make(shape_config((kv, 9, 3, 64, 32)), [(0, 40)], seed=8)
    batch.pools.v_scale[batch.block_tables[0, 0] * 32 + np.arange(0, 32, 3)] = 0
    np.testing.assert_allclose(batch.run(kernels(batch.config)), batch.expected(), rtol=0, atol=8e-3)


def test_bf16_context_is_the_rounded_fp32_context(kernels):
    shape = ("fp8", 9, 3, 64, 32)
    batch = RaggedBatch.make(shape_config(shape, activation="bf16"), MIX)
    wide = RaggedBatch.make(shape_config(shape), MIX)
    narrow = batch.run(kernels(batch.config))
    np.testing.assert_array_equal(narrow, wide.run(kernels(wide.config)).astype(narrow.dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 32, 64])
def test_chunking_does_not_change_a_bit(kernels, shape, chunk):
    length = 330
    cfg = shape_config(shape)
    batch = RaggedBatch.make(cfg, [(0, length)], seed=1)
    arrays = from_portable(cfg, batch.pools)
    whole = batch.run(kernels(cfg), arrays)
    for start in range(0, length, chunk):
        rows = slice(start, min(start + chunk, length))
        cu_q = np.array([0, rows.stop - rows.start])
        part = attend(kernels(cfg), batch.query[rows], arrays, batch.block_tables, batch.positions[rows], cu_q)
        np.testing.assert_array_equal(part.view(np.uint32), whole[rows].view(np.uint32))


@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
def test_neighbours_do_not_change_a_bit(kernels, shape):
    cfg = shape_config(shape)
    batch = RaggedBatch.make(cfg, MIX, seed=2)
    arrays = from_portable(cfg, batch.pools)
    together = batch.run(kernels(cfg), arrays)
    for b in range(len(MIX)):
        rows = slice(batch.cu_q[b], batch.cu_q[b + 1])
        cu_q = np.array([0, rows.stop - rows.start])
        table = batch.block_tables[b : b + 1]
        alone = attend(kernels(cfg), batch.query[rows], arrays, table, batch.positions[rows], cu_q)
        np.testing.assert_array_equal(alone.view(np.uint32), together[rows].view(np.uint32))


def test_serial_and_parallel_runs_agree_bit_by_bit(kernels):
    cfg = shape_config(("fp8", 9, 3, 64, 32))
    batch = RaggedBatch.make(cfg, MIX, seed=3)
    loaded = kernels(cfg)
    plan = loaded.plan_attention(batch.cu_q.ctypes.data, batch.positions.ctypes.data, len(MIX), len(batch.query))
    assert plan.parts == loaded.num_threads
    parallel = batch.run(loaded)
    threads, loaded.num_threads = loaded.num_threads, 1
    try:
        serial = batch.run(loaded)
    finally:
        loaded.num_threads = threads
    np.testing.assert_array_equal(serial.view(np.uint32), parallel.view(np.uint32))


def test_stale_pool_contents_do_not_reach_a_row(kernels):
    cfg = shape_config(("bf16", 9, 3, 64, 32))
    clean, dirty = RaggedBatch.make(cfg, [(0, 45)], seed=4), RaggedBatch.make(cfg, [(0, 45)], seed=4)
    used = clean.block_tables[0, np.arange(45) // 32] * 32 + np.arange(45) % 32
    unused = np.setdiff1d(np.arange(len(clean.pools.k)), used)
    clean.pools.k[unused], clean.pools.v[unused] = 0, 0
    assert np.abs(dirty.pools.v[unused].astype(np.float32)).max() > 1e30
    a, b = clean.run(kernels(cfg)), dirty.run(kernels(cfg))
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_a_row_of_nan_stays_alone(kernels):
    cfg = shape_config(("fp8", 9, 3, 64, 32))
    batch = RaggedBatch.make(cfg, [(0, 40), (300, 1)], seed=5)
    healthy = batch.run(kernels(cfg))
    batch.query[7, 4] = np.nan
    result = batch.run(kernels(cfg)).reshape(41, 9, 64)
    assert np.isnan(result[7, 4]).all()
    result[7, 4] = healthy.reshape(result.shape)[7, 4]
    np.testing.assert_array_equal(result, healthy.reshape(result.shape))


def test_large_scores_do_not_overflow(kernels):
    cfg = shape_config(("fp32", 3, 3, 64, 32))
    batch = RaggedBatch.make(cfg, [(500, 1)], seed=6)
    batch.query *= 1e4
    np.testing.assert_allclose(batch.run(kernels(cfg)), batch.expected(), rtol=0, atol=1e-2)


def test_a_plan_covers_every_row_once_longest_first(kernels):
    cfg = shape_config(("fp8", 9, 3, 64, 32))
    batch = RaggedBatch.make(cfg, [*MIX, (3, 0)])
    loaded = kernels(cfg)
    plan = loaded.plan_attention(
        batch.cu_q.ctypes.data, batch.positions.ctypes.data, len(batch.sequences), len(batch.query)
    )
    items = loaded._items[: 3 * plan.num_items].reshape(-1, 3)
    rows = sorted((first, first + count) for _, first, count in items.tolist())
    assert [row for first, end in rows for row in range(first, end)] == list(range(len(batch.query)))
    for sequence, first, count in items:
        assert batch.cu_q[sequence] <= first
        assert first + count <= batch.cu_q[sequence + 1]
    cost = [count * (batch.positions[first] + count) for _, first, count in items]
    assert all(later < 1.5 * earlier for earlier, later in pairwise(cost))


@pytest.mark.parametrize("kv", ["fp32", "int8"])
def test_the_layouts_convert_both_ways(kv):
    cfg = config(kv, block_size=64)
    batch = RaggedBatch.make(cfg, MIX)
    back = to_portable(cfg, from_portable(cfg, batch.pools))
    for name in ("k", "v", "k_scale", "v_scale"):
        np.testing.assert_array_equal(getattr(back, name), getattr(batch.pools, name))
