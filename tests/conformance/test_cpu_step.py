"""A step as one call: its kernels run in order, each on all its parts, whatever number of threads there is."""

import numpy as np
import pytest

from trtcb.plugins.cpu import threads
from trtcb.plugins.cpu.linear import PackedLinear
from trtcb.plugins.cpu.step import KernelCall, StepFunction, StepWord

THREADS = threads.configure().num_threads
WIDTH = 64


class Chain:
    """Products one behind the other, each of what the one before it wrote."""

    def __init__(self, length: int, parts: int) -> None:
        rng = np.random.default_rng(0)
        self.weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(length)]
        self.linears = [PackedLinear(weight) for weight in self.weights]
        self.values = np.zeros((length + 1, 8, WIDTH), np.float32)
        self.values[0] = rng.normal(size=(8, WIDTH))
        at = [value.ctypes.data for value in self.values]
        self.step = StepFunction(
            [
                KernelCall(linear.kernel, parts, (at[index], linear.panels, at[index + 1], StepWord.NUM_TOKENS))
                for index, linear in enumerate(self.linears)
            ]
        )

    def expected(self) -> np.ndarray:
        rows = self.values[0].astype(np.float64)
        for weight in self.weights:
            rows = rows @ weight.T
        return rows


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("num_threads", sorted({1, THREADS}))
def test_each_call_sees_all_that_the_one_before_it_wrote(parts, num_threads):
    chain = Chain(40, parts)
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
