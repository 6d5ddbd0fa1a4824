"""Several answers to one prompt: what is shared, what is copied, what is computed, and what that costs in blocks."""

import pytest

from tests.unit.scheduler_bench import Bench
from trtcb.executor.config import EngineConfig
from trtcb.executor.core import EngineCore
from trtcb.executor.policies import Choice
from trtcb.executor.request import FinishReason, Request, SamplingParams, fan_out
from trtcb.executor.sim_runtime import SimRuntime, expected_tokens

SKIPPING = ["guaranteed_no_evict", "max_utilization"]


def with_answers(policy: str, count: int, length: int, *, pool: int = 100, new: int = 20, **settings) -> Bench:
    """Answers a, b, c, … to one prompt of ``length`` tokens; blocks have 10."""
    bench = Bench(policy, pool, **settings)
    for name in "abcdefgh"[:count]:
        bench.add(name, 0, new, prompt=range(length), fork_group="g")
    return bench


@pytest.mark.parametrize("policy", SKIPPING)
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(
    ("length", "num_shared", "is_copied"),
    [
        (2, 0, True),
        (7, 0, True),  # shorter than a block
        (10, 0, True),  # exactly a block: its last token is computed again, so it is written to
        (11, 1, False),  # what is left after whole blocks is that last token
        (20, 1, True),
        (37, 3, True),
    ],
)
def test_the_first_computes_the_prompt_and_the_others_only_its_last_token(
    policy, prefix_caching, length, num_shared, is_copied
):
    bench = with_answers(policy, 4, length, prefix_caching=prefix_caching)
    assert bench.step() == {"a": length}
    before = bench.scheduler.pool.num_used
    step = bench.schedule()
    assert {seq.request_id: size for seq, size in step.chunks} == {"b": 1, "c": 1, "d": 1}
    source, *others = (bench.sequences[name] for name in "abcd")
    for seq in others:
        assert seq.num_computed == seq.num_cached_tokens == length - 1
        assert seq.blocks[:num_shared] == source.blocks[:num_shared]
        assert not set(seq.blocks[num_shared:]) & set(source.blocks)
    num_blocks = -(-length // 10)
    grown = length % 10 == 0  # the source's first token has no room
    assert bench.scheduler.pool.num_used - before == 3 * (num_blocks - num_shared) + grown
    copies = [(source.blocks[num_shared], seq.blocks[num_shared]) for seq in others] if is_copied else []
    assert step.copies == copies


def test_one_token_has_nothing_to_share():
    bench = with_answers("guaranteed_no_evict", 3, 1)
    assert bench.step() == {"a": 1, "b": 1, "c": 1}
    assert bench.scheduler.siblings._groups == {}


def test_siblings_wait_while_a_chunked_prompt_is_computed():
    bench = with_answers("guaranteed_no_evict", 3, 35, max_num_tokens=30)
    assert [bench.step() for _ in range(3)] == [{"a": 30}, {"a": 5}, {"a": 1, "b": 1, "c": 1}]


def test_paused_siblings_start_over_at_once():
    bench = with_answers("max_utilization", 2, 15)
    for _ in range(3):
        bench.step()
    for name in "ab":
        bench.scheduler.pause(bench.sequences[name])
    assert bench.step() == {"a": 18, "b": 17}


def test_siblings_fork_as_soon_as_all_but_the_last_token_is_computed():
    bench = with_answers("guaranteed_no_evict", 3, 21, max_num_tokens=20)
    assert [bench.step() for _ in range(2)] == [{"a": 20}, {"a": 1, "b": 1, "c": 1}]


def test_others_pass_siblings_that_wait():
    bench = with_answers("max_utilization", 2, 35, max_num_tokens=20)
    bench.add("z", 5, 3)
    assert bench.step() == {"a": 20}
    assert bench.step() == {"a": 15, "z": 5}
    assert bench.step() == {"a": 1, "z": 1, "b": 1}


def test_static_batch_starts_all_at_once_and_shares_nothing():
    bench = with_answers("static_batch", 3, 25)
    assert bench.step() == {"a": 25, "b": 25, "c": 25}
    assert bench.step() == {"a": 1, "b": 1, "c": 1}
    assert bench.scheduler.pool.num_used == 9


@pytest.mark.parametrize("policy", SKIPPING)
@pytest.mark.parametrize("difference", [{"prompt": range(1, 26)}, {"salt": "other"}, {"fork_group": "h"}])
def test_nothing_is_shared_with_another_prompt_salt_or_group(policy, difference):
    bench = Bench(policy, 100)
    bench.add("a", 0, 5, prompt=range(25), fork_group="g")
    bench.step()
    bench.add("b", 0, 5, **{"prompt": range(25), "fork_group": "g", **difference})
    step = bench.schedule()
    assert [size for _, size in step.chunks] == [25]
    assert step.copies == []


@pytest.mark.parametrize(("policy", "need"), [("max_utilization", 2), ("guaranteed_no_evict", 3)])
def test_a_fork_takes_all_but_the_shared_blocks(policy, need):
    """A prompt of 25 tokens and 10 more: 4 blocks at most, 3 at once, of which 2 are shared."""
    for spare in (0, 1):
        pool = {"max_utilization": 3, "guaranteed_no_evict": 4}[policy] + need - 2 + spare
        bench = with_answers(policy, 2, 25, pool=pool, new=10)
        bench.step()
        started = [seq.request_id for seq in bench.schedule().started]
        assert started == (["b"] if spare else [])


def test_a_watermark_keeps_forks_out_too():
    bench = with_answers("max_utilization", 3, 25, pool=8, watermark=0.5)
    assert bench.step() == {"a": 25}
    assert bench.step() == {"a": 1, "b": 1}  # 3 blocks used and 1 to take: 4 stay free
    assert bench.step() == {"a": 1, "b": 1}
    assert bench.waiting() == ["c"]


def test_a_fork_that_finds_no_tokens_left_comes_later():
    bench = with_answers("guaranteed_no_evict", 4, 25, max_num_tokens=30, chunked_prefill=False)
    bench.step()
    bench.add("z", 28, 5, priority=0.9)
    assert bench.step() == {"a": 1, "z": 28, "b": 1}
    assert bench.step() == {"z": 1, "a": 1, "b": 1, "c": 1, "d": 1}


class TestEndsOfTheSource:
    def test_it_may_end_before_anybody_forked(self):
        bench = with_answers("guaranteed_no_evict", 3, 25, new=1)
        assert [bench.step() for _ in range(3)] == [{"a": 25}, {"b": 25}, {"c": 25}]

    def test_a_fork_is_a_source(self):
        bench = with_answers("guaranteed_no_evict", 3, 25, max_batch_size=2)
        bench.step()
        bench.step()
        bench.scheduler.remove(bench.sequences["a"])
        assert bench.step() == {"b": 1, "c": 1}
        assert bench.sequences["c"].num_cached_tokens == 24

    def test_aborted_before_the_copy_was_run_its_block_is_kept_for_it(self):
        bench = with_answers("max_utilization", 2, 25)
        bench.step()
        source, fork = bench.sequences["a"], bench.sequences["b"]
        [(read, written)] = bench.schedule().copies
        bench.scheduler.remove(source)  # and the step fails
        assert bench.scheduler.pool.references[read] == 1
        assert bench.scheduler.audit() == []
        bench.add("z", 900, 1)
        step = bench.schedule()
        assert step.copies == [(read, written)]
        assert read not in bench.sequences["z"].blocks
        assert written == fork.blocks[2]
        bench.scheduler.advance(step)
        bench.scheduler.collect([1] * len(step.drawing))
        assert bench.scheduler.pool.references[read] == 0
        assert bench.schedule().copies == []

    def test_paused_it_cannot_be_forked_from(self):
        bench = with_answers("max_utilization", 2, 25)
        bench.step()
        bench.scheduler.pause(bench.sequences["a"])
        assert bench.step() == {"a": 26}  # it restarts, being first in line, and the other waits for it
        assert bench.step() == {"a": 1, "b": 1}

    def test_paused_in_the_pass_it_is_no_source_any_more(self):
        bench = with_answers("max_utilization", 2, 25, pool=6, max_batch_size=4)
        bench.step()
        bench.add("z", 35, 5, priority=0.9)
        step = bench.schedule()  # the newcomer needs a's blocks
        assert [seq.request_id for seq in step.paused] == ["a"]
        assert [seq.request_id for seq, _ in step.chunks] == ["z"]
        assert step.copies == []

    def test_when_its_computation_went_wrong_nobody_forks_from_what_it_shares(self):
        bench = with_answers("guaranteed_no_evict", 4, 25, max_batch_size=2)
        bench.step()
        bench.step()
        bench.scheduler.fail(bench.sequences["a"])  # b goes on, on blocks of a
        assert bench.step() == {"b": 1, "c": 25}
        assert bench.scheduler.audit() == []


class TestEndsOfTheFork:
    def test_aborted_or_paused_before_its_copy_ran_it_holds_nothing(self):
        for end in ("remove", "pause"):
            bench = with_answers("max_utilization", 2, 25)
            bench.step()
            bench.schedule()
            getattr(bench.scheduler, end)(bench.sequences["b"])
            assert bench.scheduler.audit() == []
            assert bench.scheduler.pool.num_used == 3

    @pytest.mark.parametrize("prefix_caching", [False, True])
    def test_after_a_pause_it_starts_over_by_the_prefix_cache(self, prefix_caching):
        bench = with_answers("max_utilization", 2, 25, prefix_caching=prefix_caching)
        bench.step()
        bench.step()
        bench.scheduler.pause(bench.sequences["b"])
        assert bench.step() == {"a": 1, "b": 6 if prefix_caching else 26}
        assert bench.sequences["b"].num_cached_tokens == 24  # of its first start


class ForkThenPause:
    """Lets the waiting start, then pauses whom they fork from: no built-in policy does, as forks rank behind."""

    def select(self, active):
        fitting = list(active.running)
        for seq in active.waiting:
            if not active.beneficial_to_skip(seq):
                active.blocks_this_step(seq)
                fitting.append(seq)
                active.admit(seq)
        paused = [seq for seq in active.running if len(fitting) > len(active.running) and seq.num_generated == 2]
        for seq in paused:
            active.pause(seq)
        return Choice([seq for seq in fitting if seq not in paused], paused)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_fork_stands_though_its_source_is_paused_in_the_same_pass(prefix_caching):
    config = EngineConfig(
        scheduler_policy=ForkThenPause(), block_size=4, max_seq_len=40, max_num_tokens=64, prefix_caching=prefix_caching
    )
    core = EngineCore(SimRuntime(num_blocks=40, block_size=4), config, tokenizer=None, eos_token_ids=[], vocab_size=256)
    first, second = fan_out(Request("r", tuple(range(11)), SamplingParams(max_tokens=8, temperature=0.0)), 2)
    core.add(core.admission.sequence(first, 0.0))
    core.step()
    core.step()
    core.add(core.admission.sequence(second, 0.0))
    stats = core.step().stats
    assert (stats.num_pauses, stats.num_running, stats.prompt_tokens) == (1, 1, 1)
    [fork] = core.scheduler.running
    assert core.scheduler.audit() == []
    assert fork.num_computed == 11
    assert list(fork.token_ids[11:]) == expected_tokens(range(11), first.params, 1)


def test_a_failed_copy_is_made_again():
    """The first run of the step may have overwritten all that it wrote; what it read is as it was."""

    class Failing(SimRuntime):
        fails = False

        def wait(self):
            self.copies = self._batches[0].copies.tolist()
            output = super().wait()
            if self.fails:
                self.fails = False
                self._tokens[[written for _, written in self.copies]] = -7
                error = RuntimeError("injected")
                error.request_index = 0
                raise error
            return output

    runtime = Failing(num_blocks=40, block_size=4)
    config = EngineConfig(block_size=4, max_seq_len=40, max_num_tokens=64, prefix_caching=False)
    core = EngineCore(runtime, config, tokenizer=None, eos_token_ids=[], vocab_size=256)
    params = SamplingParams(max_tokens=5, temperature=0.0)
    deltas = []
    for request in fan_out(Request("r", tuple(range(11)), params), 3):
        core.add(core.admission.sequence(request, 0.0))
    deltas += core.step().deltas
    runtime.fails = True
    deltas += core.step().deltas  # the source is blamed, and ends
    copies = runtime.copies
    assert len(copies) == 2
    deltas += core.step().deltas
    assert runtime.copies == copies
    while core.has_work:
        deltas += core.step().deltas
        assert runtime.copies == []
    ends = {delta.request_id: delta.finish_reason for delta in deltas if delta.finish_reason}
    assert ends == {"r-0": FinishReason.ERROR, "r-1": FinishReason.LENGTH, "r-2": FinishReason.LENGTH}
    for name in ("r-1", "r-2"):
        tokens = [token for delta in deltas if delta.request_id == name for token in delta.token_ids]
        assert tokens == expected_tokens(range(11), params, 5)
    assert core.scheduler.pool.num_used == 0
    assert core.scheduler.audit() == []


def test_four_answers_to_100_tokens_compute_103():
    for caching in (False, True):
        config = EngineConfig(block_size=32, max_seq_len=200, max_num_tokens=64, prefix_caching=caching)
        core = EngineCore(
            SimRuntime(num_blocks=40, block_size=32), config, tokenizer=None, eos_token_ids=[], vocab_size=256
        )
        params = SamplingParams(max_tokens=5, seed=7)
        for request in fan_out(Request("r", tuple(range(100)), params), 4):
            core.add(core.admission.sequence(request, 0.0))
        stats, tokens = [], {}
        while core.has_work:
            outcome = core.step()
            stats.append(outcome.stats)
            for delta in outcome.deltas:
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        assert sum(step.prompt_tokens for step in stats) == 103
        assert sum(step.prefix_hit_tokens for step in stats) == 3 * 99
        assert sum(step.prefix_query_tokens for step in stats) == 400
        for index in range(4):
            alone = SamplingParams(max_tokens=5, seed=7 + index)
            assert tokens[f"r-{index}"] == expected_tokens(range(100), alone, 5)
