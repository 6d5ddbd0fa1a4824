"""The law that finds most bugs: a request's tokens are those of its solo run, whatever happens around it."""

import logging
import random
from dataclasses import replace

import pytest

from tests.property.sim_world import World, random_config, random_requests, with_random_stops, with_siblings
from trtcb.executor.config import EngineConfig
from trtcb.executor.request import fan_out


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="trtcb")


POLICIES = ["guaranteed_no_evict", "max_utilization", "static_batch"]


def run(seed: int, policy: str, *, num_answers: int = 0) -> World:
    """One random workload with arrivals, aborts, forced pauses and injected faults.

    With ``num_answers``, each prompt gets so many, and steps fail often, each because of one row.
    """
    rng = random.Random(f"{policy}/{seed}")
    requests = [with_random_stops(rng, request) for request in random_requests(rng, rng.randint(2, 12))]
    if num_answers:
        requests = [answer for one in requests for answer in fan_out(one, num_answers)]
    elif rng.random() < 0.5:
        requests = with_siblings(rng, requests)
    longest = max(len(r.prompt_token_ids) + r.params.max_tokens for r in requests)
    config = random_config(rng, policy, longest)
    least = -(-longest // config.block_size)
    world = World(config, least + rng.randint(0, 1 + least // 2))
    world.runtime.healthy = True
    arrival = rng.choice([0.3, 1.0])
    abort, pause, fault = (rng.choice([0.0, 0.0, 0.05, 0.2]) for _ in range(3))
    waiting = list(requests)
    while waiting or world.core.has_work:
        while waiting and rng.random() < arrival:
            world.submit(waiting.pop(0))
        live = world.live()
        if live and rng.random() < abort / 3:
            world.abort(rng.choice(live))
        if rng.random() < pause and world.num_steps < 100:  # for ever, they would leave no time to get anywhere
            world.force_pause(rng.randrange(100))
        if rng.random() < (0.3 if num_answers else fault / 3):
            kinds = ["row"] if num_answers else ["row", "nan", "batch"]
            world.runtime.fault = (rng.choice(kinds), rng.randrange(100))
        world.step()
        assert world.num_steps < 3000, "no end in sight"
    world.finish()
    if pause == 0 and policy != "max_utilization":
        assert world.num_pauses == 0
    return world


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_equal_the_solo_run(policy):
    worlds = [run(seed, policy) for seed in range(400)]
    # A run of the law that never meets what it is about would prove nothing.
    assert sum(world.num_stopped_by_text for world in worlds) > 200
    assert sum(world.num_hit_tokens for world in worlds) > 1000
    if policy != "static_batch":  # which starts siblings at the same time, so that there is nothing to copy yet
        assert sum(world.runtime.num_copies for world in worlds) > 100
    assert sum(world.num_dropped for world in worlds) > 100
    if policy == "max_utilization":
        assert sum(world.num_pauses for world in worlds) > 200


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_forks_survive_the_failure_of_the_step_that_copies(policy):
    worlds = [run(seed, policy, num_answers=4) for seed in range(5000, 5100)]
    assert sum(world.runtime.num_copies for world in worlds) > 100
    assert sum(world.runtime.num_failed_copies for world in worlds) > 20


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("thousand", range(3))
def test_tokens_equal_the_solo_run_at_length(policy, thousand):
    for seed in range(1000 * (thousand + 1), 1000 * (thousand + 2)):
        run(seed, policy)


def test_chaos_in_a_tiny_pool():
    """64 mixed requests that share a beginning, a third of them aborted, in a pool that holds two at their longest."""
    rng = random.Random(7)
    requests = [
        replace(r, params=replace(r.params, max_tokens=rng.randint(15, 40), ignore_eos=True, stop_token_ids=()))
        for r in random_requests(rng, 64)
    ]
    longest = max(len(r.prompt_token_ids) + r.params.max_tokens for r in requests)
    config = EngineConfig(
        scheduler_policy="max_utilization", block_size=2, max_batch_size=16, max_num_tokens=32, max_seq_len=longest
    )
    world = World(config, 2 * -(-longest // 2))
    for request in requests:
        world.submit(request)
    doomed = rng.sample([r.request_id for r in requests], 20)
    while world.core.has_work:
        if doomed and rng.random() < 0.1:
            world.abort(doomed.pop())
        world.step()
    world.finish()
    assert world.num_pauses >= 50
