"""Products with a weight: fp32 sums, the same bits for a row in any batch."""

import ml_dtypes
import numpy as np
import pytest

from trtcb.plugins.cpu import isa, matrix_unit
from trtcb.plugins.cpu import linear as linear_module
from trtcb.plugins.cpu.isa import panel_columns
from trtcb.plugins.cpu.linear import PackedLinear

PANEL = panel_columns("fp32")


def product(linear: PackedLinear, x: np.ndarray, width: int) -> np.ndarray:
    out = np.full((len(x), width), np.nan, np.float32)
    linear.multiply(x.ctypes.data, out.ctypes.data, len(x))
    return out


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("width", [PANEL - 1, 2 * PANEL, 5 * PANEL + 3])
def test_sums_are_fp32_whatever_the_batch(width, dtype):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(width, 96)).astype(dtype)
    x = rng.normal(size=(33, 96)).astype(np.float32)
    linear = PackedLinear(weight, num_threads=2)
    together = product(linear, x, width)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(together, exact, atol=3e-5)
    for start, stop in ((0, 1), (3, 5), (7, 20), (0, 32), (5, 16)):
        assert np.array_equal(product(linear, x[start:stop], width), together[start:stop])
    alone = PackedLinear(weight, num_threads=1)
    assert np.array_equal(product(alone, x, width), together)


def test_each_element_is_one_chain_in_order_of_depth():
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(PANEL, 64)).astype(np.float32)
    x = rng.normal(size=(1, 64)).astype(np.float32)
    expected = np.zeros(PANEL, np.float32)
    for k in range(64):  # float64 holds a product of two fp32 numbers exactly: one rounding, but for rare double ones
        expected = (x[0, k].astype(np.float64) * weight[:, k].astype(np.float64) + expected).astype(np.float32)
    assert np.array_equal(product(PackedLinear(weight), x, PANEL)[0], expected)


def test_a_row_that_is_not_a_number_stays_alone():
    weight = np.ones((PANEL + 1, 32), ml_dtypes.bfloat16)
    x = np.ones((3, 32), np.float32)
    x[1, 4] = np.nan
    found = product(PackedLinear(weight, num_threads=2), x, PANEL + 1)
    assert np.isnan(found[1]).all()
    assert (found[[0, 2]] == 32).all()


def test_no_rows_are_no_work():
    assert product(PackedLinear(np.ones((PANEL, 32), np.float32)), np.zeros((0, 32), np.float32), PANEL).shape[0] == 0


@pytest.mark.skipif(not isa.multiplies_bf16_pairs(), reason="this processor does not multiply pairs of bf16")
class TestRowsOfBf16:
    """Products of bf16 rows, on the matrix unit and with vectors: the same bits for a row alone as among others."""

    @pytest.fixture(autouse=True, params=["matrix unit", "vectors"])
    def unit(self, request, monkeypatch):
        if request.param == "vectors":
            monkeypatch.setattr(linear_module, "_suits_matrix_unit", lambda depth: False)
        elif not matrix_unit.is_usable():
            pytest.skip("this processor has no matrix unit")

    @pytest.mark.parametrize("width", [31, 32, 64, 99])
    @pytest.mark.parametrize("depth", [32, 48, 576])
    def test_sums_are_fp32_whatever_the_batch(self, width, depth):
        rng = np.random.default_rng(0)
        weight = rng.normal(size=(width, depth)).astype(ml_dtypes.bfloat16)
        x = rng.normal(size=(70, depth)).astype(ml_dtypes.bfloat16)
        linear = PackedLinear(weight, rows="bf16", num_threads=2)
        together = product(linear, x, width)
        exact = x.astype(np.float64) @ weight.astype(np.float64).T
        np.testing.assert_allclose(together, exact, atol=1e-5 * depth)
        for start, stop in ((0, 1), (3, 5), (7, 20), (0, 32), (5, 21), (30, 70), (1, 34)):
            assert np.array_equal(product(linear, x[start:stop], width), together[start:stop])
        alone = PackedLinear(weight, rows="bf16", num_threads=1)
        assert np.array_equal(product(alone, x, width), together)

    def test_a_row_that_is_not_a_number_stays_alone(self):
        weight = np.ones((33, 32), ml_dtypes.bfloat16)
        x = np.ones((18, 32), ml_dtypes.bfloat16)
        x[1, 4] = np.nan
        found = product(PackedLinear(weight, rows="bf16", num_threads=2), x, 33)
        assert np.isnan(found[1]).all()
        assert (np.delete(found, 1, axis=0) == 32).all()

    def test_tiles_are_left_as_other_libraries_had_configured_them(self):
        torch = pytest.importorskip("torch")
        x, weight = torch.randn(40, 64, dtype=torch.bfloat16), torch.randn(48, 64, dtype=torch.bfloat16)
        expected = torch.nn.functional.linear(x, weight)
        linear = PackedLinear(np.ones((33, 32), ml_dtypes.bfloat16), rows="bf16", num_threads=2)
        for _ in range(20):
            product(linear, np.ones((18, 32), ml_dtypes.bfloat16), 33)
            assert torch.equal(torch.nn.functional.linear(x, weight), expected)
