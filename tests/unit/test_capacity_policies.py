"""Corners of the capacity policies that the expected numbers do not reach."""

from tests.unit.scheduler_bench import Bench


class TestOrder:
    def test_priority_goes_first_and_ties_go_by_arrival(self):
        bench = Bench("guaranteed_no_evict", 100, max_batch_size=2)
        for name, priority in [("a", 0.5), ("b", 0.9), ("c", 0.5), ("d", 0.9), ("e", 0.1)]:
            bench.add(name, 5, 1, priority=priority)
        assert [list(bench.step()) for _ in range(3)] == [["b", "d"], ["a", "c"], ["e"]]

    def test_a_paused_request_keeps_its_place_before_later_arrivals(self):
        bench = Bench("max_utilization", 4)
        bench.add("a", 10, 20)
        bench.add("b", 10, 20)
        bench.step()
        bench.add("c", 10, 20)
        bench.scheduler.pause(bench.sequences["a"])
        assert (bench.running(), bench.waiting()) == (["b"], ["a", "c"])

    def test_no_evict_never_pauses_for_priority(self):
        bench = Bench("guaranteed_no_evict", 5)
        bench.add("low", 10, 40, priority=0.1)
        bench.step()
        bench.add("high", 10, 20, priority=0.9)
        assert [list(bench.step()) for _ in range(39)] == [["low"]] * 39
        assert list(bench.step()) == ["high"]

    def test_max_utilization_lets_a_higher_priority_preempt(self):
        bench = Bench("max_utilization", 4)
        bench.add("low", 30, 10, priority=0.1)
        bench.step()
        bench.add("high", 20, 20, priority=0.9)
        step = bench.schedule()
        assert [seq.request_id for seq in step.paused] == ["low"]
        assert [seq.request_id for seq, _ in step.chunks] == ["high"]
        assert bench.waiting() == ["low"]

    def test_what_a_victim_gives_up_lets_those_before_it_start_in_the_same_pass(self):
        bench = Bench("max_utilization", 4)
        bench.add("first", 10, 20, priority=0.9)
        bench.add("victim", 30, 10, priority=0.1)
        bench.step()
        bench.add("between", 10, 10, priority=0.5)
        step = bench.schedule()  # first needs a block and there is none
        assert [seq.request_id for seq in step.paused] == ["victim"]
        assert [seq.request_id for seq in step.decodes] == ["first"]
        assert [seq.request_id for seq, _ in step.chunks] == ["between"]

    def test_whoever_finds_the_batch_filled_by_newcomers_still_pauses_the_last(self):
        bench = Bench("max_utilization", 100, max_batch_size=2)
        for name, priority in (("first", 0.9), ("last", 0.1)):
            bench.add(name, 10, 20, priority=priority)
        bench.step()
        for name, priority in (("third", 0.5), ("fourth", 0.4)):
            bench.add(name, 10, 20, priority=priority)
        assert set(bench.step()) == {"first", "third"}
        assert bench.waiting() == ["fourth", "last"]

    def test_max_utilization_pauses_when_the_batch_is_full_too(self):
        bench = Bench("max_utilization", 100, max_batch_size=2)
        for name in ("a", "b"):
            bench.add(name, 10, 20)
        bench.step()
        bench.add("c", 10, 20, priority=0.9)
        assert set(bench.step()) == {"c", "a"}
        assert bench.waiting() == ["b"]


class TestWatermark:
    def test_it_holds_the_second_of_two_newcomers_back_even_in_an_empty_engine(self):
        bench = Bench("guaranteed_no_evict", 10, watermark=0.5)
        for name in "ab":
            bench.add(name, 20, 10)
        assert bench.step() == {"a": 20}

    def test_a_prompt_that_has_begun_goes_on_below_it(self):
        bench = Bench("guaranteed_no_evict", 10, watermark=0.5, max_num_tokens=20)
        bench.add("a", 60, 10)
        assert [bench.step() for _ in range(3)] == [{"a": 20}] * 3


class TestNoEvict:
    def test_admission_counts_what_running_requests_may_still_take(self):
        bench = Bench("guaranteed_no_evict", 10)
        bench.add("a", 10, 50)  # 6 blocks in the end, 1 now
        bench.add("b", 10, 40)  # 5 blocks: one too many beside a
        assert list(bench.step()) == ["a"]
        assert bench.scheduler.pool.num_free == 9
        assert bench.scheduler.reserved_blocks == 5

    def test_a_request_that_fits_exactly_starts(self):
        bench = Bench("guaranteed_no_evict", 10)
        bench.add("a", 10, 50)
        bench.add("b", 10, 30)
        assert list(bench.step()) == ["a", "b"]

    def test_a_newcomer_of_higher_priority_takes_the_memory_that_a_half_computed_prompt_would_generate_into(self):
        bench = Bench("guaranteed_no_evict", 6, max_num_tokens=20)
        bench.add("low", 40, 20, priority=0.1)
        assert bench.step() == {"low": 20}
        bench.add("high", 10, 10, priority=0.9)  # needs the 2 blocks that low lacks
        assert bench.step() == {"high": 10}
        assert [bench.step() for _ in range(9)] == [{"high": 1}] * 9
        assert bench.step() == {"low": 20}

    def test_half_computed_prompts_pass_a_newcomer_that_their_own_blocks_keep_out(self):
        # Upstream hangs here: high is first in line and lacks blocks that low, which may not pass it, never gives back.
        bench = Bench("guaranteed_no_evict", 6, max_num_tokens=20)
        bench.add("low", 40, 20, priority=0.1)
        assert bench.step() == {"low": 20}
        bench.add("high", 40, 10, priority=0.9)
        assert bench.step() == {"low": 20}
        assert all(list(bench.step()) == ["low"] for _ in range(19))
        assert bench.step() == {"high": 20}

    def test_they_pass_it_only_when_nobody_generates(self):
        bench = Bench("guaranteed_no_evict", 8, max_num_tokens=20)
        bench.add("first", 10, 5)
        bench.step()
        bench.add("low", 40, 20, priority=0.1)
        assert bench.step() == {"first": 1, "low": 10}
        bench.add("high", 40, 10, priority=0.9)
        assert [bench.step() for _ in range(3)] == [{"first": 1}] * 3
        assert bench.step() == {"low": 20}

    def test_who_has_started_keeps_its_place_in_the_batch(self):
        bench = Bench("guaranteed_no_evict", 100, max_num_tokens=20, max_batch_size=2, chunk_policy="equal_progress")
        bench.add("a", 30, 5, priority=0.1)
        bench.add("b", 30, 5, priority=0.1)
        assert bench.step() == {"a": 10, "b": 10}
        bench.add("high", 10, 5, priority=0.9)
        assert bench.step() == {"a": 10, "b": 10}

    def test_static_batches_cannot_lock_up_either(self):
        bench = Bench("static_batch", 6, max_num_tokens=20)
        bench.add("low", 40, 20, priority=0.1)
        bench.step()
        bench.add("high", 40, 10, priority=0.9)
        assert bench.step() == {"low": 20}

    def test_only_prefix_blocks_in_use_reduce_what_a_start_needs(self):
        prompt = tuple(range(41))
        # 4 of the 7 blocks that `second` needs are cached. Beside `first`, which holds them, the other 3 must be free;
        # if `first` has ended, all 7 must be, as the cached ones are free blocks themselves. `other` takes 2.
        for num_new, pool, starts in ((2, 10, True), (2, 9, False), (1, 9, True), (1, 8, False)):
            bench = Bench("guaranteed_no_evict", pool, prefix_caching=True)
            bench.add("first", 41, num_new, prompt=prompt)
            bench.step()
            bench.add("other", 5, 15)
            bench.add("second", 41, 20, prompt=prompt)
            assert ("second" in bench.step()) is starts, (num_new, pool)

    def test_many_requests_never_meet_an_empty_pool(self):
        bench = Bench("guaranteed_no_evict", 23, max_batch_size=5, prefix_caching=True)
        for number in range(300):
            bench.add(f"r{number}", 1 + number * 7 % 60, 1 + number * 13 % 50, priority=number % 3 / 2)
        while bench.scheduler.has_work:
            step = bench.schedule()
            assert step.paused == []
            assert step.num_rows > 0
            drawing = step.drawing
            bench.scheduler.advance(step)
            bench.scheduler.collect([1] * len(drawing))
            for seq in drawing:
                if seq.is_at_limit:
                    bench.scheduler.remove(seq)


class TestStaticBatch:
    def test_a_half_computed_prompt_waits_while_others_generate(self):
        bench = Bench("static_batch", 100, max_num_tokens=20)
        bench.add("a", 10, 3)
        bench.add("b", 30, 2)
        assert [bench.step() for _ in range(3)] == [{"a": 10, "b": 10}, {"a": 1}, {"a": 1}]
        bench.add("c", 10, 1)
        assert bench.step() == {"b": 20}
        assert bench.step() == {"b": 1}
        assert bench.step() == {"c": 10}


class TestPrefixes:
    def test_other_salts_neither_wait_nor_share(self):
        bench = Bench("guaranteed_no_evict", 100, prefix_caching=True)
        prompt = tuple(range(21))
        bench.add("a", 21, 5, prompt=prompt)
        bench.add("b", 21, 5, prompt=prompt, salt="mine")
        assert bench.step() == {"a": 21, "b": 21}
        bench.add("c", 21, 5, prompt=prompt, salt="mine")
        assert bench.step() == {"a": 1, "b": 1, "c": 1}
        assert bench.sequences["c"].num_cached_tokens == 20
        shared = [set(bench.sequences[x].blocks) & set(bench.sequences["c"].blocks) for x in "ab"]
        assert [len(blocks) for blocks in shared] == [0, 2]

    def test_the_last_prompt_token_is_always_computed(self):
        bench = Bench("guaranteed_no_evict", 100, prefix_caching=True)
        prompt = tuple(range(20))
        bench.add("a", 20, 5, prompt=prompt)
        bench.step()
        bench.add("b", 20, 5, prompt=prompt)
        assert bench.step() == {"a": 1, "b": 10}

    def test_a_request_waits_while_its_prefix_is_computed_in_chunks_and_a_different_one_passes(self):
        bench = Bench("guaranteed_no_evict", 100, prefix_caching=True, max_num_tokens=20)
        stem = tuple(range(30))
        bench.add("a", 41, 5, prompt=(*stem, *range(100, 111)))
        bench.add("b", 41, 5, prompt=(*stem, *range(200, 211)))
        bench.add("c", 5, 5)
        assert bench.step() == {"a": 20}
        # b would compute the block that a is at; c comes after b in line, and is not held up.
        assert bench.step() == {"a": 20}
        rows = bench.step()
        assert rows["a"] == 1
        assert bench.sequences["b"].num_cached_tokens == 30

    def test_generated_blocks_are_found_again(self):
        bench = Bench("guaranteed_no_evict", 100, prefix_caching=True)
        seq = bench.add("a", 5, 20)
        while bench.scheduler.has_work:
            bench.step(token=7)
        bench.add("b", 25, 3, prompt=tuple(seq.token_ids))
        assert bench.step() == {"b": 5}

    def test_failed_sequences_leave_nothing_to_find(self):
        bench = Bench("guaranteed_no_evict", 100, prefix_caching=True, max_num_tokens=20)
        prompt = tuple(range(60))
        seq = bench.add("a", 60, 20, prompt=prompt)
        bench.step()
        assert bench.scheduler.pool.lookup(seq.keys[0]) is not None
        bench.scheduler.fail(seq)
        assert bench.scheduler.pool.num_cached == 0
        bench.add("b", 60, 5, prompt=prompt)
        bench.step()
        assert bench.sequences["b"].num_cached_tokens == 0

    def test_a_row_without_valid_logits_publishes_nothing(self):
        bench = Bench("guaranteed_no_evict", 100, prefix_caching=True)
        seq = bench.add("a", 25, 5)
        step = bench.schedule()
        bench.scheduler.advance(step)
        bench.scheduler.collect([-1])
        assert len(seq.token_ids) == 25
        assert bench.scheduler.pool.lookup(seq.keys[0]) is None

    def test_a_victim_that_shares_its_blocks_frees_only_its_own(self):
        bench = Bench("max_utilization", 7, prefix_caching=True)
        prompt = tuple(range(25))
        bench.add("a", 25, 25, prompt=prompt)
        bench.step()
        bench.add("b", 25, 25, prompt=prompt)  # shares two blocks with a, owns one
        bench.step()
        assert bench.scheduler.pool.num_used == 4
        bench.add("c", 50, 5, priority=0.9)  # needs 5; b gives one, a three more
        step = bench.schedule()
        assert [seq.request_id for seq in step.paused] == ["b", "a"]
        assert [seq.request_id for seq in step.started] == ["c"]

    def test_a_victims_blocks_that_a_newcomer_has_claimed_are_not_counted_as_freed(self):
        bench = Bench("max_utilization", 8, prefix_caching=True)
        prompt = tuple(range(25))
        bench.add("victim", 25, 25, prompt=prompt, priority=0.1)
        bench.step()
        bench.add("sharer", 25, 25, prompt=prompt, priority=0.9)  # 1 block beside the two that `victim` holds
        bench.add("other", 50, 5, priority=0.8)  # 5 blocks: 4 are left free, and pausing `victim` frees only 1
        step = bench.schedule()
        assert [seq.request_id for seq in step.paused] == ["victim"]
        assert [seq.request_id for seq in step.started] == ["sharer", "other"]
        assert bench.scheduler.pool.num_free == 0
        bench = Bench("max_utilization", 7, prefix_caching=True)
        bench.add("victim", 25, 25, prompt=prompt, priority=0.1)
        bench.step()
        bench.add("sharer", 25, 25, prompt=prompt, priority=0.9)
        bench.add("other", 50, 5, priority=0.8)
        assert [seq.request_id for seq in bench.schedule().started] == ["sharer"]

    def test_nobody_waits_for_a_block_behind_one_that_is_lost(self):
        bench = Bench("guaranteed_no_evict", 100, prefix_caching=True, max_num_tokens=61)
        stem = tuple(range(20))
        bench.add("a", 200, 5, prompt=(*stem, *range(100, 280)))
        bench.step()
        broken = bench.add("broken", 21, 5, prompt=(*stem, 1))
        bench.step()
        bench.scheduler.fail(broken)  # takes the shared beginning of a's prompt out of the cache
        bench.add("again", 200, 5, prompt=(*stem, *range(100, 280)))
        active = bench.scheduler._active_list()
        assert not active.beneficial_to_skip(bench.sequences["again"])


class TestPause:
    def test_a_restart_recomputes_what_reuse_does_not_find_and_reports_it(self):
        bench = Bench("max_utilization", 100, prefix_caching=True)
        seq = bench.add("a", 15, 30)
        for token in (4, 5, 6):
            bench.step(token)
        bench.scheduler.pause(seq)
        assert list(seq.token_ids)[15:] == [4, 5, 6]
        step = bench.schedule()
        assert [(s.request_id, size) for s, size in step.chunks] == [("a", 8)]
        # 17 tokens had been computed; 10 are found; the last drawn one was never computed and is no prompt token.
        assert (step.recomputed_tokens, step.prompt_tokens) == (7, 0)
        assert seq.num_cached_tokens == 0

    def test_a_pause_in_the_middle_of_a_prompt_starts_over(self):
        bench = Bench("max_utilization", 100, max_num_tokens=20)
        seq = bench.add("a", 50, 5)
        bench.step()
        bench.scheduler.pause(seq)
        counts = []
        for _ in range(3):
            step = bench.schedule()
            counts.append((step.prompt_tokens, step.recomputed_tokens))
            bench.scheduler.advance(step)
            bench.scheduler.collect([1] * len(step.drawing))
        assert counts == [(0, 20), (20, 0), (10, 0)]
        assert seq.num_generated == 1

    def test_the_books_of_paused_requests(self):
        bench = Bench("max_utilization", 100)
        a, b = bench.add("a", 15, 30), bench.add("b", 15, 30)
        bench.step()
        bench.scheduler.pause(a)
        bench.scheduler.pause(b)
        assert (bench.scheduler.num_paused, bench.scheduler.pool.num_used) == (2, 0)
        bench.scheduler.remove(a)
        assert (bench.scheduler.num_paused, bench.waiting()) == (1, ["b"])
        bench.step()
        assert (bench.scheduler.num_paused, bench.running()) == (0, ["b"])
        assert bench.scheduler.num_free_slots == 7


def test_the_audit_finds_lost_slots_and_reservations():
    bench = Bench("guaranteed_no_evict", 10)
    bench.add("a", 10, 20)
    bench.step()
    bench.scheduler.reserved_blocks += 1
    bench.scheduler._slots.pop()
    faults = " | ".join(bench.scheduler.audit())
    assert "3 blocks are booked as reserved, but 2 are" in faults
    assert "slots are lost or held twice" in faults


def test_a_pass_costs_nothing_per_waiting_request():
    """Counts what a pass looks at, as times would be noise."""

    for policy in ("guaranteed_no_evict", "max_utilization", "static_batch"):
        bench = Bench(policy, 1000, max_batch_size=4, prefix_caching=True)
        for number in range(500):
            bench.add(f"r{number}", 10, 30)
        bench.step()
        watched = bench.watch()
        bench.step()
        assert watched.looked_at <= 1, policy

        # Nor if all that wait would wait for one prefix anyway.
        bench = Bench(policy, 1000, max_batch_size=1, max_num_tokens=20, prefix_caching=True)
        for number in range(500):
            bench.add(f"r{number}", 50, 30, prompt=tuple(range(50)))
        bench.step()
        watched = bench.watch()
        bench.step()
        assert watched.looked_at <= 1, policy
