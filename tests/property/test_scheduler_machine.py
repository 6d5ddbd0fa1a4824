"""Any order of submissions, steps, aborts, pauses and faults leaves the books in order and everything given back."""

import logging
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.property.sim_world import VOCAB_SIZE, World, random_options
from trtcb.executor.config import EngineConfig
from trtcb.executor.request import Request, SamplingParams, fan_out

MAX_LEN = 40
STEMS = ((), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12))


class Machine(RuleBasedStateMachine):
    world: World

    @initialize(
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization", "static_batch"]),
        chunk_policy=st.sampled_from(["equal_progress", "first_come_first_served"]),
        chunked=st.booleans(),
        prefix_caching=st.booleans(),
        block_size=st.sampled_from([1, 2, 4]),
        batch=st.integers(1, 5),
        extra_tokens=st.integers(0, 12),
        extra_blocks=st.integers(0, 12),
        overlap_depth=st.sampled_from([0, 1]),
        options=st.integers(0, 1 << 20),
    )
    def build(
        self,
        policy,
        chunk_policy,
        chunked,
        prefix_caching,
        block_size,
        batch,
        extra_tokens,
        extra_blocks,
        overlap_depth,
        options,
    ):
        config = EngineConfig(
            scheduler_policy=policy,
            chunk_policy=chunk_policy,
            block_size=block_size,
            max_batch_size=batch,
            max_num_tokens=(block_size if chunked else MAX_LEN) + extra_tokens,
            max_seq_len=MAX_LEN,
            chunked_prefill=chunked,
            prefix_caching=prefix_caching,
            overlap_depth=overlap_depth,
            **random_options(random.Random(options), policy, least=block_size if chunked else None),
        )
        self.world = World(config, -(-MAX_LEN // block_size) + extra_blocks)

    @rule(
        stem=st.sampled_from(STEMS),
        rest=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=10),
        max_tokens=st.integers(1, 18),
        seed=st.none() | st.integers(0, 5),
        priority=st.sampled_from([0.1, 0.5, 0.9]),
        salt=st.sampled_from(["", "other"]),
        tenant=st.sampled_from(["", "a", "b"]),
        count=st.sampled_from([1, 1, 2, 4]),
    )
    def submit(self, stem, rest, max_tokens, seed, priority, salt, tenant, count):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0 if seed is None else 1.0, seed=seed)
        name = f"r{len(self.world.requests)}"
        request = Request(name, (*stem, *rest), params, priority=priority, cache_salt=salt, tenant=tenant)
        for answer in fan_out(request, count):
            self.world.submit(answer)

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.world.step()

    @rule(number=st.integers(0, 100))
    def abort(self, number):
        live = self.world.live()
        if live:
            self.world.abort(live[number % len(live)])
            self.world.check()

    @rule(number=st.integers(0, 100))
    def pause(self, number):
        self.world.force_pause(number)

    @rule(kind=st.sampled_from(["row", "nan", "batch"]), number=st.integers(0, 100))
    def fail_next_step(self, kind, number):
        self.world.runtime.fault = (kind, number)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.run_to_end()


def explore(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="trtcb")


def test_state_machine():
    explore(100, 100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_state_machine_at_length():
    explore(1000, 200)
