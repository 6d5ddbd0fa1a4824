"""The scheduler's own books: what a rollback restores, what a removal forgets, and what the audit finds."""

import pytest

from tests.unit.scheduler_bench import Bench


def in_flight(bench: Bench):
    step = bench.schedule()
    bench.scheduler.advance(step)
    return step


def test_a_rollback_gives_back_the_room_of_every_row():
    bench = Bench("max_utilization", 100, max_num_tokens=20)
    bench.add("decodes", 5, 20)
    bench.step()
    bench.add("begins", 45, 20)
    bench.step()
    seqs = [bench.sequences[name] for name in ("decodes", "begins")]
    before = [(seq.num_computed, seq.room, seq.generating) for seq in seqs]
    step = bench.schedule()
    assert [seq.request_id for seq in step.decodes] == ["decodes"]
    assert [seq.request_id for seq, _ in step.chunks] == ["begins"]
    bench.scheduler.advance(step)
    bench.scheduler.rollback()
    assert [(seq.num_computed, seq.room, seq.generating) for seq in seqs] == before


def test_whoever_never_ran_is_not_counted_as_paused_when_it_leaves():
    bench = Bench("max_utilization", 4)
    bench.add("a", 10, 20)
    bench.add("b", 10, 20)
    bench.step()
    bench.scheduler.pause(bench.sequences["b"])
    never_ran = bench.add("c", 10, 5)
    bench.scheduler.remove(never_ran)
    assert bench.scheduler.num_paused == 1
    bench.scheduler.remove(bench.sequences["b"])
    assert bench.scheduler.num_paused == 0


def test_the_queue_policy_hears_of_every_end():
    bench = Bench("max_utilization", 100, queue_policy="wfq")
    for name in ("waits", "runs"):
        seq = bench.add(name, 10, 20, tenant=name)
    bench.step()
    tags = bench.scheduler._queue._tags
    assert len(tags) == 2
    for seq in list(bench.sequences.values()):
        bench.scheduler.remove(seq)
    assert not tags


def test_without_prefix_caching_nothing_stays_cached():
    bench = Bench("guaranteed_no_evict", 10)
    bench.add("a", 25, 10)
    for _ in range(10):
        bench.step()
    assert (bench.scheduler.pool.num_cached, bench.scheduler.pool.num_free) == (0, 10)


def test_a_sequence_that_is_paused_while_its_row_is_in_flight_is_work():
    bench = Bench("max_utilization", 20)
    seq = bench.add("a", 15, 5)
    step = in_flight(bench)
    bench.scheduler.pause(seq)
    assert (bench.running(), bench.waiting(), bench.scheduler.has_work) == ([], [], True)
    bench.scheduler.collect([1] * len(step.drawing))
    assert bench.waiting() == ["a"]
    bench.scheduler.remove(seq)
    assert not bench.scheduler.has_work


class TestAudit:
    @pytest.mark.parametrize("prefix_caching", [False, True])
    def test_it_hears_of_the_siblings_books(self, prefix_caching):
        bench = Bench("guaranteed_no_evict", 20, prefix_caching=prefix_caching)
        for name in "ab":
            bench.add(name, 0, 5, prompt=range(15), fork_group="g")
        assert bench.scheduler.audit() == []
        bench.scheduler.siblings._groups[next(iter(bench.scheduler.siblings._groups))].num_members += 1
        assert "siblings in groups" in bench.scheduler.audit()[0]

    @pytest.mark.parametrize(
        ("damage", "fault"),
        [
            (lambda group, runs, waits: group.sources.update({waits: None}), "b is offered to its siblings"),
            (lambda group, runs, waits: group.sources.update({runs: None}), "a is offered to its siblings"),
            (lambda group, runs, waits: group.computing.add(waits), "b is waited for by its siblings"),
        ],
    )
    def test_it_knows_who_may_be_forked_from_and_waited_for(self, damage, fault):
        bench = Bench("guaranteed_no_evict", 20, max_num_tokens=10)
        for name in "ab":
            bench.add(name, 0, 5, prompt=range(15), fork_group="g")
        bench.step()
        runs, waits = bench.sequences["a"], bench.sequences["b"]
        assert (runs.num_computed, waits.started) == (10, False)
        waits.num_computed = 14  # as if it had been released too late
        damage(bench.scheduler.siblings._group_of[runs], runs, waits)
        assert fault in bench.scheduler.audit()[0]

    def test_siblings_that_settle_are_unfinished_too(self):
        bench = Bench("max_utilization", 20)
        for name in "ab":
            bench.add(name, 0, 5, prompt=range(15), fork_group="g")
        bench.step()
        in_flight(bench)
        bench.scheduler.pause(bench.sequences["a"])
        assert list(bench.scheduler.settling) == [bench.sequences["a"]]
        assert bench.scheduler.audit() == []
