"""The attention kernels, in Triton's interpreter, against the reference.

Its products round queries, keys and weights to the compute type, fp16 here: the interpreter makes bf16 of fp32 by
cutting off.
"""

import dataclasses

import numpy as np
import pytest
import torch

from tests.conformance.ragged_batch import RaggedBatch
from tests.conformance.torch_arrays import to_torch
from trtcb.errors import UsageError
from trtcb.plugins.nvidia import paged
from trtcb.plugins.nvidia.paged import PagedKernels, PoolTensors, RaggedTensors
from trtcb.plugins.nvidia.shape import PagedShape
from trtcb.spec import KVDtype

TOLERANCE = 2e-3
MIXED = [(37, 20), (36, 1), (0, 33), (300, 2)]  # tokens before the step, and of it
DECODE = [(0, 1), (36, 1), (95, 1), (310, 1)]


def tensors(batch: RaggedBatch) -> tuple[torch.Tensor, PoolTensors, RaggedTensors]:
    pools = PoolTensors(*(None if a is None else to_torch(a) for a in dataclasses.astuple(batch.pools)[1:]))
    ragged = RaggedTensors(
        *(to_torch(a) for a in (batch.block_tables, batch.positions, batch.cu_q)), int(np.diff(batch.cu_q).max())
    )
    return to_torch(batch.query.astype(np.float16)), pools, ragged


def attended(batch: RaggedBatch, capability: int = 80) -> np.ndarray:
    query, pools, ragged = tensors(batch)
    out = torch.full_like(query, float("nan"))
    PagedKernels(batch.config, capability=capability).attend(query, pools, ragged, out)
    return out.numpy().reshape(len(out), -1)


def split(batch: RaggedBatch) -> np.ndarray:
    query, pools, ragged = tensors(batch)
    out = torch.full_like(query, float("nan"))
    PagedKernels(batch.config, capability=80).attend_in_splits(
        query, pools, ragged, out, int(batch.positions.max()) + 1
    )
    return out.numpy().reshape(len(out), -1)


def batch_of(kv: str, sequences, heads=9, kv_heads=3, dim=64) -> RaggedBatch:
    batch = RaggedBatch.make(PagedShape(heads, kv_heads, dim, 16, KVDtype(kv), scale=1.0), sequences)
    batch.query[:] = batch.query.astype(np.float16)
    return batch


@pytest.mark.parametrize("sequences", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("kv", ["fp32", "fp16", "bf16", "int8", "fp8"])
def test_contexts_are_the_references(kv, sequences):
    batch = batch_of(kv, sequences)
    np.testing.assert_allclose(attended(batch), batch.expected(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (5, 5, 32), (32, 1, 16)])
@pytest.mark.parametrize("sequences", [MIXED[:3], DECODE[:3]], ids=["mixed", "decode"])
def test_heads_of_any_group(heads, kv_heads, dim, sequences):
    batch = batch_of("int8", sequences, heads=heads, kv_heads=kv_heads, dim=dim)
    np.testing.assert_allclose(attended(batch), batch.expected(), atol=TOLERANCE, rtol=TOLERANCE)


def test_processors_with_e4m3_get_the_same():
    batch = batch_of("fp8", MIXED[:2])
    np.testing.assert_allclose(attended(batch, 89), attended(batch, 80), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kv", ["fp16", "fp8"])
def test_a_row_gets_the_same_bits_whatever_its_neighbours(kv):
    """In tiles of the same size: a chunk of one token alone would take another."""
    batch = batch_of(kv, MIXED)
    whole = attended(batch)
    for b, (_, new) in enumerate(batch.sequences):
        if new == 1:
            continue
        rows = slice(batch.cu_q[b], batch.cu_q[b + 1])
        alone = dataclasses.replace(
            batch,
            query=batch.query[rows],
            positions=batch.positions[rows],
            cu_q=np.array([0, new], np.int32),
            block_tables=batch.block_tables[b : b + 1],
        )
        assert np.array_equal(attended(alone), whole[rows])


@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_what_freed_blocks_hold_reaches_nobody(kv):
    """Of what a row must not see: later tokens of its own sequence's blocks, other blocks, the table's padding."""
    batch = batch_of(kv, MIXED)
    before = attended(batch)
    seen = np.zeros(len(batch.pools.k), bool)
    for b, (cached, new) in enumerate(batch.sequences):
        at = np.arange(cached + new)
        seen[batch.block_tables[b, at // 16] * 16 + at % 16] = True
    for pool in (batch.pools.k, batch.pools.v):
        pool[~seen] = 127 if kv == "int8" else 65504
    for scales in (batch.pools.k_scale, batch.pools.v_scale):
        if scales is not None:
            scales[~seen] = np.nan
    assert np.array_equal(attended(batch), before)


@pytest.mark.parametrize("kv", ["fp16", "int8", "fp8"])
def test_contexts_in_splits(kv, monkeypatch):
    monkeypatch.setattr(paged, "SPLIT", 128)
    batch = batch_of(kv, [(0, 1), (127, 1), (128, 1), (300, 1)])
    found = split(batch)
    np.testing.assert_allclose(found, batch.expected(), atol=TOLERANCE, rtol=TOLERANCE)
    assert np.array_equal(found[:2], attended(batch)[:2])  # one split is no split
    alone = dataclasses.replace(
        batch,
        query=batch.query[2:3],
        positions=batch.positions[2:3],
        cu_q=batch.cu_q[:2],
        block_tables=batch.block_tables[2:3],
    )
    assert np.array_equal(split(alone), found[2:3])


def test_a_head_that_is_no_power_of_two_is_refused():
    with pytest.raises(UsageError, match="heads of 16, 32, 64, 128, 256 elements, and this model's have 96"):
        PagedShape(8, 2, 96, 16, KVDtype.FP16, scale=1.0)
