"""The token budget: chunk policies alone, and the choice of rows."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtcb.executor.chunking import CHUNK_POLICIES, TokenBudget, equal_progress, first_come_first_served
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.sequence import Sequence


@pytest.mark.parametrize(
    ("remaining", "capacity", "unit", "chunks"),
    [
        ([12, 12], 7, 5, [5, 0]),
        ([12, 12], 10, 5, [5, 5]),
        ([12, 12], 15, 5, [10, 5]),
        ([7, 12], 7, 5, [7, 0]),
        ([2, 12], 7, 5, [2, 5]),
        ([30, 30], 45, 10, [20, 20]),
        ([8, 3], 8, 5, [5, 3]),
        ([5, 5, 5], 4, 5, [0, 0, 0]),
    ],
)
def test_equal_progress(remaining, capacity, unit, chunks):
    assert equal_progress(remaining, capacity, unit) == chunks


@pytest.mark.parametrize(
    ("remaining", "capacity", "unit", "chunks"),
    [
        ([12, 12], 20, 5, [12, 5]),
        ([30, 12], 20, 5, [20, 0]),
        ([12, 30], 14, 5, [12, 0]),
        ([30, 2], 14, 5, [10, 2]),
        ([30, 30], 19, 10, [10, 0]),
        ([3, 3, 3], 7, 5, [3, 3, 0]),
    ],
)
def test_first_come_first_served(remaining, capacity, unit, chunks):
    assert first_come_first_served(remaining, capacity, unit) == chunks


@pytest.mark.parametrize("policy", CHUNK_POLICIES.values(), ids=CHUNK_POLICIES)
@given(
    remaining=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    capacity=st.integers(0, 100),
    unit=st.integers(1, 16),
)
def test_chunks_stay_within_capacity_and_on_units(policy, remaining, capacity, unit):
    chunks = policy(remaining, capacity, unit)
    assert len(chunks) == len(remaining)
    assert sum(chunks) <= capacity
    for chunk, total in zip(chunks, remaining, strict=True):
        assert 0 <= chunk <= total
        assert chunk == total or chunk % unit == 0
    if capacity >= unit:
        assert chunks[0] > 0, "the head must always advance"


def sequence(name: str, tokens: int, computed: int = 0, *, generating: bool = False, started: bool = True) -> Sequence:
    seq = Sequence(Request(name, tuple(range(tokens)), SamplingParams()), max_tokens=9, seed=0, arrival_s=0.0)
    seq.num_computed = computed
    seq.generating = generating
    seq.slot = 0 if started else -1
    assert seq.token_ids == array("i", range(tokens))
    return seq


def fill(budget: TokenBudget, *sequences: Sequence, cached: int = 0):
    decodes, chunks = budget.fill(list(sequences), lambda seq: cached)
    return [seq.request_id for seq in decodes], [(seq.request_id, size) for seq, size in chunks]


class TestWithChunks:
    BUDGET = TokenBudget(10, first_come_first_served, 4)

    def test_contexts_take_what_generations_leave_wherever_they_stand(self):
        context = sequence("c", 30, 8)
        generations = [sequence(f"g{i}", 5, 4, generating=True) for i in range(3)]
        assert fill(self.BUDGET, context, *generations) == (["g0", "g1", "g2"], [("c", 4)])

    def test_a_context_without_a_chunk_is_left_out(self):
        assert fill(self.BUDGET, sequence("a", 8), sequence("b", 8)) == ([], [("a", 8)])

    def test_generations_beyond_the_budget_are_left_out_in_order(self):
        generations = [sequence(f"g{i}", 5, 4, generating=True) for i in range(12)]
        assert fill(self.BUDGET, *generations) == ([f"g{i}" for i in range(10)], [])

    def test_cached_tokens_of_a_start_cost_nothing(self):
        assert fill(self.BUDGET, sequence("a", 18, started=False), cached=8) == ([], [("a", 10)])
        assert fill(self.BUDGET, sequence("a", 18, started=True), cached=8) == ([], [("a", 8)])


class TestWithoutChunks:
    BUDGET = TokenBudget(10, None, 4)

    def test_a_prompt_over_budget_ends_the_list(self):
        sequences = [sequence("a", 6), sequence("b", 6), sequence("g", 5, 4, generating=True)]
        assert fill(self.BUDGET, *sequences) == ([], [("a", 6)])

    def test_everybody_is_charged_in_order(self):
        sequences = [sequence("g", 5, 4, generating=True), sequence("a", 6), sequence("b", 3), sequence("c", 1)]
        assert fill(self.BUDGET, *sequences) == (["g"], [("a", 6), ("b", 3)])

    def test_a_prompt_that_fits_exactly_runs(self):
        assert fill(self.BUDGET, sequence("a", 10)) == ([], [("a", 10)])
        assert fill(self.BUDGET, sequence("a", 11)) == ([], [])
