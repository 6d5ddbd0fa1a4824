"""The head kernel: fp32 logits of bf16 weights, the same bits for a row in any batch."""

import ml_dtypes
import numpy as np
import pytest

from trtcb.plugins.cpu.head import PANEL, Head


def logits(head: Head, hidden: np.ndarray, vocab_size: int) -> np.ndarray:
    out = np.full((len(hidden), vocab_size), np.nan, np.float32)
    head.logits(hidden.ctypes.data, out.ctypes.data, len(hidden))
    return out


@pytest.mark.parametrize("vocab_size", [PANEL - 1, 2 * PANEL, 5 * PANEL + 3])
def test_logits_are_fp32_products_whatever_the_batch(vocab_size):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(vocab_size, 96)).astype(ml_dtypes.bfloat16)
    hidden = rng.normal(size=(33, 96)).astype(np.float32)
    head = Head(weight, num_threads=2)
    together = logits(head, hidden, vocab_size)
    exact = hidden.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(together, exact, atol=3e-5)
    for start, stop in ((0, 1), (3, 5), (7, 20), (0, 32)):
        assert np.array_equal(logits(head, hidden[start:stop], vocab_size), together[start:stop])


def test_a_row_that_is_not_a_number_stays_alone():
    weight = np.ones((PANEL + 1, 32), ml_dtypes.bfloat16)
    hidden = np.ones((3, 32), np.float32)
    hidden[1, 4] = np.nan
    found = logits(Head(weight, num_threads=2), hidden, PANEL + 1)
    assert np.isnan(found[1]).all()
    assert (found[[0, 2]] == 32).all()
