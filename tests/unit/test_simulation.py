"""Virtual time: arrivals, ends and clocks of the driver, on the core that serves."""

import time

import numpy as np
import pytest

from trtcb.executor.answers import AnswerReader
from trtcb.executor.config import EngineConfig
from trtcb.executor.request import Delta, FinishReason, Request, SamplingParams
from trtcb.executor.sim_runtime import SimRuntime, expected_tokens
from trtcb.executor.simulation import Simulation
from trtcb.executor.stats import FinishedRequest
from trtcb.executor.step_time import StepTime
from trtcb.executor.virtual_time import BlankRuntime, ScriptedRuntime, SkippingClock, VirtualClock, VirtualTimeRuntime

VOCAB = 50
END = VOCAB
STEP_S = 0.5


class World:
    """A simulation of requests given as (arrival, prompt length, output length, max_tokens)."""

    def __init__(
        self,
        rows: list[tuple[float, int, int, int]],
        *,
        blank: bool = False,
        max_concurrency: int | None = None,
        **settings,
    ) -> None:
        settings = {"block_size": 4, "num_blocks": 40, "max_batch_size": 4, "max_num_tokens": 64, **settings}
        self.config = EngineConfig(max_seq_len=128, **settings)
        size = {"num_blocks": self.config.num_blocks, "block_size": 4}
        inner = BlankRuntime(**size) if blank else SimRuntime(vocab_size=VOCAB, **size)
        self.clock = VirtualClock()
        ends = np.array([prompt + output - 1 for _, prompt, output, _ in rows])
        runtime = ScriptedRuntime(VirtualTimeRuntime(inner, self.clock, StepTime(STEP_S)), ends, END)
        self.refused: dict[str, str] = {}
        self.deltas: dict[str, list[Delta]] = {}
        self.ended_s: dict[str, float] = {}
        self.stats: list[FinishedRequest] = []
        self.simulation = Simulation(
            runtime,
            self.config,
            self.clock,
            eos_token_id=END,
            on_refused=lambda request, reason: self.refused.update({request.request_id: reason}),
            max_concurrency=max_concurrency,
            reader=AnswerReader(),
        )
        self.requests = [
            Request(
                str(number),
                tuple((number + index) % VOCAB for index in range(prompt)),
                SamplingParams(max_tokens=limit, temperature=0.0, seed=number),
                arrival_s=arrival,
            )
            for number, (arrival, prompt, _, limit) in enumerate(rows)
        ]
        for outcome in self.simulation.run(iter(self.requests)):
            self.stats += [] if outcome.stats is None else outcome.stats.finished
            for delta in outcome.deltas:
                self.deltas.setdefault(delta.request_id, []).append(delta)
                if delta.finish_reason is not None:
                    self.ended_s[delta.request_id] = self.clock()

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas[request_id] for token in delta.token_ids]


def test_a_request_that_arrives_during_a_step_waits_for_the_next_and_idle_time_is_skipped() -> None:
    world = World([(1.0, 4, 3, 3), (1.2, 4, 1, 1), (100.25, 4, 2, 2)])
    assert world.ended_s == {"0": 2.5, "1": 2.0, "2": 101.25}


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization", "static_batch"])
def test_answers_end_where_the_script_says_with_the_tokens_of_the_model(policy: str) -> None:
    rows = [(0.3 * number, 5, 1 + number % 7, 20) for number in range(20)]
    world = World(rows, scheduler_policy=policy, num_blocks=8)
    for request, (_, prompt, output, limit) in zip(world.requests, rows, strict=True):
        expected = expected_tokens(request.prompt_token_ids, request.params, output - 1, vocab_size=VOCAB)
        assert world.tokens(request.request_id) == [*expected, END], (prompt, limit)
        assert [d.finish_reason for d in world.deltas[request.request_id]][-1] is FinishReason.STOP
    assert world.simulation.core.scheduler.audit() == []
    assert world.simulation.core.scheduler.pool.num_used == 0


def test_an_answer_as_long_as_declared_ends_too() -> None:
    world = World([(0.0, 4, 6, 6)])
    assert len(world.tokens("0")) == 6


def test_keeping_no_contents_changes_no_decision() -> None:
    rows = [(0.4 * number, 3 + number % 9, 1 + (7 * number) % 13, 16) for number in range(40)]
    for policy in ("guaranteed_no_evict", "max_utilization", "static_batch"):
        checked, blank = (World(rows, scheduler_policy=policy, num_blocks=10, blank=blank) for blank in (False, True))
        assert checked.ended_s == blank.ended_s


def test_a_closed_loop_sends_when_another_has_ended() -> None:
    world = World([(0.0, 4, 2, 2), (0.0, 4, 4, 4), (0.0, 4, 1, 1), (9.0, 4, 1, 1)], max_concurrency=2)
    assert world.ended_s == {"0": 1.0, "1": 2.0, "2": 1.5, "3": 9.5}
    # Clients that wait are no burden to the engine: times count from when a request was sent.
    assert [request.queue_s for request in world.stats] == [0.0] * 4
    assert [request.e2e_s for request in world.stats] == [1.0, 0.5, 2.0, 0.5]


def test_refusals_are_told_with_their_reason() -> None:
    world = World([(0.0, 4, 2, 2), (0.0, 4, 2, 2), (0.0, 4, 2, 2)], max_queue_size=1, max_batch_size=1)
    assert world.refused == {"1": "the queue is full", "2": "the queue is full"}
    too_long = World([(0.0, 100, 2, 2)], num_blocks=10)
    assert "needs 26 KV blocks" in too_long.refused["0"]


def test_the_skipping_clock_runs_on_and_jumps_forward_only() -> None:
    clock = SkippingClock()
    clock.jump_to(1000.0)
    first = clock()
    clock.jump_to(5.0)
    time.sleep(0.002)
    assert 1000.0 <= first < clock() < 1100.0


def test_a_runtime_is_used_one_step_at_a_time() -> None:
    with pytest.raises(RuntimeError, match="no step is in flight"):
        BlankRuntime(num_blocks=1, block_size=1).wait()
