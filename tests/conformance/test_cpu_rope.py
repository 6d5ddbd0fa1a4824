"""Rotary embedding and the KV write of the CPU target: stored bytes equal the numpy reference exactly."""

import ml_dtypes
import numpy as np
import pytest

from tests.conformance.ragged_batch import addresses, config, garbage_pools
from trtcb.plugins import reference
from trtcb.plugins.cpu.pools import from_portable, to_portable
from trtcb.spec import ModelSpec

FORMATS = ["fp32", "bf16", "fp16", "int8", "fp8"]
ACTIVATIONS = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}
NUM_BLOCKS = 9


def tables(head_dim):
    spec = ModelSpec("m", 64, 64, 1, 1, 1, head_dim, 32, 512)
    return spec.rope_tables(512)


def write(kernels, qkv, positions, slots, pools):
    """Run the kernel on a copy of ``pools``; returns the rotated query and the pools after it."""
    cfg = kernels.config
    cos, sin = tables(cfg.head_dim)
    arrays = from_portable(cfg, pools)
    query = np.full((len(qkv), cfg.num_heads, cfg.head_dim), np.nan, np.float32)
    inputs = [np.ascontiguousarray(x) for x in (cos, sin, positions, slots)]
    pointers = [x.ctypes.data for x in (*inputs, query)]
    kernels.rope_kv_write(qkv.ctypes.data, addresses(arrays), *pointers, len(qkv))
    return query, to_portable(cfg, arrays)


def split(qkv, cfg):
    heads = qkv.reshape(len(qkv), -1, cfg.head_dim)
    return np.split(heads, [cfg.num_heads, cfg.num_heads + cfg.num_kv_heads], axis=1)


def random_rows(cfg, num_rows, seed=0):
    rng = np.random.default_rng(seed)
    qkv = rng.normal(size=(num_rows, cfg.qkv_size)) * 10.0 ** rng.integers(-3, 3, (num_rows, 1))
    positions = rng.integers(0, 512, num_rows).astype(np.int32)
    slots = rng.permutation(NUM_BLOCKS * cfg.block_size)[:num_rows].astype(np.int32)
    return qkv.astype(ACTIVATIONS[cfg.activation]), positions, slots, garbage_pools(cfg, NUM_BLOCKS, rng)


def assert_same_pools(actual, expected):
    for name in ("k", "v", "k_scale", "v_scale"):
        a, b = getattr(actual, name), getattr(expected, name)
        if b is not None:
            np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"), err_msg=name)


CASES = [*((kv, "fp32", 64) for kv in FORMATS), ("fp32", "bf16", 64), ("fp8", "bf16", 64), ("int8", "fp32", 80)]


@pytest.mark.parametrize(("kv", "activation", "head_dim"), CASES)
def test_stored_bytes_and_queries_equal_the_reference(kernels, kv, activation, head_dim):
    cfg = config(kv, dim=head_dim, activation=activation)
    qkv, positions, slots, pools = random_rows(cfg, 70)
    query, after = write(kernels(cfg), qkv, positions, slots, pools)
    q, k, v = split(qkv, cfg)
    cos, sin = tables(head_dim)
    expected = reference.rope(q, cos, sin, positions) * np.float32(1 / np.sqrt(head_dim))
    np.testing.assert_array_equal(query, expected)
    reference.kv_cache_write(pools, reference.rope(k, cos, sin, positions), v, slots)
    assert_same_pools(after, pools)


SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1e-38, 65504, -65504, 65520, 3.4e38, -3.4e38, 448, 447.9]


@pytest.mark.parametrize("kv", FORMATS)
def test_special_values_are_stored_as_the_reference_says(kernels, kv):
    cfg = config(kv)
    rng = np.random.default_rng(1)
    qkv, positions, slots, pools = random_rows(cfg, 200, seed=2)
    positions[:] = 0  # no rotation: cos 1, sin 0, so special keys arrive as they are
    picked = rng.random(qkv.shape) < rng.random((200, 1)) ** 3
    qkv[picked] = rng.choice(np.array(SPECIAL, np.float32), picked.sum())
    qkv[0] = 0
    qkv[1] = np.nan
    _, after = write(kernels(cfg), qkv, positions, slots, pools)
    _, k, v = split(qkv, cfg)
    cos, sin = tables(cfg.head_dim)
    with np.errstate(invalid="ignore", over="ignore"):
        reference.kv_cache_write(pools, reference.rope(k, cos, sin, positions), v, slots)
    assert_same_pools(after, pools)
    for array in (after.k, after.v):
        numbers = array.view(ml_dtypes.float8_e4m3fn) if kv == "fp8" else array
        assert np.isfinite(numbers[slots].astype(np.float32)).all()


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_ties_round_to_even_as_in_the_reference(kernels, kv):
    cfg = config(kv)
    qkv, positions, slots, pools = random_rows(cfg, 128, seed=3)
    positions[:] = 0
    # an amax of 127 or 448 times a power of two makes the scale exact, and quotients hit the ties
    grid = np.random.default_rng(4).integers(-254, 255, qkv.shape) / 2
    qkv[:] = np.clip(grid * (1 if kv == "int8" else 0.125), -127, 127)
    qkv[:, ::64] = 127 if kv == "int8" else 448
    _, after = write(kernels(cfg), qkv, positions, slots, pools)
    _, k, v = split(qkv, cfg)
    reference.kv_cache_write(pools, k, v, slots)
    assert_same_pools(after, pools)


def test_a_token_is_stored_alike_whoever_is_in_the_batch(kernels):
    cfg = config("fp8", activation="bf16")
    loaded = kernels(cfg)
    qkv, positions, slots, pools = random_rows(cfg, 150, seed=5)  # enough rows to run on all threads
    assert loaded._parts(150, 16 * cfg.qkv_size) == loaded.num_threads
    query, after = write(loaded, qkv, positions, slots, pools)
    for row in (0, 77, 149):
        one = slice(row, row + 1)
        alone, pools_alone = write(loaded, qkv[one].copy(), positions[one], slots[one], pools)
        np.testing.assert_array_equal(alone, query[one])
        for name in ("k", "v", "k_scale", "v_scale"):
            slot = slots[row]
            np.testing.assert_array_equal(getattr(pools_alone, name)[slot], getattr(after, name)[slot])
