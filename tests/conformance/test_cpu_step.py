"""A step as one call: its kernels run in order, each on all its parts, whatever number of threads there is."""

import itertools

import numpy as np
import pytest

from trtcb.plugins.cpu import threads
from trtcb.plugins.cpu.linear import PackedLinear
from trtcb.plugins.cpu.specialize import compile_kernels, compile_launcher
from trtcb.plugins.cpu.step import KernelCall, StepFunction, StepWord

THREADS = threads.configure().num_threads
WIDTH = 64


class Chain:
    """Products one behind the other, each of what the one before it wrote."""

    def __init__(self, length: int, *parts: int, profile: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(length)]
        self.linears = [PackedLinear(weight) for weight in self.weights]
        self.values = np.zeros((length + 1, 8, WIDTH), np.float32)
        self.values[0] = rng.normal(size=(8, WIDTH))
        at = [value.ctypes.data for value in self.values]
        self.step = StepFunction(
            [
                KernelCall(linear.kernel, count, (at[index], linear.panels, at[index + 1], StepWord.NUM_TOKENS))
                for index, (linear, count) in enumerate(zip(self.linears, itertools.cycle(parts), strict=False))
            ],
            profile=profile,
        )

    def expected(self) -> np.ndarray:
        rows = self.values[0].astype(np.float64)
        for weight in self.weights:
            rows = rows @ weight.T
        return rows


@pytest.mark.parametrize("parts", [(1,), (2,), (7,), (1, 2), (1, 1, 2), (3, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("num_threads", sorted({1, THREADS}))
def test_each_call_sees_all_that_the_one_before_it_wrote(parts, num_threads):
    chain = Chain(40, *parts)
    found = []
    for _ in range(20):
        chain.values[1:] = np.nan
        chain.step.run({StepWord.NUM_TOKENS: 8}, num_threads=num_threads)
        found.append(chain.values[-1].copy())
    np.testing.assert_allclose(found[0], chain.expected(), rtol=1e-3, atol=1e-5)
    assert all(np.array_equal(result, found[0]) for result in found)


def test_a_step_fills_in_its_words_anew():
    chain = Chain(3, 2)
    chain.step.run({StepWord.NUM_TOKENS: 8}, num_threads=THREADS)
    whole = chain.values[-1].copy()
    chain.values[1:] = -1
    chain.step.run({StepWord.NUM_TOKENS: 5}, num_threads=THREADS)
    assert np.array_equal(chain.values[-1, :5], whole[:5])
    assert (chain.values[1:, 5:] == -1).all()


def test_a_call_of_no_parts_is_passed_over():
    chain = Chain(1, 2)
    at = [value.ctypes.data for value in chain.values]
    calls = [
        KernelCall(chain.linears[0].kernel, parts, (at[0], chain.linears[0].panels, at[1], 8))
        for parts in (StepWord.LOGIT_PARTS, 1)
    ]
    StepFunction(calls).run({StepWord.LOGIT_PARTS: 0}, num_threads=THREADS)
    np.testing.assert_allclose(chain.values[1], chain.expected(), rtol=1e-3, atol=1e-5)


def test_nothing_to_do_is_done():
    StepFunction([]).run({}, num_threads=THREADS)


@pytest.mark.parametrize("parts", [1, 7])
@pytest.mark.parametrize("num_threads", sorted({1, THREADS}))
def test_times_of_all_calls_add_up_and_change_no_bit(parts, num_threads):
    plain, timed = Chain(40, parts), Chain(40, parts, profile=True)
    plain.step.run({StepWord.NUM_TOKENS: 8}, num_threads=num_threads)
    for _ in range(20):
        timed.values[1:] = np.nan
        times = timed.step.run_timed({StepWord.NUM_TOKENS: 8}, num_threads=num_threads)
        assert np.array_equal(timed.values, plain.values)
        assert len(times.busy_ns) == len(times.wall_ns) == 40
        assert (times.busy_ns > 0).all()
        assert (times.busy_ns <= num_threads * times.wall_ns).all()
        assert times.wall_ns.sum() <= times.ended_ns - times.began_ns


def test_a_call_of_no_parts_takes_no_time():
    chain = Chain(1, 2)
    at = [value.ctypes.data for value in chain.values]
    arguments = (at[0], chain.linears[0].panels, at[1], 8)
    calls = [KernelCall(chain.linears[0].kernel, parts, arguments) for parts in (1, StepWord.LOGIT_PARTS, 1)]
    step = StepFunction(calls, profile=True)
    assert (step.run_timed({StepWord.LOGIT_PARTS: 2}, num_threads=THREADS).busy_ns > 0).all()
    times = step.run_timed({StepWord.LOGIT_PARTS: 0}, num_threads=THREADS)
    assert [times.busy_ns[1], times.wall_ns[1]] == [0, 0]
    assert times.wall_ns[[0, 2]].min() > 0


def test_only_calls_made_for_it_can_be_timed():
    with pytest.raises(RuntimeError, match="profile=True"):
        StepFunction([]).run_timed({}, num_threads=1)


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_loop_that_measures_the_peak_multiplies_as_often_as_it_says(rounds):
    chains = 6
    kernel, launch = compile_kernels("kernel_peak", {"CHAINS": chains})["multiply"], compile_launcher()
    factors = np.arange(16, dtype=np.float32) / 16
    found = np.zeros((THREADS, 16), np.float32)
    launch(kernel.address, THREADS, factors.ctypes.data, rounds, found.ctypes.data, *(0,) * 9)
    expected = np.arange(chains, dtype=np.float64)[:, None] + np.zeros(16)
    for _ in range(rounds):
        expected = expected * factors + 1
    np.testing.assert_allclose(found, np.tile(expected.sum(0), (THREADS, 1)), rtol=1e-6)
