"""A policy of one's own that breaks the rules ends the engine in words: no wrong token, and an end for everybody."""

import logging
from collections import defaultdict

import pytest

from trtcb.executor.config import EngineConfig
from trtcb.executor.engine import Engine
from trtcb.executor.policies import Choice, MaxUtilization
from trtcb.executor.request import Delta, FinishReason, Request, SamplingParams
from trtcb.executor.sequence import Sequence
from trtcb.executor.sim_runtime import SimRuntime, expected_tokens

REQUESTS = [
    Request(f"r{number}", tuple(range(number, 2 * number + 3)), SamplingParams(max_tokens=8, temperature=0.0))
    for number in range(6)
]


class Broken:
    """Does what ``max_utilization`` does, and from the fourth step on breaks it by ``fault``."""

    def __init__(self, fault):
        self.fault = fault
        self.num_steps = 0
        self.inner = MaxUtilization()

    def select(self, active):
        self.num_steps += 1
        choice = self.inner.select(active)
        return choice if self.num_steps < 4 else self.fault(active, choice)


def stranger() -> Sequence:
    return Sequence(REQUESTS[0], max_tokens=8, seed=0, arrival_s=0.0)


def fails(active, choice):
    raise ValueError("boom")


FAULTS = {
    "lists a request as fitting twice": lambda active, choice: Choice(choice.fitting * 2, choice.paused),
    "lists a request as paused twice": lambda active, choice: Choice([], active.running * 2),
    "runs request r0 and pauses it": lambda active, choice: Choice(choice.fitting, active.running[:1]),
    "which is not running": lambda active, choice: Choice(choice.fitting, [active.waiting.first]),
    "which is not in the active list": lambda active, choice: Choice([*choice.fitting, stranger()], choice.paused),
    "requests, but the batch has": lambda active, choice: Choice([*active.running, *active.waiting], []),
    "something else than a Choice": lambda active, choice: None,
    "something else than two lists": lambda active, choice: (choice.fitting, None),
    "that is no sequence": lambda active, choice: Choice(["r0"], []),
    "boom": fails,
}


def serve(policy, overlap_depth: int) -> tuple[Engine, dict[str, list[Delta]]]:
    deltas: dict[str, list[Delta]] = defaultdict(list)

    def keep(some: list[Delta]) -> None:
        for delta in some:
            deltas[delta.request_id].append(delta)

    config = EngineConfig(
        scheduler_policy=policy,
        block_size=4,
        max_batch_size=4,
        max_num_tokens=16,
        max_seq_len=32,
        overlap_depth=overlap_depth,
    )
    runtime = SimRuntime(num_blocks=20, block_size=4, vocab_size=23)
    engine = Engine(runtime, config, tokenizer=None, eos_token_ids=[], vocab_size=23, on_deltas=keep)
    for request in REQUESTS:
        engine.submit(request)
    engine.start()
    assert engine.wait_idle(60)
    return engine, deltas


def tokens_are_right(deltas: dict[str, list[Delta]]) -> bool:
    for request in REQUESTS:
        tokens = [token for delta in deltas[request.request_id] for token in delta.token_ids]
        expected = expected_tokens(request.prompt_token_ids, request.params, 8, vocab_size=23)
        if tokens != expected[: len(tokens)]:
            return False
    return True


@pytest.mark.parametrize("overlap_depth", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_choice_ends_the_engine_in_words(fault, overlap_depth, caplog):
    caplog.set_level(logging.CRITICAL + 1, logger="trtcb")
    engine, deltas = serve(Broken(FAULTS[fault]), overlap_depth)
    assert engine.snapshot().state == "dead"
    assert engine.snapshot().used_blocks == 0
    engine.close()
    ends = [delta for some in deltas.values() for delta in some if delta.finish_reason is not None]
    assert sorted(delta.request_id for delta in ends) == [request.request_id for request in REQUESTS]
    assert all(delta.finish_reason is FinishReason.ERROR for delta in ends)
    assert all(fault in delta.error for delta in ends)
    assert tokens_are_right(deltas)


@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_an_odd_choice_that_can_be_carried_out_is(overlap_depth):
    def odd(active, choice):
        return (reversed(choice.fitting), tuple(choice.paused))

    engine, deltas = serve(Broken(odd), overlap_depth)
    assert engine.snapshot().state == "running"
    engine.close()
    assert all(some[-1].finish_reason is FinishReason.LENGTH for some in deltas.values())
    assert tokens_are_right(deltas)
