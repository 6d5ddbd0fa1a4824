"""A step in flight while the next one is scheduled: ends, aborts, pauses, edits and failures that it meets there."""

import itertools
import logging
import time
from collections.abc import Iterable

import pytest

from tests.unit.test_engine_core import Blaming, Driver, Letters, Scripted
from trtcb.executor.core import EngineCore
from trtcb.executor.request import FinishReason
from trtcb.executor.runtime import UNKNOWN_TOKEN
from trtcb.executor.sim_runtime import SimRuntime
from trtcb.executor.step_time import StepTime
from trtcb.executor.virtual_time import BlankRuntime, TimedRuntime, VirtualClock, VirtualTimeRuntime


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL + 1, logger="trtcb")


def drive(script: dict[int, Iterable], *, overlap_depth: int = 1, **settings) -> Driver:
    return Driver(script, overlap_depth=overlap_depth, **settings)


def num_in_flight(core: EngineCore) -> int:
    return len(core._in_flight)


def num_rows_run(driver: Driver) -> int:
    return sum(stats.num_rows for stats in driver.stats)


def num_tokens_counted(driver: Driver) -> int:
    return sum(stats.generated_tokens for stats in driver.stats)


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_known():
    driver = drive({5: [0, 1, 2, 25]})
    driver.add("r", 5, 6)
    assert (driver.step().deltas, num_in_flight(driver.core)) == ([], 1)
    assert driver.stats[0].num_rows == 0
    assert [d.token_ids for d in driver.step().deltas] == [(0,)]
    assert num_in_flight(driver.core) == 1
    assert driver.core.scheduler.running[0].num_tokens == 4
    driver.run()
    ids = [batch.input_ids.tolist() for batch in driver.runtime.batches]
    assert ids == [[5, 6], *[[UNKNOWN_TOKEN]] * 4]


def test_at_depth_0_every_token_is_known():
    driver = drive({5: [0, 1, 25]}, overlap_depth=0)
    driver.add("r", 5, 6)
    driver.run()
    assert [batch.input_ids.tolist() for batch in driver.runtime.batches] == [[5, 6], [0], [1]]
    assert [stats.num_rows for stats in driver.stats] == [1, 1, 1]


class TestEnds:
    @pytest.mark.parametrize(
        ("params", "tokens", "text", "reason", "rows"),
        [
            ({"max_tokens": 3}, [0, 1, 2], "abc", FinishReason.LENGTH, 3),  # known beforehand: no row too many
            ({"max_tokens": 1}, [0], "a", FinishReason.LENGTH, 1),
            ({"max_tokens": 9}, [0, 1, 2, 25], "abc", FinishReason.STOP, 5),
            ({"max_tokens": 4}, [0, 1, 2, 25], "abc", FinishReason.STOP, 4),
            ({"max_tokens": 9, "stop": ("bc",)}, [0, 1, 2], "a", FinishReason.STOP, 4),
        ],
    )
    def test_the_answer_is_that_of_depth_0_and_the_row_too_many_is_dropped(self, params, tokens, text, reason, rows):
        driver = drive({5: [0, 1, 2, 25, 3, 4]}, tokenizer=Letters())
        driver.add("r", 5, 6, **params)
        assert driver.run().answer("r") == (tokens, text, reason)
        assert num_rows_run(driver) == rows
        assert num_tokens_counted(driver) == len(tokens)
        assert driver.stats[-1].num_running == 0

    def test_who_will_be_at_its_limit_keeps_its_place_until_its_token_arrives(self):
        driver = drive({5: [0, 0], 6: [1]}, max_batch_size=1)
        driver.add("a", 5, max_tokens=2)
        driver.add("b", 6, max_tokens=1)
        driver.step()
        driver.step()
        scheduler = driver.core.scheduler
        assert ([s.request_id for s in scheduler.settling], scheduler.running, scheduler.num_running) == (["a"], [], 1)
        driver.step()  # nothing can be launched: the step in flight has the only slot
        assert (num_in_flight(driver.core), scheduler.num_running) == (0, 0)
        driver.run()
        assert driver.answer("b") == ([1], "", FinishReason.LENGTH)

    def test_an_engine_whose_last_row_is_dropped_is_idle_after_it(self):
        driver = drive({5: [25, 0]})
        driver.add("r", 5)
        driver.step()
        assert [d.finish_reason for d in driver.step().deltas] == [FinishReason.STOP]
        assert (driver.core.num_unfinished, driver.core.has_work) == (0, True)
        driver.step()
        assert not driver.core.has_work
        assert driver.stats[-1].generated_tokens == 0

    def test_the_place_of_an_ended_request_is_taken_while_its_last_row_is_in_flight(self):
        driver = drive({5: [25, 0], 6: [1, 2, 25, 0]}, max_batch_size=1)
        driver.add("a", 5, 5)
        driver.add("b", 6, 6)
        driver.step()
        driver.step()
        assert num_in_flight(driver.core) == 1
        driver.step()
        assert [seq.request_id for seq in driver.core.scheduler.running] == ["b"]
        assert driver.run().answer("b") == ([1, 2, 25], "", FinishReason.STOP)


class TestAbort:
    def test_what_is_in_flight_for_an_aborted_request_is_dropped(self):
        driver = drive({5: itertools.repeat(0), 6: [1, 2, 25, 9]})
        driver.add("a", 5, 5)
        driver.add("b", 6, 6)
        driver.step()
        driver.core.abort("a")
        assert driver.core.scheduler.pool.num_used == 1
        driver.run()
        assert driver.answer("a") == ([], "", FinishReason.ABORT)
        assert driver.answer("b") == ([1, 2, 25], "", FinishReason.STOP)
        assert num_tokens_counted(driver) == 3

    def test_at_its_limit(self):
        driver = drive({5: [0]})
        driver.add("r", 5, max_tokens=1)
        driver.step()
        driver.core.abort("r")
        assert driver.core.scheduler.num_free_slots == 8
        assert driver.run().answer("r") == ([], "", FinishReason.ABORT)

    def test_all_at_once(self):
        driver = drive({5: [0, 1], 6: [1, 1]})
        driver.add("a", 5)
        driver.add("b", 6)
        driver.step()
        driver.core.fail_all("over")
        assert driver.core.has_work
        driver.run()
        assert [driver.answer(name)[2] for name in "ab"] == [FinishReason.ERROR] * 2


class TestPause:
    def test_a_token_in_flight_arrives_in_the_pause_and_the_restart_waits_for_it(self):
        driver = drive({5: [0, 1, 2, 25, 9, 9]}, scheduler_policy="max_utilization", tokenizer=Letters())
        driver.add("r", 5, 6)
        driver.step()
        driver.step()
        seq = driver.core.scheduler.running[0]
        driver.core.scheduler.pause(seq)
        assert (seq.started, list(seq.token_ids), seq.num_tokens) == (False, [5, 6, 0], 3)
        assert (list(driver.core.scheduler.waiting), list(driver.core.scheduler.settling)) == ([], [seq])
        assert [d.token_ids for d in driver.step().deltas] == [(1,)]
        assert list(driver.core.scheduler.waiting) == [seq]
        assert driver.run().answer("r") == ([0, 1, 2, 25], "abc", FinishReason.STOP)
        assert sum(stats.recomputed_tokens for stats in driver.stats) == 3

    def test_an_end_in_flight_ends_the_paused_request(self):
        driver = drive({5: [0, 25]}, scheduler_policy="max_utilization")
        driver.add("r", 5, 6)
        driver.step()
        driver.step()
        driver.core.scheduler.pause(driver.core.scheduler.running[0])
        driver.step()
        assert driver.answer("r") == ([0, 25], "", FinishReason.STOP)
        driver.run()

    def test_a_policy_that_pauses_and_gives_the_blocks_away_at_once(self):
        script = {first: [first] * 20 for first in (1, 2)}
        runtime = Scripted(script, num_blocks=6)
        driver = drive({}, runtime=runtime, scheduler_policy="max_utilization")
        for first in (1, 2):
            driver.add("ab"[first - 1], first, max_tokens=20)
        driver.run()
        assert [driver.answer(name)[0] for name in "ab"] == [[1] * 20, [2] * 20]
        assert sum(stats.num_pauses for stats in driver.stats) >= 1
        assert num_tokens_counted(driver) == 40


class TestEdits:
    def test_rows_with_edits_wait_for_their_tokens_and_others_do_not(self):
        driver = drive({5: [0, 1, 2, 25], 6: [1, 1, 25, 0]})
        driver.add("edited", 5, frequency_penalty=0.5)
        driver.add("plain", 6)
        driver.run()
        assert driver.answer("edited")[0] == [0, 1, 2, 25]
        assert driver.answer("plain")[0] == [1, 1, 25]
        edited = [batch for batch in driver.runtime.batches if batch.sampling.edits is not None]
        assert len(edited) == 4
        assert all(UNKNOWN_TOKEN not in batch.input_ids for batch in edited)
        counts = [batch.sampling.edits.output_counts.sum() for batch in edited]
        assert counts == [0, 1, 2, 3]


class TestFailure:
    def three(self, failures: list, healthy: bool = True) -> Driver:
        driver = drive({first: [first, first, first, 25, 0, 0] for first in (0, 1, 2)})
        driver.runtime.failures = failures
        driver.runtime.healthy = healthy
        for first in (0, 1, 2):
            driver.add("abc"[first], first, 9)
        return driver

    def test_a_failed_step_and_the_one_behind_it_are_repeated_without_the_blamed_request(self):
        driver = self.three([None, Blaming(1)])
        scheduler = driver.core.scheduler
        for _ in range(2):
            driver.step()
        driver.step()  # launches the third step and collects the second, which fails
        assert num_in_flight(driver.core) == 0
        assert [(s.num_computed, s.num_tokens, len(s.token_ids)) for s in scheduler.running] == [(2, 3, 3)] * 2
        assert scheduler.audit() == []
        # The script has moved on for rows whose tokens were thrown away: what counts is that nothing is mixed up.
        driver.run()
        assert [driver.answer(name)[2] for name in "abc"] == [
            FinishReason.STOP,
            FinishReason.ERROR,
            FinishReason.STOP,
        ]
        assert sum(stats.step_errors for stats in driver.stats) == 1
        assert num_tokens_counted(driver) == sum(len(driver.answer(name)[0]) for name in "abc")

    def test_a_row_without_logits_fails_alone_and_its_next_row_is_dropped(self):
        driver = drive({0: [0, -1, 0], 1: [1, 1, 25, 0]})
        driver.add("a", 0)
        driver.add("b", 1)
        driver.run()
        assert driver.answer("a")[::2] == ([0], FinishReason.ERROR)
        assert driver.answer("b")[::2] == ([1, 1, 25], FinishReason.STOP)
        assert num_tokens_counted(driver) == 4

    def test_who_is_only_in_the_step_behind_is_not_failed(self):
        driver = self.three([RuntimeError("out of something")])
        driver.runtime.script[3] = iter([3, 25, 0, 0])
        driver.step()
        driver.add("late", 3)
        driver.step()
        assert [driver.deltas[name][-1].finish_reason for name in "abc"] == [FinishReason.ERROR] * 3
        driver.run()
        assert driver.answer("late")[2] is FinishReason.STOP
        assert sum(stats.prompt_tokens for stats in driver.stats) == 1

    def test_a_limit_in_flight_is_taken_back_with_its_step(self):
        driver = drive({5: [0, 1, 2, 3]})
        driver.runtime.failures = [None, Blaming(7)]
        driver.runtime.healthy = True
        driver.add("r", 5, max_tokens=2)
        driver.step()
        driver.step()
        scheduler = driver.core.scheduler
        assert len(scheduler.settling) == 1
        scheduler.rollback()
        assert (len(scheduler.running), scheduler.settling) == (1, {})
        assert scheduler.audit() == []

    def test_a_pause_in_flight_counts_only_what_was_computed(self):
        driver = drive({5: [0, 1, 25, 0, 0]}, scheduler_policy="max_utilization", max_num_tokens=8)
        driver.runtime.failures = [None, Blaming(0)]
        driver.add("r", 5, *range(18), max_tokens=5)
        driver.add("b", 5, *range(18), max_tokens=5)
        driver.step()
        driver.step()  # 8 tokens are computed, 8 more are in flight
        seq = driver.core.scheduler.running[0]
        driver.core.scheduler.pause(seq)
        driver.core.scheduler.rollback()
        assert (seq.max_computed, seq.num_computed, driver.core.scheduler.waiting.first) == (8, 0, seq)

    def test_a_step_that_cannot_be_launched_fails_after_the_one_in_flight(self):
        driver = drive({5: [0, 1, 25]})
        driver.runtime.healthy = True
        driver.add("r", 5)
        driver.step()
        driver.runtime.launch = lambda batch: (_ for _ in ()).throw(ValueError("no kernel"))
        assert [d.token_ids for d in driver.step().deltas] == [(0,)]
        driver.run()
        assert driver.answer("r")[::2] == ([0], FinishReason.ERROR)
        assert "no kernel" in driver.deltas["r"][-1].error

    def test_a_dead_runtime_is_not_waited_for_again(self):
        driver = self.three([None, RuntimeError("lost the device")], healthy=False)
        driver.step()
        driver.step()
        with pytest.raises(RuntimeError, match="lost the device"):
            driver.step()
        assert len(driver.runtime.batches) == 2
        assert [d.finish_reason for d in driver.core.take_outcome(0.0).deltas] == [FinishReason.ERROR] * 3
        assert driver.core.scheduler.pool.num_used == 0


def test_a_prompt_in_flight_is_waited_for_by_those_that_begin_with_it():
    driver = drive({5: itertools.repeat(0)}, prefix_caching=True)
    prompt = (5, *range(8))
    driver.add("a", *prompt, max_tokens=30)
    driver.step()
    driver.add("b", *prompt, max_tokens=30)
    driver.step()  # a's blocks are computed by the step in flight, but not published: b would compute them again
    assert [seq.request_id for seq in driver.core.scheduler.running] == ["a"]
    driver.step()
    assert [seq.num_cached_tokens for seq in driver.core.scheduler.running] == [0, 8]


class TestTime:
    def run(self, depth: int, host_s: float, num_tokens: int = 50) -> float:
        clock = VirtualClock()
        inner = BlankRuntime(num_blocks=64, block_size=4)
        runtime = VirtualTimeRuntime(inner, clock, StepTime(1.0, host_s=host_s))
        driver = Driver(runtime=runtime, clock=clock, overlap_depth=depth, max_batch_size=1)
        driver.add("r", 5, max_tokens=num_tokens)
        driver.run()
        assert len(driver.answer("r")[0]) == num_tokens
        return clock()

    def test_the_host_is_in_the_way_at_depth_0_and_hidden_at_depth_1(self):
        assert self.run(0, 0.25) == 50 * 1.25
        assert self.run(1, 0.25) == 50 * 1.0 + 0.25
        assert self.run(1, 3.0) == pytest.approx(50 * 3.0 + 1.0)  # the slower of the two decides
        assert self.run(0, 0.0) == self.run(1, 0.0) == 50.0

    def test_a_timed_step_does_not_count_its_wait_behind_another(self):
        runtime = TimedRuntime(SimRuntime(num_blocks=64, block_size=4, step_time_s=0.01))
        driver = Driver(runtime=runtime, overlap_depth=1)
        driver.add("r", 5, max_tokens=6, ignore_eos=True)
        start_s = time.perf_counter()
        driver.run()
        assert len(runtime.seconds) == len(runtime.loads) == 6
        assert sum(runtime.seconds) <= time.perf_counter() - start_s
