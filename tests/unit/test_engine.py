"""The engine thread: messages, limits, races, and an end for everybody."""

import logging
import random
import threading
import time
from collections import defaultdict

import pytest

from tests.property.sim_world import EOS, VOCAB_SIZE, Letters, check_answer
from trtcb.errors import DrainingError, EngineDeadError, QueueFullError, RequestError, UsageError
from trtcb.executor.config import EngineConfig
from trtcb.executor.engine import Engine
from trtcb.executor.request import Delta, FinishReason, Request, SamplingParams
from trtcb.executor.sim_runtime import SimRuntime

WAIT_S = 20.0


class Gated(SimRuntime):
    """Holds every step until ``gate`` is set, and raises ``failure`` if there is one."""

    def __init__(self, **settings):
        super().__init__(**{"num_blocks": 64, "block_size": 4, "vocab_size": VOCAB_SIZE, **settings})
        self.gate = threading.Event()
        self.gate.set()
        self.failure: BaseException | None = None
        self.entered = threading.Event()
        self.closed_by: list[str] = []

    def wait(self):
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        output = super().wait()
        if self.failure is not None:
            raise self.failure
        return output

    def close(self):
        self.closed_by.append(threading.current_thread().name)


class Harness:
    def __init__(self, *, start: bool = True, on_step=None, runtime=None, **settings):
        self.runtime = runtime or Gated()
        self.config = EngineConfig(**{"block_size": 4, "max_batch_size": 8, "max_num_tokens": 64, **settings})
        self.deltas: dict[str, list[Delta]] = defaultdict(list)
        self.num_calls = 0
        self.engine = Engine(
            self.runtime,
            self.config,
            tokenizer=Letters(),
            eos_token_ids=[EOS],
            vocab_size=VOCAB_SIZE,
            on_deltas=self.receive,
            on_step=on_step,
        )
        if start:
            self.engine.start()

    def receive(self, deltas):
        self.num_calls += 1
        for delta in deltas:
            self.deltas[delta.request_id].append(delta)

    def submit(self, name: str, prompt=(5, 6, 7), **params) -> Request:
        request = Request(name, tuple(prompt), SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params}))
        self.engine.submit(request)
        return request

    def reason(self, name: str) -> FinishReason:
        reasons = [d.finish_reason for d in self.deltas[name]]
        assert None not in reasons[-1:]
        assert set(reasons[:-1]) <= {None}
        return reasons[-1]

    def block(self, name: str = "blocker", **params) -> None:
        """Bring the engine into the middle of a step of ``name``."""
        self.runtime.entered.clear()
        self.runtime.gate.clear()
        self.submit(name, **params)
        assert self.runtime.entered.wait(WAIT_S)


@pytest.fixture
def harness(request):
    made = []

    def make(**settings) -> Harness:
        made.append(Harness(**settings))
        return made[-1]

    yield make
    for one in made:
        one.runtime.gate.set()
        assert one.engine.close(WAIT_S)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL + 1, logger="trtcb")


@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_many_threads_submit_and_everybody_gets_the_solo_answer(harness, overlap_depth):
    settings = {"scheduler_policy": "max_utilization", "max_queue_size": 1000, "overlap_depth": overlap_depth}
    h = harness(runtime=Gated(num_blocks=14), **settings)
    requests: list[Request] = []

    def client(number: int) -> None:
        rng = random.Random(number)
        for index in range(20):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
            requests.append(
                h.submit(f"{number}-{index}", prompt, max_tokens=rng.randint(1, 20), temperature=1.0, seed=index)
            )

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert h.engine.wait_idle(WAIT_S)
    assert len(requests) == 80
    for request in requests:
        check_answer(request, h.deltas[request.request_id], h.config)
    now = h.engine.snapshot()
    assert (now.num_running, now.num_waiting, now.num_paused, now.used_blocks, now.audit_failures) == (0, 0, 0, 0, 0)
    assert not now.has_work


def test_deltas_come_once_a_step_for_the_whole_batch(harness):
    h = harness(start=False)
    for number in range(8):
        h.submit(f"r{number}", max_tokens=5, ignore_eos=True)
    h.engine.start()
    assert h.engine.wait_idle(WAIT_S)
    assert h.num_calls == 5
    assert {len(deltas) for deltas in h.deltas.values()} == {5}


def test_unseeded_requests_differ_and_seeded_ones_do_not(harness):
    h = harness()
    for name, seed in [("a", None), ("b", None), ("c", 5), ("d", 5)]:
        h.submit(name, temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True)
    assert h.engine.wait_idle(WAIT_S)
    tokens = {n: [t for d in h.deltas[n] for t in d.token_ids] for n in "abcd"}
    assert tokens["c"] == tokens["d"]
    assert tokens["a"] != tokens["b"]


def test_an_idle_engine_does_not_spin(harness, monkeypatch):
    h = harness()
    h.submit("r")
    assert h.engine.wait_idle(WAIT_S)
    passes = []
    launch = h.engine._core.launch
    monkeypatch.setattr(h.engine._core, "launch", lambda: passes.append(1) or launch())
    time.sleep(0.1)
    assert len(passes) <= 1


class TestRefusals:
    def test_what_can_never_be_served_is_refused_at_once(self, harness):
        h = harness()
        with pytest.raises(RequestError, match="but the pool has 64"):
            h.submit("r", max_tokens=300)
        assert not h.engine.snapshot().has_work
        with pytest.raises(RequestError):
            h.engine.check(Request("r", (), SamplingParams()))

    def test_an_id_in_use_is_refused_until_its_end(self, harness):
        h = harness()
        h.block("r")
        with pytest.raises(RequestError, match="'r' is in use") as caught:
            h.submit("r")
        assert caught.value.param == "request_id"
        h.runtime.gate.set()
        assert h.engine.wait_idle(WAIT_S)
        h.submit("r")
        assert h.engine.wait_idle(WAIT_S)

    def test_the_queue_is_bounded_by_requests_that_never_ran(self, harness):
        h = harness(max_batch_size=1, max_queue_size=2)
        h.block()
        h.submit("a")
        h.submit("b")
        with pytest.raises(QueueFullError, match="2 requests are waiting"):
            h.submit("c")
        assert h.engine.snapshot().num_waiting == 2
        h.engine.abort("a")
        h.runtime.gate.set()
        assert h.engine.wait_idle(WAIT_S)
        h.submit("c")
        assert h.engine.wait_idle(WAIT_S)
        assert h.reason("a") is FinishReason.ABORT
        assert "c" in h.deltas

    def test_the_inbox_counts_as_queue(self, harness):
        h = harness(start=False, max_queue_size=2)
        h.submit("a")
        h.submit("b")
        with pytest.raises(QueueFullError):
            h.submit("c")
        h.engine.start()
        assert h.engine.wait_idle(WAIT_S)

    def test_another_block_size_than_the_runtimes_is_refused(self):
        with pytest.raises(UsageError, match="block_size 8 is not the runtime's 4"):
            Harness(start=False, block_size=8)


class TestAbort:
    def test_in_the_inbox_waiting_and_running(self, harness):
        h = harness(max_batch_size=1)
        h.block("running", max_tokens=200, ignore_eos=True)
        h.submit("waiting")
        for name in ("running", "waiting"):
            h.engine.abort(name)
        h.submit("inbox")
        h.engine.abort("inbox")
        h.runtime.gate.set()
        assert h.engine.wait_idle(WAIT_S)
        assert [h.reason(n) for n in ("running", "waiting", "inbox")] == [FinishReason.ABORT] * 3
        assert h.engine.snapshot().used_blocks == 0

    def test_unknown_and_ended_ids_are_ignored(self, harness):
        h = harness()
        h.engine.abort("never")
        h.submit("r")
        assert h.engine.wait_idle(WAIT_S)
        h.engine.abort("r")
        time.sleep(0.02)
        assert h.reason("r") is not FinishReason.ABORT

    @pytest.mark.parametrize("overlap_depth", [0, 1])
    def test_races_with_the_end_leave_one_terminal_delta_and_no_blocks(self, harness, overlap_depth):
        h = harness(max_queue_size=2000, overlap_depth=overlap_depth)
        rng = random.Random(0)
        for number in range(400):
            h.submit(f"r{number}", prompt=[number % VOCAB_SIZE] * rng.randint(1, 9), max_tokens=rng.randint(1, 4))
            if rng.random() < 0.5:
                h.engine.abort(f"r{max(0, number - rng.randint(0, 3))}")
        assert h.engine.wait_idle(WAIT_S)
        reasons = [h.reason(f"r{number}") for number in range(400)]
        assert len(h.deltas) == 400
        assert FinishReason.ABORT in reasons
        now = h.engine.snapshot()
        assert (now.used_blocks, now.num_waiting, now.audit_failures) == (0, 0, 0)


class TestDrainAndClose:
    @pytest.mark.parametrize("overlap_depth", [0, 1])
    def test_draining_refuses_the_new_and_finishes_the_rest(self, harness, overlap_depth):
        h = harness(max_batch_size=1, overlap_depth=overlap_depth)
        h.block("running")
        h.submit("waiting")
        h.engine.drain()
        assert h.engine.snapshot().state == "draining"
        with pytest.raises(DrainingError):
            h.submit("late")
        assert not h.engine.wait_idle(0.01)
        h.runtime.gate.set()
        assert h.engine.wait_idle(WAIT_S)
        assert all(h.reason(n) in (FinishReason.STOP, FinishReason.LENGTH) for n in ("running", "waiting"))

    @pytest.mark.parametrize("overlap_depth", [0, 1])
    def test_closing_ends_everybody_with_an_error_and_closes_the_runtime_on_its_own_thread(
        self, harness, overlap_depth
    ):
        h = harness(max_batch_size=1, overlap_depth=overlap_depth)
        h.block("running", max_tokens=100, ignore_eos=True)
        h.submit("waiting")
        assert not h.engine.close(0.01)
        assert h.runtime.closed_by == []
        h.runtime.gate.set()
        assert h.engine.close(WAIT_S)
        assert [h.reason(n) for n in ("running", "waiting")] == [FinishReason.ERROR] * 2
        assert h.deltas["waiting"][-1].error == "The engine was closed."
        assert h.runtime.closed_by == ["trtcb-engine"]
        now = h.engine.snapshot()
        assert (now.state, now.has_work, now.used_blocks, now.is_alive) == ("closed", False, 0, False)
        with pytest.raises(EngineDeadError, match="closed"):
            h.submit("late")
        assert h.engine.close(WAIT_S)
        assert "trtcb-engine" not in {t.name for t in threading.enumerate() if t is h.engine._thread}

    def test_closing_an_engine_that_never_started(self):
        h = Harness(start=False)
        h.submit("r")
        assert h.engine.close()
        assert h.engine.close()
        assert h.reason("r") is FinishReason.ERROR
        assert len(h.runtime.closed_by) == 1
        with pytest.raises(RuntimeError, match="started once"):
            h.engine.start()

    def test_starting_twice_is_an_error(self, harness):
        with pytest.raises(RuntimeError, match="started once"):
            harness().engine.start()


class TestFailure:
    @pytest.mark.parametrize("overlap_depth", [0, 1])
    def test_a_dead_runtime_ends_everybody_and_refuses_the_rest(self, harness, overlap_depth):
        h = harness(max_batch_size=1, overlap_depth=overlap_depth)
        h.runtime.healthy = False
        h.block("running")
        h.submit("waiting")
        h.runtime.failure = RuntimeError("device lost")
        h.runtime.gate.set()
        assert h.engine.wait_idle(WAIT_S)
        assert [h.reason(n) for n in ("running", "waiting")] == [FinishReason.ERROR] * 2
        assert all("device lost" in h.deltas[n][-1].error for n in ("running", "waiting"))
        now = h.engine.snapshot()
        assert (now.state, now.error, now.is_alive, now.used_blocks) == ("dead", "device lost", False, 0)
        with pytest.raises(EngineDeadError, match="device lost"):
            h.submit("late")
        assert h.engine.close(WAIT_S)
        assert len(h.runtime.closed_by) == 1

    def test_a_healthy_runtime_goes_on(self, harness):
        h = harness()
        h.block("a")
        h.runtime.failure = RuntimeError("once")
        h.runtime.gate.set()
        assert h.engine.wait_idle(WAIT_S)
        h.runtime.failure = None
        h.submit("b")
        assert h.engine.wait_idle(WAIT_S)
        assert h.reason("a") is FinishReason.ERROR
        assert h.reason("b") in (FinishReason.STOP, FinishReason.LENGTH)

    def test_an_exception_that_is_no_exception_ends_everybody_too(self, harness):
        h = harness()
        h.block("a")
        h.runtime.failure = SystemExit("worse")
        h.runtime.gate.set()
        assert h.engine.wait_idle(WAIT_S)
        assert h.reason("a") is FinishReason.ERROR
        assert h.engine.snapshot().state == "dead"

    def test_a_bug_in_the_scheduler_ends_everybody(self, harness, monkeypatch):
        h = harness(start=False)
        h.submit("a")
        monkeypatch.setattr(h.engine._core.scheduler, "schedule", lambda: 1 / 0)
        h.engine.start()
        assert h.engine.wait_idle(WAIT_S)
        assert "division by zero" in h.deltas["a"][-1].error
        assert h.engine.snapshot().state == "dead"

    def test_broken_books_do_not_keep_anybody_waiting(self, harness, monkeypatch):
        h = harness(start=False)
        h.submit("a")
        h.submit("b")
        monkeypatch.setattr(h.engine._core.scheduler, "schedule", lambda: 1 / 0)
        monkeypatch.setattr(h.engine._core, "fail_all", lambda reason: 1 / 0)
        h.engine.start()
        assert h.engine.wait_idle(WAIT_S)
        assert [h.reason(n) for n in "ab"] == [FinishReason.ERROR] * 2

    def test_an_owner_that_raises_is_not_told_twice(self, harness):
        h = harness()
        seen = []

        def receive(deltas):
            seen.extend(deltas)
            raise ValueError("owner is gone")

        h.engine._on_deltas = receive
        h.submit("a", max_tokens=1)
        assert h.engine.wait_idle(WAIT_S)
        assert h.engine.close(WAIT_S)
        assert [d.finish_reason is not None for d in seen] == [True]
        assert h.engine.snapshot().state == "dead"
        assert len(h.runtime.closed_by) == 1


class TestSnapshot:
    def test_states_and_counts(self, harness):
        h = harness(start=False, max_batch_size=1)
        assert h.engine.snapshot().state == "new"
        h.engine.start()
        assert h.engine.snapshot().state == "running"
        h.block("a", max_tokens=30, ignore_eos=True)
        h.submit("b")
        first = h.engine.snapshot()
        assert (first.num_running, first.used_blocks) == (1, 1)
        assert (first.num_waiting, first.has_work, first.is_alive, first.num_blocks) == (1, True, True, 64)
        h.runtime.gate.set()
        assert h.engine.wait_idle(WAIT_S)
        last = h.engine.snapshot()
        assert last.steps == 30 + len(h.deltas["b"])
        assert last.free_blocks + last.cached_blocks == 64
        assert last.last_step_s > 0

    def test_a_stuck_step_shows_as_old_progress_with_work(self, harness):
        h = harness()
        h.block("a")
        before = h.engine.snapshot().last_progress_s
        time.sleep(0.05)
        now = h.engine.snapshot()
        assert now.has_work
        assert now.last_progress_s == before
        assert time.monotonic() - now.last_progress_s >= 0.05

    def test_work_that_arrives_at_an_idle_engine_starts_the_clock(self, harness):
        h = harness(start=False)
        time.sleep(0.05)
        h.submit("a")
        assert time.monotonic() - h.engine.snapshot().last_progress_s < 0.05

    def test_the_oldest_waiting_request_shows_whether_the_engine_has_seen_it_or_not(self, harness):
        h = harness(max_batch_size=1)
        assert h.engine.snapshot().oldest_waiting_s == 0
        h.block("a", max_tokens=30, ignore_eos=True)
        assert h.engine.snapshot().oldest_waiting_s == 0
        h.submit("b", max_tokens=3, ignore_eos=True)
        h.submit("c", max_tokens=3, ignore_eos=True)
        time.sleep(0.05)
        assert 0.05 <= h.engine.snapshot().oldest_waiting_s < WAIT_S
        h.runtime.gate.set()
        assert h.engine.wait_idle(WAIT_S)
        assert h.engine.snapshot().oldest_waiting_s == 0

    def test_steps_are_reported_after_their_deltas(self, harness):
        order = []
        h = harness(start=False, on_step=lambda stats: order.append(("step", sum(map(len, h.deltas.values())))))
        h.submit("a", max_tokens=3, ignore_eos=True)
        h.engine.start()
        assert h.engine.wait_idle(WAIT_S)
        assert order == [("step", 1), ("step", 2), ("step", 3)]
