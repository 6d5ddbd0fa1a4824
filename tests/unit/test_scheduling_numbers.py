"""The expected numbers of TensorRT-LLM's policies, on the real scheduler with a runtime that always draws token 1.

T is the block size, P a prompt length, N the most new tokens. A trace says in which iterations each request runs.
"""

from collections.abc import Mapping, Sequence

import pytest

from trtcb.executor.config import EngineConfig
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.scheduler import Scheduler, Step
from trtcb.executor.sequence import Sequence as EngineSequence

NO_EVICT, MAX_UTIL, STATIC = "guaranteed_no_evict", "max_utilization", "static_batch"


class Trace:
    """Runs requests to their ends and keeps, for each iteration, its rows as {index: tokens}."""

    def __init__(self, requests: Sequence[tuple[int, int]], *, pool: int, arrivals: Mapping[int, int] = {}, **settings):
        defaults = {
            "block_size": 10,
            "max_num_tokens": 4096,
            "max_batch_size": 8,
            "prefix_caching": False,
            "max_seq_len": 4096,
        }
        self.scheduler = Scheduler(EngineConfig(**{**defaults, **settings}), pool)
        self.iterations: list[dict[int, int]] = []
        self.steps: list[Step] = []
        self.pauses: list[tuple[int, int]] = []  # (iteration, request)
        self.starts: list[tuple[int, int, int, int]] = []  # (iteration, request, P, N) at each start
        self._requests = requests
        self._arrivals = arrivals
        self._index: dict[EngineSequence, int] = {}

    def run(self, prompts: Sequence[tuple[int, ...]] | None = None) -> "Trace":
        waiting = list(range(len(self._requests)))
        while waiting or self.scheduler.has_work:
            for index in [i for i in waiting if self._arrivals.get(i, 0) <= len(self.iterations)]:
                waiting.remove(index)
                self._add(index, prompts[index] if prompts else None)
            self._iterate()
            assert len(self.iterations) < 2000, "no end in sight"
        assert self.scheduler.audit() == []
        assert self.scheduler.pool.num_used == 0
        return self

    def _add(self, index: int, prompt: tuple[int, ...] | None) -> None:
        length, new = self._requests[index]
        prompt = prompt or tuple(1000 * index + i for i in range(length))
        seq = EngineSequence(Request(str(index), prompt, SamplingParams()), max_tokens=new, seed=0, arrival_s=0.0)
        self._index[seq] = index
        self.scheduler.add(seq)

    def _iterate(self) -> None:
        now = len(self.iterations)
        step = self.scheduler.schedule()
        self.steps.append(step)
        self.pauses += [(now, self._index[seq]) for seq in step.paused]
        self.starts += [(now, self._index[seq], seq.num_tokens, seq.max_len - seq.num_tokens) for seq in step.started]
        rows = {self._index[seq]: 1 for seq in step.decodes} | {self._index[seq]: size for seq, size in step.chunks}
        self.iterations.append(rows)
        drawing = step.drawing
        self.scheduler.advance(step)
        self.scheduler.collect([1] * len(drawing))
        for seq in drawing:
            if seq.is_at_limit:
                self.scheduler.remove(seq)

    def spans(self) -> list[tuple[int, int, set[int]]]:
        """Iterations [start, end) with the same set of running requests."""
        spans: list[tuple[int, int, set[int]]] = []
        for now, rows in enumerate(self.iterations):
            if spans and spans[-1][2] == set(rows):
                spans[-1] = (spans[-1][0], now + 1, set(rows))
            else:
                spans.append((now, now + 1, set(rows)))
        return spans


@pytest.mark.parametrize("policy", [NO_EVICT, MAX_UTIL, STATIC])
def test_two_requests_that_fit_run_together_under_any_policy(policy):
    trace = Trace([(10, 80)] * 2, pool=20, scheduler_policy=policy).run()
    assert trace.spans() == [(0, 80, {0, 1})]
    assert trace.pauses == []


def test_max_utilization_pauses_the_second_request_and_restarts_it_with_its_output_as_prompt():
    trace = Trace([(10, 80)] * 2, pool=10, scheduler_policy=MAX_UTIL).run()
    assert trace.spans() == [(0, 41, {0, 1}), (41, 80, {0}), (80, 119, {1})]
    assert trace.pauses == [(41, 1)]
    assert trace.starts == [(0, 0, 10, 80), (0, 1, 10, 80), (80, 1, 51, 39)]


@pytest.mark.parametrize("policy", [NO_EVICT, STATIC])
def test_no_evict_runs_one_after_the_other_when_both_together_might_not_fit(policy):
    trace = Trace([(10, 80)] * 2, pool=10, scheduler_policy=policy).run()
    assert trace.spans() == [(0, 80, {0}), (80, 160, {1})]
    assert trace.pauses == []


def test_max_utilization_with_chunks_of_20():
    # 45 tokens under EQUAL_PROGRESS give each prompt two units of 10; the restarted one finds its first block again.
    trace = Trace(
        [(30, 60)] * 2,
        pool=10,
        scheduler_policy=MAX_UTIL,
        chunk_policy="equal_progress",
        max_num_tokens=45,
        prefix_caching=True,
    ).run()
    assert trace.iterations[:3] == [{0: 20, 1: 20}, {0: 10, 1: 10}, {0: 1, 1: 1}]
    assert trace.spans() == [(0, 22, {0, 1}), (22, 61, {0}), (61, 100, {1})]
    assert trace.iterations[61] == {1: 41}


def test_no_evict_with_chunks_of_20():
    trace = Trace([(30, 60)] * 2, pool=10, scheduler_policy=NO_EVICT, max_num_tokens=20).run()
    assert trace.spans() == [(0, 61, {0}), (61, 122, {1})]
    assert trace.iterations[0:3] == [{0: 20}, {0: 10}, {0: 1}]


def test_max_utilization_with_later_arrivals():
    trace = Trace([(10, 80)] * 4, pool=10, arrivals={2: 10, 3: 10}, scheduler_policy=MAX_UTIL, max_batch_size=4).run()
    assert trace.spans() == [
        (0, 10, {0, 1}),
        (10, 21, {0, 1, 2, 3}),
        (21, 41, {0, 1}),
        (41, 80, {0}),
        (80, 90, {1, 2}),
        (90, 119, {1}),
        (119, 139, {2, 3}),
        (139, 178, {2}),
        (178, 227, {3}),
    ]


@pytest.mark.parametrize("policy", [NO_EVICT, MAX_UTIL])
def test_equal_prompts_wait_one_step_and_reuse_the_first_ones_blocks(policy):
    prompt = tuple(range(21))
    trace = Trace([(21, 2)] * 3, pool=100, scheduler_policy=policy, prefix_caching=True).run([prompt] * 3)
    assert [set(rows) for rows in trace.iterations] == [{0}, {0, 1, 2}, {1, 2}]
    assert trace.iterations[1] == {0: 1, 1: 1, 2: 1}
    assert sum(seq.num_cached_tokens for step in trace.steps for seq in step.started) == 4 * 10


def test_static_batch_does_not_wait_for_equal_prompts():
    prompt = tuple(range(21))
    trace = Trace([(21, 2)] * 3, pool=100, scheduler_policy=STATIC, prefix_caching=True).run([prompt] * 3)
    assert trace.spans() == [(0, 2, {0, 1, 2})]


def test_static_batch_forms_a_new_batch_only_when_nobody_generates():
    trace = Trace([(10, 80), (10, 40), (10, 80)], pool=100, scheduler_policy=STATIC, max_batch_size=2).run()
    assert trace.spans() == [(0, 40, {0, 1}), (40, 80, {0}), (80, 160, {2})]


def test_in_flight_batching_fills_the_place_at_once():
    trace = Trace([(10, 80), (10, 40), (10, 80)], pool=100, scheduler_policy=NO_EVICT, max_batch_size=2).run()
    assert trace.spans() == [(0, 40, {0, 1}), (40, 80, {0, 2}), (80, 120, {2})]


@pytest.mark.parametrize("policy", [NO_EVICT, MAX_UTIL, STATIC])
def test_the_batch_size_bounds_a_step(policy):
    trace = Trace([(10, 80)] * 4, pool=100, scheduler_policy=policy, max_batch_size=2).run()
    assert trace.spans() == [(0, 80, {0, 1}), (80, 160, {2, 3})]
    assert trace.pauses == []


def test_equal_progress_with_a_budget_of_7_and_units_of_5():
    trace = Trace([(12, 5)] * 2, pool=100, block_size=5, max_num_tokens=7, chunk_policy="equal_progress").run()
    assert trace.iterations == [
        {0: 5},
        {0: 7},
        {0: 1, 1: 5},
        {0: 1, 1: 5},
        {0: 1, 1: 2},
        {0: 1, 1: 1},
        {1: 1},
        {1: 1},
        {1: 1},
    ]


def test_without_chunks_the_budget_admits_one_prompt_at_a_time():
    trace = Trace([(10, 10)] * 4, pool=100, max_num_tokens=12, chunked_prefill=False).run()
    sizes = [len(rows) for rows in trace.iterations]
    assert sizes[:10] == [1, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    assert len(sizes) == 20


def test_no_evict_never_lets_a_small_request_pass_the_head_of_the_line():
    trace = Trace([(10, 40), (10, 80), (10, 20)], pool=10, scheduler_policy=NO_EVICT).run()
    assert trace.spans() == [(0, 40, {0}), (40, 120, {1}), (120, 140, {2})]


class TestSourceArticles:
    """The examples of the articles on in-flight batching, at their own speeds."""

    LENGTHS = (20, 45, 80, 120, 150, 90, 60, 200)

    def test_static_batch_of_eight_wastes_more_than_half(self):
        trace = Trace([(10, n) for n in self.LENGTHS], pool=1000, scheduler_policy=STATIC).run()
        assert len(trace.iterations) * 0.025 == pytest.approx(5.0)
        tokens = sum(len(rows) for rows in trace.iterations)
        assert tokens == 765
        assert tokens / 5.0 == 153
        assert 1 - tokens / (8 * len(trace.iterations)) == pytest.approx(0.522, abs=5e-4)
        assert len(trace.iterations[100]) == 3

    def test_in_flight_batching_starts_the_ninth_request_at_500_ms(self):
        trace = Trace([(10, n) for n in self.LENGTHS * 2], pool=1000, scheduler_policy=NO_EVICT).run()
        starts = [now * 25 for now, index, _, _ in trace.starts if index >= 8]
        assert starts[0] == 500
        assert (starts[0], starts[-1]) == (500, 3000)

    @pytest.mark.parametrize(("policy", "ends_ms"), [(STATIC, [2000] * 4), (NO_EVICT, [100, 500, 1000, 2000])])
    def test_four_requests_leave_when_their_batch_or_they_themselves_are_done(self, policy, ends_ms):
        trace = Trace([(10, n) for n in (10, 50, 100, 200)], pool=1000, scheduler_policy=policy).run()
        last = [max(now for now, rows in enumerate(trace.iterations) if index in rows) + 1 for index in range(4)]
        batch_end = len(trace.iterations)
        ends = [batch_end if policy == STATIC else end for end in last]
        assert [end * 10 for end in ends] == ends_ms
