"""The KV cache of the real model, bit for bit: found, forked or computed again in whatever company, it is the same.

Token equality could hide a difference that no choice happened to turn on; bytes of keys, values and scales cannot.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trtcb.executor.config import EngineConfig
from trtcb.executor.core import EngineCore
from trtcb.executor.cpu_runtime import CpuRuntime
from trtcb.executor.request import Request, SamplingParams, fan_out
from trtcb.executor.sequence import Sequence
from trtcb.plan import Plan
from trtcb.spec import KVDtype

pytestmark = pytest.mark.model

PROMPTS = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_reference.json").read_text())["prompts"]
TEXT = [token for prompt in PROMPTS for token in prompt["prompt_ids"]]
PREFIX = tuple(TEXT[:100])  # three blocks of 32, and four tokens
SEED = 1000
NUM_BLOCKS = 24
TOKEN_AXIS = {"k": 3, "v": 2, "k_scale": 2, "v_scale": 2}  # of the CPU's pools, plugins/cpu/pools.py


class Watched:
    """A CPU runtime that keeps the logits of every row, by the row's seed and position."""

    def __init__(self, path: Path) -> None:
        self.inner = CpuRuntime(Plan.open(path), num_blocks=NUM_BLOCKS, max_num_tokens=512, max_num_logits=16)
        self.num_blocks, self.block_size, self.healthy = NUM_BLOCKS, self.inner.block_size, True
        self.logits: dict[tuple[int, int], np.ndarray] = {}
        self.num_copies = 0
        self._rows: list[tuple[int, int]] = []

    def launch(self, batch) -> None:
        self._rows = list(zip(batch.sampling.seed.tolist(), batch.sampling.position.tolist(), strict=True))
        self.num_copies += len(batch.copies)
        self.inner.launch(batch)

    def wait(self):
        output = self.inner.wait()
        self.logits |= zip(self._rows, self.inner.logits()[: len(self._rows)].copy(), strict=True)
        return output

    def kv(self, seq: Sequence, count: int) -> dict[str, np.ndarray]:
        """Bytes of the first ``count`` tokens as ``seq`` finds them: ``[tokens, ...]`` for each layer and array."""
        found = {}
        for layer, pools in enumerate(self.inner._engine._pools):
            for name, array in pools.items():
                by_token = np.moveaxis(array[seq.blocks], TOKEN_AXIS[name], 1)  # [block, token, ...]
                tokens = by_token.reshape(-1, *by_token.shape[2:])[:count]
                found[f"{name} of layer {layer}"] = np.ascontiguousarray(tokens).view(np.uint8)
        return found


class Engine:
    """A core on the runtime, with one request that is watched."""

    def __init__(self, runtime: Watched, *, num_blocks: int = NUM_BLOCKS, **settings) -> None:
        config = EngineConfig(**{"max_batch_size": 16, "max_num_tokens": 512, "max_seq_len": 700, **settings})
        runtime.num_blocks = num_blocks  # it has more
        self.core = EngineCore(runtime, config, tokenizer=None, eos_token_ids=[], vocab_size=49152)

    def add(self, request: Request) -> Sequence:
        seq = self.core.admission.sequence(request, 0.0)
        self.core.add(seq)
        return seq

    def add_neighbours(self, count: int) -> None:
        for number in range(count):
            prompt = tuple(TEXT[200 + 50 * number :][: 40 + 30 * number])
            self.add(Request(f"n{number}", prompt, SamplingParams(max_tokens=60, seed=number)))

    def run_until(self, *seqs: Sequence, num_tokens: int) -> None:
        for _ in range(200):
            if all(seq.num_tokens >= num_tokens for seq in seqs):
                return
            self.core.step()
        raise AssertionError("no end in sight")


def watched_request(max_tokens: int = 40) -> Request:
    return Request("r", PREFIX, SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=SEED))


FORMATS = [("fp32", kv.value) for kv in KVDtype] + [("bf16", "fp8")]
OTHER_FORMATS = [("bf16", kv.value) for kv in KVDtype if kv is not KVDtype.FP8]


@pytest.fixture(
    scope="module",
    params=FORMATS + [pytest.param(dtypes, marks=pytest.mark.slow) for dtypes in OTHER_FORMATS],
    ids="-".join,
)
def runtime(request, smollm2_plan) -> Iterator[Watched]:
    runtime = Watched(smollm2_plan(*request.param))
    yield runtime
    runtime.inner.close()


@pytest.fixture(scope="module")
def alone(runtime) -> tuple[dict[str, np.ndarray], np.ndarray, tuple[int, ...]]:
    """KV of the prefix computed in one chunk alone, the logits after it, and the six tokens that follow."""
    engine = Engine(runtime, prefix_caching=False)
    seq = engine.add(watched_request())
    engine.run_until(seq, num_tokens=101)
    kv, logits = runtime.kv(seq, 100), runtime.logits[SEED, 100]
    engine.run_until(seq, num_tokens=106)
    return kv, logits, tuple(seq.token_ids[100:])


@contextlib.contextmanager
def compared(runtime: Watched, alone) -> Iterator[list[Sequence]]:
    """Compares the sequences that the block appends, when it ends, with the one that ran alone; logits too."""
    kv, logits, _ = alone
    runtime.logits.clear()
    seqs: list[Sequence] = []
    yield seqs
    assert seqs
    for seq in seqs:
        same_bits(runtime.kv(seq, 100), kv)
        assert np.array_equal(runtime.logits[seq.seed, 100].view(np.uint32), logits.view(np.uint32))


def same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    differing = [name for name, array in expected.items() if not np.array_equal(found[name], array)]
    assert differing == []


def test_scales_belong_to_quantised_formats_and_nothing_is_blank(runtime, alone):
    kv, logits, _ = alone
    names = {name.split()[0] for name in kv}
    assert names == ({"k", "v"} if len(kv) == 60 else {"k", "v", "k_scale", "v_scale"})
    assert len(kv) == 30 * len(names)
    for array in kv.values():
        assert all(token.any() for token in array)
    assert np.isfinite(logits).all()


def test_in_chunks_beside_neighbours(runtime, alone):
    engine = Engine(runtime, prefix_caching=False, max_num_tokens=45, chunk_policy="equal_progress")
    engine.add_neighbours(2)
    engine.core.step()
    with compared(runtime, alone) as seqs:
        seq = engine.add(watched_request())
        engine.run_until(seq, num_tokens=101)
        seqs.append(seq)
    assert len(engine.core.scheduler.running) == 3


def test_computed_again_after_a_pause(runtime, alone):
    """What was decoded token by token is then computed as one prompt, and what comes next is the same again."""
    engine = Engine(runtime, prefix_caching=False)
    seq = engine.add(watched_request())
    engine.run_until(seq, num_tokens=105)
    before = runtime.kv(seq, 104)
    engine.core.scheduler.pause(seq)
    engine.add_neighbours(1)
    runtime.logits.clear()
    engine.run_until(seq, num_tokens=106)
    assert seq.num_pauses == 1
    same_bits(runtime.kv(seq, 104), before)
    same_bits(runtime.kv(seq, 100), alone[0])
    assert tuple(seq.token_ids[100:106]) == alone[2]


def test_found_in_the_cache_evicted_from_it_and_computed_again(runtime, alone):
    engine = Engine(runtime, num_blocks=8)
    first = engine.add(watched_request(max_tokens=2))
    engine.run_until(first, num_tokens=102)
    with compared(runtime, alone) as seqs:
        hit = engine.add(watched_request())
        engine.run_until(hit, num_tokens=101)
        assert hit.num_cached_tokens == 96
        seqs.append(hit)
    engine.core.abort("r")
    flood = engine.add(Request("flood", tuple(TEXT[300:550]), SamplingParams(max_tokens=1)))
    engine.run_until(flood, num_tokens=251)
    with compared(runtime, alone) as seqs:
        again = engine.add(watched_request())
        engine.run_until(again, num_tokens=101)
        assert again.num_cached_tokens == 0
        seqs.append(again)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_forked(runtime, alone, prefix_caching):
    runtime.num_copies = 0
    engine = Engine(runtime, prefix_caching=prefix_caching)
    with compared(runtime, alone) as seqs:
        seqs += [engine.add(request) for request in fan_out(watched_request(), 3)]
        engine.run_until(*seqs, num_tokens=101)
        assert [seq.num_cached_tokens for seq in seqs] == [0, 99, 99]
        assert runtime.num_copies == 2
        # Whose block was copied has gone on writing into it; the copies are the forks' own.
        assert len({seq.blocks[3] for seq in seqs}) == 3
    engine.run_until(*seqs, num_tokens=106)
    assert {tuple(seq.token_ids[100:106]) for seq in seqs} == {alone[2]}


def test_forked_from_whole_blocks_alone(runtime):
    """Of a prompt that fills its blocks, the last block is copied too: its last token is written again."""
    request = replace(watched_request(), prompt_token_ids=PREFIX[:96])
    engine = Engine(runtime, prefix_caching=False)
    source, fork = (engine.add(one) for one in fan_out(request, 2))
    engine.run_until(source, fork, num_tokens=97)
    assert fork.num_cached_tokens == 95
    assert fork.blocks[:2] == source.blocks[:2]
    assert fork.blocks[2] != source.blocks[2]
    same_bits(runtime.kv(fork, 96), runtime.kv(source, 96))
    assert np.array_equal(runtime.logits[SEED, 96], runtime.logits[SEED + 1, 96])
