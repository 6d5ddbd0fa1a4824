"""The oldest waiting and the oldest paused request, through a core with a clock of its own."""

from trtcb.executor.config import EngineConfig
from trtcb.executor.core import EngineCore
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.sim_runtime import SimRuntime


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_core(clock: Clock) -> EngineCore:
    config = EngineConfig(scheduler_policy="max_utilization", block_size=4, max_batch_size=4, max_num_tokens=64)
    runtime = SimRuntime(num_blocks=8, block_size=4)
    return EngineCore(runtime, config, tokenizer=None, eos_token_ids=[], vocab_size=256, clock=clock)


def add(core: EngineCore, name: str, now_s: float) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0)
    core.add(core.admission.sequence(Request(name, (1, 2, 3, len(name)), params), now_s))


def test_the_oldest_arrival_counts_until_it_starts():
    clock = Clock()
    core = make_core(clock)
    assert core.liveness.waiting_since_s is None
    add(core, "a", 100.0)
    add(core, "b", 101.0)
    assert core.liveness.waiting_since_s == 100.0
    core.abort("a")
    assert core.liveness.waiting_since_s == 101.0
    core.step()
    assert core.liveness.waiting_since_s is None


def test_the_oldest_pause_counts_until_the_restart_or_the_end():
    clock = Clock()
    core = make_core(clock)
    for number in range(3):
        add(core, "x" * (number + 1), 100.0)
    paused_at: list[float] = []
    while core.has_work:
        clock.now_s += 1.0
        outcome = core.step()
        if outcome.stats is not None and outcome.stats.num_pauses:
            paused_at.append(clock.now_s)
        since = core.liveness.paused_since_s
        assert (since is not None) == (core.scheduler.num_paused > 0)
        if since is not None:
            assert since in paused_at
    assert len(paused_at) >= 2
    assert core.liveness.paused_since_s is None


def test_a_paused_request_that_is_aborted_is_forgotten():
    clock = Clock()
    core = make_core(clock)
    for number in range(3):
        add(core, "x" * (number + 1), 100.0)
    while not core.scheduler.num_paused:
        core.step()
    for seq in list(core.scheduler.waiting):
        core.abort(seq.request_id)
    assert core.liveness.paused_since_s is None
