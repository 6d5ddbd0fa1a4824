"""The engine without its thread: ends, errors, records and books."""

import itertools
import logging

import numpy as np
import pytest

from trtcb.executor import core as core_module
from trtcb.executor.config import EngineConfig
from trtcb.executor.core import EngineCore
from trtcb.executor.policies import Choice
from trtcb.executor.request import Delta, FinishReason, Request, SamplingParams
from trtcb.executor.runtime import Batch, StepOutput
from trtcb.executor.sim_runtime import SimRuntime


class Letters:
    """Token i is the i-th letter; 26 is a special token without text."""

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids if i < 26)


class Scripted(SimRuntime):
    """Draws what the script says for each request, told apart by their first prompt token. Exceptions are raised."""

    def __init__(self, script: dict[int, list], **settings):
        super().__init__(**{"num_blocks": 64, "block_size": 4, **settings})
        self.script = {first: iter(tokens) for first, tokens in script.items()}
        self.failures: list[Exception | None] = []
        self.batches: list[Batch] = []
        self.is_closed = False

    def wait(self) -> StepOutput:
        batch = self._batches[0]
        self.batches.append(batch)
        super().wait()
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        rows = np.searchsorted(batch.cu_q, batch.logit_index, side="right") - 1
        firsts = [int(self._tokens[batch.block_tables[row, 0], 0]) for row in rows]
        return StepOutput(np.array([next(self.script[first]) for first in firsts], np.int32))

    def close(self) -> None:
        self.is_closed = True


class Driver:
    def __init__(self, script=None, *, runtime=None, tokenizer=None, clock=None, eos=(25,), **settings):
        self.runtime = runtime or Scripted(script or {})
        config = EngineConfig(**{"block_size": 4, "max_batch_size": 8, "max_num_tokens": 64, **settings})
        extra = {"clock": clock} if clock else {}
        self.core = EngineCore(self.runtime, config, tokenizer=tokenizer, eos_token_ids=eos, vocab_size=27, **extra)
        self.deltas: dict[str, list[Delta]] = {}
        self.stats = []

    def add(self, name: str, *prompt: int, priority: float = 0.5, arrival_s: float = 0.0, **params):
        params = SamplingParams(**{"max_tokens": 20, **params})  # without a limit, each would reserve the whole pool
        request = Request(name, prompt, params, priority=priority, arrival_s=arrival_s)
        self.core.add(self.core.admission.sequence(request, 0.0))

    def step(self):
        outcome = self.core.step()
        for delta in outcome.deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)
        if outcome.stats is not None:
            self.stats.append(outcome.stats)
        return outcome

    def run(self):
        for _ in range(500):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        self.step()
        assert self.core.scheduler.pool.num_used == 0
        return self

    def answer(self, name: str):
        deltas = self.deltas[name]
        assert [d.finish_reason is None for d in deltas] == [True] * (len(deltas) - 1) + [False]
        return (
            [token for d in deltas for token in d.token_ids],
            "".join(d.text for d in deltas),
            deltas[-1].finish_reason,
        )


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL + 1, logger="trtcb")


class TestEnds:
    @pytest.mark.parametrize(
        ("params", "tokens", "text", "reason"),
        [
            ({"max_tokens": 3}, [0, 1, 2], "abc", FinishReason.LENGTH),
            ({"max_tokens": 5}, [0, 1, 2, 25], "abc", FinishReason.STOP),
            ({"max_tokens": 4}, [0, 1, 2, 25], "abc", FinishReason.STOP),
            ({"max_tokens": 5, "ignore_eos": True}, [0, 1, 2, 25, 3], "abczd", FinishReason.LENGTH),
            ({"max_tokens": 9, "stop_token_ids": (1,)}, [0, 1], "a", FinishReason.STOP),
            ({"max_tokens": 9, "stop_token_ids": (25,), "ignore_eos": True}, [0, 1, 2, 25], "abc", FinishReason.STOP),
            ({"max_tokens": 9, "stop": ("bc",)}, [0, 1, 2], "a", FinishReason.STOP),
            ({"max_tokens": 3, "stop": ("bc",)}, [0, 1, 2], "a", FinishReason.STOP),
            ({"max_tokens": 3, "stop": ("cx", "bcx")}, [0, 1, 2], "abc", FinishReason.LENGTH),
            ({"max_tokens": 9, "stop": ("cx",)}, [0, 1, 2, 25], "abc", FinishReason.STOP),
        ],
    )
    def test_why_a_request_ends_and_what_is_sent(self, params, tokens, text, reason):
        driver = Driver({5: [0, 1, 2, 25, 3, 4]}, tokenizer=Letters())
        driver.add("r", 5, 6, **params)
        assert driver.run().answer("r") == (tokens, text, reason)

    def test_each_step_sends_one_delta_and_held_text_comes_late(self):
        driver = Driver({5: [0, 1, 4, 25]}, tokenizer=Letters())
        driver.add("r", 5, 6, stop=("bc",))
        driver.run()
        assert [(d.token_ids, d.text) for d in driver.deltas["r"]] == [
            ((0,), "a"),
            ((1,), ""),
            ((4,), "be"),
            ((25,), ""),
        ]
        assert {d.num_prompt_tokens for d in driver.deltas["r"]} == {2}

    def test_without_a_tokenizer_there_is_no_text(self):
        driver = Driver({5: [0, 25]})
        driver.add("r", 5)
        assert driver.run().answer("r") == ([0, 25], "", FinishReason.STOP)

    def test_text_survives_a_pause_and_nothing_is_sent_twice(self):
        driver = Driver({5: [0, 1, 2, 3, 25]}, tokenizer=Letters())
        driver.add("r", 5, 6, stop=("cde",))
        for _ in range(3):
            driver.step()
        driver.core.scheduler.pause(driver.core.scheduler.running[0])
        assert driver.run().answer("r") == ([0, 1, 2, 3, 25], "abcd", FinishReason.STOP)

    def test_nothing_behind_a_stop_string_is_sent_even_if_it_was_held_back(self):
        class Utf8:
            def decode(self, ids):
                return bytes(ids).decode("utf-8", "replace")

        driver = Driver({5: [97, *[255] * 20]}, tokenizer=Utf8())
        driver.add("r", 5, stop=("\ufffd" * 4,))
        tokens, text, reason = driver.run().answer("r")
        assert (text, reason) == ("a", FinishReason.STOP)
        assert len(tokens) < 12

    def test_cached_prompt_tokens_are_reported(self):
        driver = Driver({5: [0, 25, 0, 25]})
        driver.add("a", 5, 1, 2, 3, 4, 5)
        driver.run()
        driver.add("b", 5, 1, 2, 3, 9)
        driver.run()
        assert [driver.deltas[name][-1].num_cached_tokens for name in "ab"] == [0, 4]


class TestAbort:
    def test_waiting_running_and_in_the_middle_of_a_prompt(self):
        driver = Driver({5: itertools.repeat(0), 6: itertools.repeat(1)}, max_batch_size=2, max_num_tokens=8)
        driver.add("running", 5, 5, ignore_eos=True)
        driver.add("prompt", 6, *range(20))
        driver.add("waiting", 5)
        driver.step()
        assert driver.core.num_unstarted == 1
        for name in ("running", "prompt", "waiting"):
            driver.core.abort(name)
        assert not driver.core.has_work
        scheduler = driver.core.scheduler
        assert (scheduler.pool.num_used, scheduler.num_free_slots, scheduler.reserved_blocks) == (0, 2, 0)
        driver.step()
        assert [driver.deltas[n][-1].finish_reason for n in ("running", "prompt", "waiting")] == [
            FinishReason.ABORT
        ] * 3
        assert [f.reason for f in driver.stats[-1].finished] == [FinishReason.ABORT] * 3

    def test_aborting_twice_or_too_late_is_ignored(self):
        driver = Driver({5: [25]})
        driver.add("r", 5)
        driver.run()
        driver.core.abort("r")
        driver.core.abort("r")
        driver.core.abort("never")
        assert driver.step().deltas == []


class Blaming(RuntimeError):
    def __init__(self, index):
        super().__init__("bad row")
        self.request_index = index


class TestErrors:
    def three(self, failure, healthy=True):
        script = {first: [first, first, 25] for first in (0, 1, 2)}
        driver = Driver(script)
        driver.runtime.failures = [None, failure]
        driver.runtime.healthy = healthy
        for first in (0, 1, 2):
            driver.add("abc"[first], first, 9)
        return driver

    @pytest.mark.parametrize("index", [0, 1, 2, np.int64(1), np.int32(2)])
    def test_a_blamed_request_fails_alone_and_the_others_do_not_notice(self, index):
        driver = self.three(Blaming(index)).run()
        names = ["a", "b", "c"]
        tokens, _, reason = driver.answer(names.pop(index))
        assert (len(tokens), reason) == (1, FinishReason.ERROR)
        for name in names:
            first = "abc".index(name)
            assert driver.answer(name) == ([first, first, 25], "", FinishReason.STOP)
        assert sum(s.step_errors for s in driver.stats) == 1

    @pytest.mark.parametrize("index", [3, -1, np.int64(3), 1.0, "1", None])
    def test_blame_for_a_row_that_is_not_there_is_everybodys(self, index):
        driver = self.three(Blaming(index)).run()
        assert [driver.answer(name)[2] for name in "abc"] == [FinishReason.ERROR] * 3

    def test_no_valid_logits_fail_that_request_alone(self):
        driver = Driver({0: [0, -1], 1: [1, 1, 25]})
        driver.add("a", 0)
        driver.add("b", 1)
        driver.run()
        assert driver.answer("a")[::2] == ([0], FinishReason.ERROR)
        assert "no valid probabilities" in driver.deltas["a"][-1].error
        assert driver.answer("b")[::2] == ([1, 1, 25], FinishReason.STOP)
        failed = next(f for s in driver.stats for f in s.finished if f.request_id == "a")
        assert failed.num_generated_tokens == 1

    def test_what_a_failed_request_computed_is_not_found_again(self):
        driver = Driver({0: [1, -1, 25]})
        driver.add("a", 0, *range(10))
        driver.run()
        assert driver.stats[-1].cached_blocks == 0
        driver.add("b", 0, *range(10))
        driver.run()
        assert driver.deltas["b"][-1].num_cached_tokens == 0

    def test_any_other_failure_fails_the_batch_but_not_the_queue(self):
        driver = Driver({first: [first, 25] for first in range(4)}, max_batch_size=2)
        driver.runtime.failures = [RuntimeError("out of something")]
        for first in range(4):
            driver.add("abcd"[first], first)
        driver.run()
        assert [driver.answer(name)[2] for name in "abcd"] == [FinishReason.ERROR] * 2 + [FinishReason.STOP] * 2
        assert "out of something" in driver.deltas["a"][-1].error

    @pytest.mark.parametrize("healthy", [False, None])
    def test_a_runtime_that_does_not_call_itself_healthy_is_dead(self, healthy):
        driver = self.three(RuntimeError("lost the device"), healthy=healthy)
        driver.step()
        with pytest.raises(RuntimeError, match="lost the device"):
            driver.step()
        outcome = driver.core.take_outcome(0.0)
        assert [d.finish_reason for d in outcome.deltas] == [FinishReason.ERROR] * 3
        assert outcome.stats.step_errors == 1
        assert driver.core.scheduler.pool.num_used == 0

    def test_launch_fails_like_wait(self):
        driver = Driver({5: [25]})
        driver.runtime.healthy = True
        driver.runtime.launch = lambda batch: (_ for _ in ()).throw(ValueError("no kernel"))
        driver.add("r", 5)
        driver.run()
        assert "no kernel" in driver.deltas["r"][-1].error

    def test_a_tokenizer_that_raises_fails_its_request_alone(self):
        class Choking(Letters):
            def decode(self, ids):
                if 13 in ids:
                    raise ValueError("thirteen")
                return super().decode(ids)

        driver = Driver({0: [1, 13, 2], 1: [1, 2, 25]}, tokenizer=Choking())
        driver.add("a", 0)
        driver.add("b", 1)
        driver.run()
        assert driver.answer("a")[2] is FinishReason.ERROR
        assert driver.answer("b") == ([1, 2, 25], "bc", FinishReason.STOP)


class Idle:
    """A policy that lets nobody run."""

    def select(self, active):
        return Choice([], [])


class TestWatchdog:
    def test_a_stuck_head_is_given_up_with_text_and_the_rest_goes_on(self, monkeypatch):
        monkeypatch.setattr(core_module, "MAX_IDLE_PASSES", 3)
        driver = Driver({0: [25], 1: [25]})
        policy, driver.core.scheduler._policy = driver.core.scheduler._policy, Idle()
        driver.add("b", 1)
        driver.add("a", 0, priority=0.9)
        assert [driver.step().deltas for _ in range(2)] == [[], []]
        assert [d.request_id for d in driver.step().deltas] == ["a"]
        assert "made no progress in 3 passes" in driver.deltas["a"][-1].error
        driver.core.scheduler._policy = policy
        driver.run()
        assert driver.answer("b")[2] is FinishReason.STOP

    def test_progress_resets_the_count(self, monkeypatch):
        monkeypatch.setattr(core_module, "MAX_IDLE_PASSES", 2)
        driver = Driver({0: itertools.repeat(1)})
        driver.add("a", 0, max_tokens=50)
        policy = driver.core.scheduler._policy
        for _ in range(10):
            driver.core.scheduler._policy = Idle()
            driver.step()
            driver.core.scheduler._policy = policy
            driver.step()
        assert [d.finish_reason for d in driver.deltas["a"]] == [None] * 10


class TestRecords:
    def test_timings_of_a_request(self):
        now = itertools.count(0.0, 10.0)
        driver = Driver({5: [0, 1, 25]}, clock=lambda: next(now))
        driver.add("r", 5, 6, arrival_s=-100.0)
        driver.run()
        finished = driver.stats[2].finished[0]
        # The clock advances 10 a reading; a step reads it at its start, after scheduling, after waiting, at its end.
        assert (finished.queue_s, finished.ttft_s) == (100.0, 120.0)
        assert driver.stats[0].ttft_s == (120.0,)
        assert [s.itl_s for s in driver.stats[:3]] == [(), (40.0,), (40.0,)]
        assert finished.tpot_s == 40.0
        assert finished.e2e_s == 210.0
        assert (finished.num_prompt_tokens, finished.num_generated_tokens, finished.num_pauses) == (2, 3, 0)
        assert [s.schedule_s for s in driver.stats[:3]] == [10.0] * 3
        assert driver.stats[0].step_s == 30.0

    def test_counts_of_a_step(self):
        driver = Driver({5: itertools.repeat(0), 6: itertools.repeat(1)}, max_batch_size=2, max_num_tokens=8)
        driver.add("a", 5, 1, 1, 1, 1, max_tokens=30)
        driver.add("b", 6, *range(11), max_tokens=30)
        driver.add("c", 5, 5)
        driver.step()
        first = driver.stats[0]
        assert (first.num_rows, first.num_running, first.num_waiting, first.num_paused) == (1, 1, 2, 0)
        assert (first.prompt_tokens, first.generated_tokens) == (5, 1)
        driver.step()
        second = driver.stats[1]
        assert (second.num_rows, second.num_running, second.num_waiting) == (2, 2, 1)
        assert (second.prompt_tokens, second.generated_tokens) == (4, 1)
        assert (second.prefix_query_tokens, second.prefix_hit_tokens) == (12, 0)
        assert second.used_blocks == 2 + 3
        assert second.used_blocks + second.free_blocks + second.cached_blocks == 64
        assert second.reserved_blocks == (9 - 2) + (11 - 3)

    def test_prefix_hits_and_recomputation(self):
        driver = Driver({5: itertools.repeat(0)}, scheduler_policy="max_utilization", prefix_caching=True)
        driver.add("a", 5, *range(8), max_tokens=20)
        driver.step()
        driver.add("b", 5, *range(8), max_tokens=20)
        driver.step()
        assert (driver.stats[-1].prefix_query_tokens, driver.stats[-1].prefix_hit_tokens) == (9, 8)
        driver.core.scheduler.pause(driver.core.scheduler.running[0])
        driver.step()
        last = driver.stats[-1]
        assert (last.prefix_query_tokens, last.prompt_tokens) == (0, 0)
        assert last.recomputed_tokens == 2  # of the 10 computed before, 8 were found

    def test_pauses_are_counted(self):
        driver = Driver(
            {5: itertools.repeat(0), 6: itertools.repeat(1)},
            runtime=Scripted({5: itertools.repeat(0), 6: itertools.repeat(1)}, num_blocks=6),
            scheduler_policy="max_utilization",
        )
        driver.add("a", 5, 5, max_tokens=20)
        driver.add("b", 6, 6, max_tokens=20)
        driver.run()
        assert sum(s.num_pauses for s in driver.stats) == 1
        assert {s.policy for s in driver.stats} == {"max_utilization"}
        assert [f.num_pauses for s in driver.stats for f in s.finished] == [0, 1]

    def test_a_pass_in_which_nothing_happened_has_no_record(self):
        driver = Driver({})
        assert driver.step().stats is None

    def test_wrong_books_are_counted_and_do_not_stop_anything(self):
        driver = Driver({5: [0, 25]})
        driver.add("r", 5)
        driver.step()
        driver.core.scheduler.pool._free.pop()
        driver.run()
        assert driver.answer("r")[2] is FinishReason.STOP
        assert driver.core.recorder.num_audit_failures >= 2
        assert sum(s.audit_failures for s in driver.stats) == driver.core.recorder.num_audit_failures

    def test_an_idle_engine_is_audited_once_and_not_again_at_once(self, monkeypatch):
        now_s = [0.0]
        driver = Driver({5: [25, 25, 25]}, clock=lambda: now_s[0])
        audits = []
        monkeypatch.setattr(driver.core.scheduler, "audit", lambda: audits.append(1) or [])
        for at_s, num_audits in ((0.0, 1), (0.5, 1), (1.5, 2)):
            now_s[0] = at_s
            driver.add(f"r{at_s}", 5)
            driver.run()
            driver.step()
            assert len(audits) == num_audits, at_s


@pytest.mark.parametrize(
    ("settings", "num_warnings"),
    [
        ({}, 1),
        ({"scheduler_policy": "static_batch"}, 1),
        ({"scheduler_policy": "max_utilization"}, 0),
        ({"default_max_tokens": 16}, 0),
    ],
)
def test_omitted_limits_are_warned_of_once_where_they_hurt(caplog, settings, num_warnings):
    caplog.set_level(logging.WARNING, logger="trtcb")
    driver = Driver({5: itertools.repeat(25)}, **settings)
    driver.add("limited", 5)
    assert caplog.records == []
    for number in range(3):
        driver.add(f"r{number}", 5, max_tokens=None)
    assert ["set default_max_tokens" in record.message for record in caplog.records] == [True] * num_warnings
