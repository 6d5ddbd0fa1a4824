"""Options beyond upstream: each does what it says, and nothing while it is off."""

import random

import pytest

from tests.unit.scheduler_bench import Bench
from trtcb.executor.chunking import TokenBudget, first_come_first_served
from trtcb.executor.queueing import WeightedFair
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.sequence import Sequence
from trtcb.executor.victims import Cheapest, newest

MAX_UTIL, NO_EVICT = "max_utilization", "guaranteed_no_evict"


class TestWatermark:
    @pytest.mark.parametrize("policy", [MAX_UTIL, NO_EVICT])
    def test_a_start_leaves_its_share_of_the_pool_free(self, policy):
        for length, starts in ((50, True), (60, False)):  # 1 block runs; 5 or 6 of 10 more leave 4 or 3 free
            bench = Bench(policy, 10, watermark=0.35)
            bench.add("a", 5, 5)
            bench.step()
            bench.add("b", length - 5, 5)
            assert ("b" in bench.step()) is starts, length

    @pytest.mark.parametrize("policy", [MAX_UTIL, NO_EVICT])
    def test_who_is_alone_may_fill_the_pool(self, policy):
        bench = Bench(policy, 10, watermark=0.9)
        bench.add("a", 80, 20)
        bench.add("b", 5, 5)
        assert list(bench.step()) == ["a"]

    def test_the_running_grow_into_it_and_nobody_passes_who_it_keeps_out(self):
        bench = Bench(MAX_UTIL, 4, watermark=0.5)
        bench.add("a", 10, 30)
        bench.step()
        bench.add("b", 20, 5)
        bench.add("c", 1, 1)
        assert [bench.step() for _ in range(29)] == [{"a": 1}] * 29
        assert set(bench.step()) == {"b"}  # a block more would go below

    def test_a_half_computed_prompt_goes_on_behind_who_it_keeps_out(self):
        bench = Bench(NO_EVICT, 20, watermark=0.5, max_num_tokens=20)
        bench.add("first", 10, 20)
        bench.add("low", 40, 20, priority=0.1)
        assert bench.step() == {"first": 10, "low": 10}
        bench.add("high", 30, 20, priority=0.9)  # 5 of the 15 free blocks that are not promised: 9 would be left
        assert bench.step() == {"first": 1, "low": 10}

    def test_it_pauses_nobody(self):
        bench = Bench(MAX_UTIL, 4, watermark=0.5)
        bench.add("low", 10, 30, priority=0.1)
        bench.step()
        bench.add("high", 20, 5, priority=0.9)
        assert bench.step() == {"low": 1}  # what it holds back is no reason to pause what runs
        bench.add("higher", 40, 0, priority=1.0)
        assert bench.step() == {"higher": 40}  # but who preempts starts as ever

    def test_it_saves_pauses(self):
        def num_pauses(watermark: float) -> int:
            rng = random.Random(1)
            bench = Bench(MAX_UTIL, 40, watermark=watermark)
            for number in range(60):
                bench.add(f"r{number}", rng.randint(5, 60), rng.randint(10, 80))
            while bench.scheduler.has_work:
                bench.step()
            return sum(seq.num_pauses for seq in bench.names)

        assert num_pauses(0.1) < num_pauses(0.0)


def sequence(name: str = "x", tokens: int = 10, *, new: int = 50, generating: bool = False, **request) -> Sequence:
    request = Request(name, tuple(range(tokens)), SamplingParams(), **request)
    seq = Sequence(request, max_tokens=new, seed=0, arrival_s=request.arrival_s)
    seq.generating = generating
    return seq


class TestTokenBudget:
    def fill(self, budget: TokenBudget, *sequences: Sequence):
        decodes, chunks = budget.fill(list(sequences), lambda seq: 0)
        return [seq.request_id for seq in decodes], [(seq.request_id, size) for seq, size in chunks]

    def test_stall_free_charges_who_generates_before_any_prompt(self):
        sequences = [sequence("a", 8), sequence("b", 2), *(sequence(f"g{i}", generating=True) for i in range(3))]
        assert self.fill(TokenBudget(10, None, 4), *sequences) == ([], [("a", 8), ("b", 2)])
        assert self.fill(TokenBudget(11, None, 4, stall_free=True), *sequences) == (["g0", "g1", "g2"], [("a", 8)])
        assert self.fill(TokenBudget(10, None, 4, stall_free=True), *sequences) == (["g0", "g1", "g2"], [])

    def test_stall_free_changes_nothing_with_chunks(self):
        sequences = [sequence("a", 30), *(sequence(f"g{i}", generating=True) for i in range(3))]
        plain = self.fill(TokenBudget(10, first_come_first_served, 4), *sequences)
        assert plain == (["g0", "g1", "g2"], [("a", 4)])
        assert self.fill(TokenBudget(10, first_come_first_served, 4, stall_free=True), *sequences) == plain

    def test_prompts_get_no_more_than_max_prefill_tokens(self):
        sequences = [sequence("a", 30), *(sequence(f"g{i}", generating=True) for i in range(3))]
        budget = TokenBudget(40, first_come_first_served, 4, max_prefill_tokens=9)
        assert self.fill(budget, *sequences) == (["g0", "g1", "g2"], [("a", 8)])
        assert self.fill(TokenBudget(40, first_come_first_served, 4), *sequences)[1] == [("a", 30)]


class TestPriorityAgeing:
    def order(self, ageing_s: float | None) -> list[str]:
        bench = Bench(NO_EVICT, 10, queue_policy="priority", priority_ageing_s=ageing_s)
        bench.add("old", 10, 5, priority=0.0, arrival_s=1000.0)
        bench.add("middle", 10, 5, priority=0.5, arrival_s=1029.0)
        bench.add("new", 10, 5, priority=1.0, arrival_s=1061.0)
        return bench.waiting()

    def test_so_many_seconds_outweigh_the_whole_span(self):
        assert self.order(None) == ["new", "middle", "old"]
        assert self.order(1000.0) == ["new", "middle", "old"]
        assert self.order(60.0) == ["middle", "old", "new"]  # half of the span takes 30 s
        assert self.order(10.0) == ["old", "middle", "new"]


class TestShortestRemainingFirst:
    def test_the_least_left_to_generate_starts_first_within_its_priority(self):
        bench = Bench(NO_EVICT, 100, queue_policy="srtf", max_batch_size=1)
        bench.add("running", 10, 30)
        bench.step()
        for name, new, priority in [("long", 20, 0.5), ("short", 5, 0.5), ("vip", 50, 0.9), ("short2", 5, 0.5)]:
            bench.add(name, 10, new, priority=priority)
        assert bench.waiting() == ["vip", "short", "short2", "long"]
        assert list(bench.step()) == ["running"]

    def test_a_paused_request_counts_what_it_has_generated(self):
        bench = Bench(MAX_UTIL, 100, queue_policy="srtf")
        seq = bench.add("a", 10, 30)
        for _ in range(20):
            bench.step()
        bench.add("b", 10, 15)
        bench.scheduler.pause(seq)
        assert bench.waiting() == ["a", "b"]

    def test_a_shorter_newcomer_does_not_preempt(self):
        bench = Bench(MAX_UTIL, 4, queue_policy="srtf")
        bench.add("long", 30, 10)
        bench.step()
        bench.add("short", 20, 1)
        assert bench.step() == {"long": 1}
        assert bench.waiting() == ["short"]


class TestWeightedFair:
    def bench(self, **weights: float) -> Bench:
        return Bench(NO_EVICT, 100, queue_policy="wfq", tenant_weights=weights, max_batch_size=1)

    def starts(self, bench: Bench) -> list[str]:
        starts: list[str] = []
        while bench.scheduler.has_work:
            step = bench.schedule()
            starts += [seq.request.tenant for seq in step.started]
            drawing = step.drawing
            bench.scheduler.advance(step)
            bench.scheduler.collect([1] * len(drawing))
            for seq in drawing:
                if seq.is_at_limit:
                    bench.scheduler.remove(seq)
        return starts

    def test_a_burst_of_one_tenant_does_not_hold_up_another(self):
        bench = self.bench()
        for number in range(6):
            bench.add(f"a{number}", 10, 10, tenant="a")
        for number in range(3):
            bench.add(f"b{number}", 10, 10, tenant="b")
        assert "".join(self.starts(bench)) == "abababaaa"

    def test_tokens_are_shared_by_weight(self):
        bench = self.bench(a=3.0)
        for number in range(40):
            bench.add(f"a{number}", 10, 10, tenant="a")
            bench.add(f"b{number}", 10, 10, tenant="b")
        first = self.starts(bench)[:40]
        assert first.count("a") == 30

    def test_large_requests_cost_more_turns(self):
        bench = self.bench()
        for number in range(30):
            bench.add(f"a{number}", 10, 50, tenant="a")
            bench.add(f"b{number}", 10, 10, tenant="b")
        first = self.starts(bench)[:20]
        assert first.count("b") == 3 * first.count("a")

    def test_what_was_declared_and_not_generated_is_refunded(self):
        policy = WeightedFair({})
        seq = sequence(tenant="a", new=990)
        assert policy.queued(seq)[1] == 0.0
        policy.started(seq)
        seq.token_ids.extend([1] * 5)
        policy.ended(seq)
        assert policy.queued(sequence(tenant="a"))[1] == 15.0
        assert policy.queued(sequence(tenant="b"))[1] == 0.0

    def test_who_was_never_served_pays_nothing(self):
        policy = WeightedFair({})
        seq = sequence(tenant="a")
        policy.queued(seq)
        policy.ended(seq)
        assert policy.queued(sequence(tenant="a"))[1] == 0.0

    def test_a_refund_counts_by_weight_as_the_charge_did(self):
        policy = WeightedFair({"a": 2.0})
        seq = sequence(tenant="a", new=990)
        policy.queued(seq)
        policy.started(seq)
        seq.token_ids.extend([1] * 6)
        policy.ended(seq)
        assert policy.queued(sequence(tenant="a"))[1] == 8.0

    def test_a_refund_never_lets_a_tenant_overtake_itself_and_is_not_lost(self):
        policy = WeightedFair({})
        first, second, third = sequence(new=990), sequence(new=990), sequence(new=990)
        assert [policy.queued(seq)[1] for seq in (first, second)] == [0.0, 1000.0]
        policy.started(first)
        first.token_ids.append(1)
        policy.ended(first)
        policy.ended(second)  # aborted while it waited: paid for are 11 tokens
        assert policy.queued(third)[1] == 1000.0
        assert policy.queued(sequence())[1] == 1011.0

    def test_a_debt_is_not_forgotten_among_many_tenants(self):
        policy = WeightedFair({})
        seq = sequence(tenant="debtor", new=990)
        policy.queued(seq)
        for number in range(1000):
            policy.queued(sequence(tenant=f"t{number}"))
        assert policy.queued(sequence(tenant="debtor"))[1] == 1000.0

    def test_idle_time_earns_no_credit(self):
        policy = WeightedFair({})
        policy.queued(sequence(tenant="idle"))
        for _ in range(100):
            seq = sequence(tenant="busy")
            rank = policy.queued(seq)
            policy.started(seq)
        assert policy.queued(sequence(tenant="idle"))[1] == rank[1]

    def test_a_paused_request_keeps_its_tag(self):
        policy = WeightedFair({})
        seq = sequence(tenant="a")
        rank = policy.queued(seq)
        policy.started(seq)
        policy.queued(sequence(tenant="a"))
        assert policy.queued(seq) == rank

    def test_tenants_that_are_paid_up_are_forgotten(self):
        policy = WeightedFair({})
        for number in range(5000):
            seq = sequence(tenant=f"t{number}", new=1)
            policy.queued(seq)
            policy.started(seq)
            policy.ended(seq)
            busy = sequence(tenant="busy")
            policy.queued(busy)
            policy.started(busy)
            policy.ended(busy)
        assert policy.num_tenants < 100


class TestVictims:
    def candidates(self) -> list[Sequence]:
        sequences = [sequence(name, 10, new=50) for name in ("a", "b", "c", "d")]
        for seq, computed in zip(sequences, (30, 10, 20, 20), strict=True):
            seq.num_computed = computed
        return sequences

    def test_newest_is_the_last_in_line(self):
        assert newest(self.candidates()).request_id == "d"

    def test_cheapest_loses_the_fewest_tokens(self):
        assert Cheapest(10)(self.candidates()).request_id == "b"

    def test_ties_go_to_the_newest(self):
        assert Cheapest(10)(self.candidates()[2:]).request_id == "d"

    def test_the_nearly_finished_are_spared_unless_all_are(self):
        sequences = self.candidates()
        for seq in sequences:
            seq.max_len = seq.num_tokens + 11
        sequences[1].max_len -= 1
        assert Cheapest(10)(sequences).request_id == "d"
        for seq in sequences:
            seq.max_len = seq.num_tokens + 10
        assert Cheapest(10)(sequences).request_id == "b"

    def test_a_higher_priority_is_never_paused_for_being_cheap(self):
        sequences = self.candidates()
        dear = sequence("dear", priority=0.2)
        dear.num_computed = 1000
        assert Cheapest(10)([*sequences, dear]) is dear

    def test_those_behind_the_victim_go_on_and_the_waiting_wait(self):
        bench = Bench(MAX_UTIL, 9, victim_policy="cheapest")
        bench.add("a", 40, 30)
        bench.add("b", 9, 30)
        bench.add("c", 35, 30)
        bench.step()  # 4 + 1 + 4 blocks
        bench.add("d", 10, 30)
        step = bench.schedule()  # a needs one more
        assert [seq.request_id for seq in step.paused] == ["b"]
        assert [seq.request_id for seq in step.decodes] == ["a", "c"]
        assert bench.waiting() == ["b", "d"]


@pytest.mark.parametrize("queue", ["priority", "srtf", "wfq"])
@pytest.mark.parametrize("policy", [NO_EVICT, MAX_UTIL, "static_batch"])
def test_a_pass_costs_nothing_per_waiting_request_in_any_order(queue, policy):
    bench = Bench(policy, 1000, max_batch_size=4, prefix_caching=True, queue_policy=queue)
    for number in range(500):
        bench.add(f"r{number}", 10, 30, tenant=f"t{number % 5}", arrival_s=float(number))
    bench.step()
    watched = bench.watch()
    bench.step()
    assert watched.looked_at <= 1
