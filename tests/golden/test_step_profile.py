"""A profiled engine draws the same bits, and its records are of all calls and of the right amount of work."""

import dataclasses

import numpy as np
import pytest

from tests.golden.array_checkpoint import TINY, random_checkpoint
from tests.golden.cpu_plan import CpuRunner, write_cpu_plan
from tests.golden.ort_runner import run_packed
from trtcb.bench.step_work import WorkLoad, work_of_calls
from trtcb.errors import UsageError
from trtcb.evaluation.piece import Piece, pack
from trtcb.executor.program_check import checked_program
from trtcb.plan import Plan
from trtcb.spec import BuildLimits, KVDtype, WeightDtype

SPEC = dataclasses.replace(TINY, head_dim=32, max_position=512)
LIMITS = BuildLimits(max_batch_size=16, max_num_tokens=512, max_seq_len=512, block_size=32)
TABLES = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "tiny.plan"
    return write_cpu_plan(path, random_checkpoint(SPEC, seed=1), WeightDtype.INT8, KVDtype.FP8, LIMITS)


def runner(plan, engine="whole_step"):
    return CpuRunner(plan, num_blocks=8, engine=engine)


def profiled(plan):
    profiles = []
    opened = runner(plan)
    opened.runtime.profile(profiles.append)
    return opened, profiles


def pieces(*shapes):
    """Pieces of (tokens, start, logits), each of a sequence of its own."""
    return pack([Piece([7] * n, start, TABLES[i], logits) for i, (n, start, logits) in enumerate(shapes)], 32)


def test_a_profile_changes_no_bit(plan):
    sequences = np.random.default_rng(0).integers(0, SPEC.vocab_size, (2, 60)).tolist()
    packing = [(50, 33), (1, 20), *[(1, 1)] * 7]
    plain = run_packed(runner(plan), sequences, TABLES, packing)
    opened, profiles = profiled(plan)
    found = run_packed(opened, sequences, TABLES, packing)
    assert len(profiles) == len(packing)
    assert found.keys() == plain.keys()
    assert all(np.array_equal(found[key], plain[key]) for key in plain)


def test_every_call_of_the_program_is_timed_and_belongs_to_a_group(plan):
    opened, profiles = profiled(plan)
    opened.step(pieces((5, 0, "last"), (1, 40, "last")))
    opened.step(pieces((3, 0, "none")))
    with Plan.open(plan) as read:
        program = checked_program(read)
        works = work_of_calls(program, read.header, read.tensors)
    assert {work.group for work in works} == {
        *("GEMM", "attention", "norm", "rope, KV write", "activation", "quantisation", "embedding, gather")
    }
    for profile in profiles:
        calls = profile.calls
        assert len(calls.busy_ns) == len(calls.wall_ns) == len(works) == len(program.calls)
        assert (calls.busy_ns <= calls.num_threads * calls.wall_ns).all()
        assert 0 < calls.wall_ns.sum() <= calls.ended_ns - calls.began_ns
        assert profile.draw_ns > 0
        for work, busy_ns in zip(works, calls.busy_ns, strict=True):
            runs = work.rows == "tokens" or work.group == "GEMM" or profile.num_logits > 0  # of no rows, too
            assert (busy_ns > 0) == runs


def test_work_of_a_tiny_model_by_hand(plan):
    """Two layers of 64, 4 heads and 2 KV heads of 32, inner size 96, a vocabulary of 100; int8 weights, fp8 KV."""
    opened, profiles = profiled(plan)
    opened.step(pieces((5, 0, "last"), (1, 40, "last")))  # 6 tokens; contexts 5 and 41; 1+2+3+4+5+41 keys
    opened.step(pieces((3, 0, "none")))  # 3 tokens; context 3; 1+2+3 keys
    load = WorkLoad()
    for profile in profiles:
        load.add(profile)
    with Plan.open(plan) as read:
        works = work_of_calls(checked_program(read), read.header, read.tensors)
    found = {(work.label or work.group): (work.num_bytes(load), work.flops(load)) for work in works}
    steps, tokens = 2, 9
    assert found == {
        "q_k_v_proj 256 x 64": (steps * (256 * 64 + 256 * 4), tokens * 2 * 256 * 64),
        "o_proj 64 x 128": (steps * (64 * 128 + 64 * 4), tokens * 2 * 64 * 128),
        "gate_up_proj 192 x 64": (steps * (192 * 64 + 192 * 4), tokens * 2 * 192 * 64),
        "down_proj 64 x 96": (steps * (64 * 96 + 64 * 4), tokens * 2 * 64 * 96),
        "logits 100 x 64": (100 * 64 + 100 * 4, 2 * 2 * 100 * 64),  # one step had rows, two of them
        "attention": ((5 + 41 + 3) * 2 * 2 * (32 + 2), (56 + 6) * 4 * 4 * 32),
        **dict.fromkeys(["norm", "rope, KV write", "activation", "quantisation", "embedding, gather"], (0, 0)),
    }


def test_the_portable_engine_says_what_to_do_instead(plan):
    with pytest.raises(UsageError, match="add --cpu-engine whole_step"):
        runner(plan, "portable").runtime.profile(print)
