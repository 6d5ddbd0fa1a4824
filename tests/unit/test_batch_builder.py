"""Packed batches against what the sequences themselves say."""

import random

import numpy as np
import pytest

from tests.property.sim_world import random_config, random_requests
from trtcb.executor.admission import Admission
from trtcb.executor.batch_builder import BatchBuilder
from trtcb.executor.config import EngineConfig
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.runtime import UNKNOWN_TOKEN, Batch
from trtcb.executor.scheduler import Scheduler, Step
from trtcb.executor.sequence import Sequence


def expected(step: Step, block_size: int) -> dict[str, np.ndarray | list]:
    """Every array, token by token, from the sequences."""
    ids, positions, slots, cu_q, logits, sampling = [], [], [], [0], [], []
    rows = [(seq, 1) for seq in step.decodes] + step.chunks
    for seq, size in rows:
        for position in range(seq.num_computed, seq.num_computed + size):
            ids.append(seq.token_ids[position] if position < len(seq.token_ids) else UNKNOWN_TOKEN)
            positions.append(position)
            slots.append(seq.blocks[position // block_size] * block_size + position % block_size)
        cu_q.append(len(ids))
        if seq.num_computed + size == seq.num_tokens:
            logits.append(len(ids) - 1)
            p = seq.request.params
            sampling.append((p.temperature, p.top_k, p.top_p, p.min_p, seq.seed, seq.num_tokens))
    width = max(len(seq.blocks) for seq, _ in rows)
    tables = [seq.blocks + [0] * (width - len(seq.blocks)) for seq, _ in rows]
    return {
        "input_ids": ids,
        "positions": positions,
        "slot_mapping": slots,
        "cu_q": cu_q,
        "block_tables": tables,
        "logit_index": logits,
        "sampling": sampling,
    }


def check(batch: Batch, step: Step, block_size: int) -> None:
    want = expected(step, block_size)
    for name in ("input_ids", "positions", "slot_mapping", "cu_q", "block_tables", "logit_index"):
        array = getattr(batch, name)
        assert array.dtype == np.int32, name
        assert array.tolist() == want[name], name
    got = batch.sampling
    assert [a.dtype for a in (got.temperature, got.top_k, got.top_p, got.min_p, got.seed, got.position)] == [
        np.float32,
        np.int32,
        np.float32,
        np.float32,
        np.uint64,
        np.int32,
    ]
    rows = zip(got.temperature, got.top_k, got.top_p, got.min_p, got.seed, got.position, strict=True)
    wanted = [(np.float32(t), k, np.float32(p), np.float32(m), s, n) for t, k, p, m, s, n in want["sampling"]]
    assert [tuple(row) for row in rows] == wanted


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization", "static_batch"])
def test_batches_match_their_sequences_through_pauses_ends_and_failed_steps(policy, depth):
    num_repeated = num_pauses = num_unknown = 0
    for seed in range(40):
        rng = random.Random(seed)
        requests = random_requests(rng, 8)
        longest = max(len(r.prompt_token_ids) + r.params.max_tokens for r in requests)
        config = random_config(rng, policy, longest)
        num_blocks = -(-longest // config.block_size) + rng.randint(0, 5)
        scheduler, builder = Scheduler(config, num_blocks), BatchBuilder(config, num_blocks)
        for request in requests:
            scheduler.add(Admission(config, num_blocks, 1000, None).sequence(request, 0.0))
        in_flight: list[Step] = []
        while scheduler.has_work:
            step = scheduler.schedule()
            num_pauses += len(step.paused)
            if step.num_rows:
                batch = builder.build(step)
                check(batch, step, config.block_size)
                num_unknown += int((batch.input_ids == UNKNOWN_TOKEN).sum())
                scheduler.advance(step)
                in_flight.append(step)
            if rng.random() < 0.1:
                num_repeated += 1  # what is in flight failed: its rows come again
                in_flight.clear()
                scheduler.rollback()
                builder.rollback(scheduler.running)
            elif len(in_flight) > (depth if step.num_rows else 0):
                drawing = in_flight.pop(0).drawing
                tokens = np.array([rng.randrange(1000) for _ in drawing], np.int32)
                builder.learn(tokens)
                scheduler.collect(tokens.tolist())
                for seq in drawing:
                    if seq.is_at_limit:
                        scheduler.remove(seq)
            assert scheduler.audit() == []
    assert (num_unknown > 1000) == (depth > 0)
    assert num_repeated > 100
    assert num_pauses > 20 or policy != "max_utilization"


def test_arrays_of_a_step_are_not_touched_by_the_next():
    config = EngineConfig(block_size=4, max_batch_size=4, max_num_tokens=8)
    scheduler, builder = Scheduler(config, 32), BatchBuilder(config, 32)
    for number in range(3):
        request = Request(str(number), tuple(range(6)), SamplingParams())
        scheduler.add(Sequence(request, max_tokens=20, seed=0, arrival_s=0.0))
    kept = []
    for _ in range(12):
        step = scheduler.schedule()
        batch = builder.build(step)
        kept.append((batch, expected(step, 4)))
        tokens = np.arange(len(step.drawing), dtype=np.int32)
        scheduler.advance(step)
        builder.learn(tokens)
        scheduler.collect(tokens.tolist())
    for batch, want in kept:
        assert batch.input_ids.tolist() == want["input_ids"]
        assert batch.positions.tolist() == want["positions"]
        assert batch.block_tables.tolist() == want["block_tables"]


def test_the_widest_table_bounds_the_batch():
    config = EngineConfig(block_size=4, max_batch_size=4, max_num_tokens=512, max_seq_len=4096)
    scheduler, builder = Scheduler(config, 2000), BatchBuilder(config, 2000)
    for number, length in enumerate((3, 17)):
        request = Request(str(number), tuple(range(length)), SamplingParams())
        scheduler.add(Sequence(request, max_tokens=20, seed=0, arrival_s=0.0))
    batch = builder.build(scheduler.schedule())
    assert batch.block_tables.shape == (2, 5)
    assert batch.block_tables[0, 1:].tolist() == [0] * 4
