"""What a policy sees in one pass: the order of the list, and what pauses and starts that it has chosen change."""

from tests.unit.scheduler_bench import Bench


def names(seqs) -> list[str]:
    return [seq.request_id for seq in seqs]


def test_running_and_waiting_requests_stand_in_one_order():
    bench = Bench("max_utilization", 100)
    for name, priority in (("b", 0.8), ("d", 0.6), ("f", 0.4)):
        bench.add(name, 5, 5, priority=priority)
    bench.step()
    for name, priority in (("a", 0.9), ("c", 0.7), ("e", 0.5), ("g", 0.3), ("h", 0.2)):
        bench.add(name, 5, 5, priority=priority)
    active = bench.scheduler._active_list()
    assert names(active.in_order()) == list("abcdefgh")


def test_a_sibling_no_longer_counts_on_a_source_that_is_paused():
    bench = Bench("max_utilization", 100)
    for name in "ab":
        bench.add(name, 0, 5, prompt=range(25), fork_group="g")
    bench.step()
    source, sibling = bench.sequences["a"], bench.sequences["b"]
    active = bench.scheduler._active_list()
    assert active.match(sibling) == source.blocks[:2]
    active.pause(source)
    assert active.match(sibling) == []
    assert active.blocks_this_step(sibling) == 3


def test_a_sibling_turns_to_another_source_when_its_own_is_paused():
    bench = Bench("max_utilization", 100, max_batch_size=2)
    for name in "abc":
        bench.add(name, 0, 5, prompt=range(25), fork_group="g")
    bench.step()
    bench.step()
    first, second, sibling = (bench.sequences[name] for name in "abc")
    assert bench.running() == ["a", "b"]
    active = bench.scheduler._active_list()
    assert active.fork(sibling).source is first
    active.pause(first)
    assert active.fork(sibling).source is second
    assert active.fork(sibling).copied_block == second.blocks[2]
    active.pause(second)
    assert active.fork(sibling) is None


def test_a_half_computed_prompt_is_waited_for_by_whoever_begins_with_its_next_block():
    bench = Bench("guaranteed_no_evict", 100, prefix_caching=True, max_num_tokens=20)
    for name in "ab":
        bench.add(name, 0, 5, prompt=range(45))
    assert [bench.step() for _ in range(3)] == [{"a": 20}, {"a": 20}, {"a": 5, "b": 5}]


def test_siblings_without_a_source_wait_for_a_stranger_with_the_same_beginning():
    bench = Bench("guaranteed_no_evict", 100, prefix_caching=True)
    bench.add("stranger", 0, 5, prompt=range(45))
    for name in "ab":
        bench.add(name, 0, 5, prompt=[*range(35), 99], fork_group="g")
    assert bench.step() == {"stranger": 45}
    assert bench.step() == {"stranger": 1, "a": 6}
    assert bench.step() == {"stranger": 1, "a": 1, "b": 1}
