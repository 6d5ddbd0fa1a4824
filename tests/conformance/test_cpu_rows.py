"""Row kernels of the CPU target against the numpy reference, in both activation types."""

import ml_dtypes
import numpy as np
import pytest

from tests.conformance.ragged_batch import config
from trtcb.plugins import reference

ACTIVATIONS = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}
HIDDEN, INTERMEDIATE = 128, 96
NUM_ROWS = [1, 5, 600]  # 600 rows run on all threads


@pytest.fixture(params=ACTIVATIONS)
def loaded(kernels, request):
    return kernels(config("fp32", activation=request.param, hidden=HIDDEN, inter=INTERMEDIATE))


def activation(loaded):
    return ACTIVATIONS[loaded.config.activation]


def assert_rounded(actual, expected):
    """Equal up to fp32 rounding, then one rounding to the activation type."""
    tolerance = 2e-6 if actual.dtype == np.float32 else 2.0**-8
    np.testing.assert_allclose(actual.astype(np.float32), expected, rtol=tolerance, atol=1e-6)


def normal(shape, seed, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_rms_norm(loaded, num_rows):
    x, gain = normal((num_rows, HIDDEN), 0), normal(HIDDEN, 1)
    x[0] *= 1e-4  # where eps counts
    out = np.zeros(x.shape, activation(loaded))
    loaded.rms_norm(x.ctypes.data, gain.ctypes.data, out.ctypes.data, num_rows, 1e-5)
    assert_rounded(out, reference.rms_norm(x, gain, 1e-5))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("delta_type", ACTIVATIONS.values())
def test_add_rms_norm_updates_the_residual_in_place(loaded, num_rows, delta_type):
    x, delta, gain = normal((num_rows, HIDDEN), 2), normal((num_rows, HIDDEN), 3, delta_type), normal(HIDDEN, 4)
    expected = x + delta.astype(np.float32)
    out = np.zeros(x.shape, activation(loaded))
    pointers = [a.ctypes.data for a in (x, delta, gain, out)]
    loaded.add_rms_norm(*pointers, num_rows, 1e-5, delta_is_bf16=delta_type is not np.float32)
    np.testing.assert_array_equal(x, expected)
    assert_rounded(out, reference.rms_norm(expected, gain, 1e-5))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_swiglu(loaded, num_rows):
    gate_up = (normal((num_rows, 2 * INTERMEDIATE), 5) * 4).astype(activation(loaded))
    gate_up[0, :4] = [-1000, -80, 80, 1000]
    out = np.zeros((num_rows, INTERMEDIATE), activation(loaded))
    loaded.swiglu(gate_up.ctypes.data, out.ctypes.data, num_rows)
    assert_rounded(out, reference.swiglu(gate_up))


@pytest.mark.parametrize("table_type", ACTIVATIONS.values())
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_embedding(loaded, table_type, num_rows):
    table = normal((50, HIDDEN), 6, table_type)
    ids = np.random.default_rng(7).integers(0, 50, num_rows).astype(np.int32)
    out = np.zeros((num_rows, HIDDEN), np.float32)
    is_bf16 = table_type is not np.float32
    loaded.embedding(ids.ctypes.data, table.ctypes.data, out.ctypes.data, num_rows, table_is_bf16=is_bf16)
    np.testing.assert_array_equal(out, table[ids].astype(np.float32))


@pytest.mark.parametrize("delta_type", ACTIVATIONS.values())
def test_gather_rows_adds_the_last_delta(loaded, delta_type):
    x, delta = normal((40, HIDDEN), 8), normal((40, HIDDEN), 9, delta_type)
    index = np.array([0, 3, 39], np.int32)
    out = np.zeros((3, HIDDEN), np.float32)
    pointers = [a.ctypes.data for a in (x, delta, index, out)]
    loaded.gather_rows(*pointers, 3, delta_is_bf16=delta_type is not np.float32)
    np.testing.assert_array_equal(out, (x + delta.astype(np.float32))[index])


def test_rows_do_not_depend_on_each_other(loaded):
    x, gain = normal((600, HIDDEN), 10), normal(HIDDEN, 11)
    together, alone = np.zeros(x.shape, activation(loaded)), np.zeros(x.shape, activation(loaded))
    loaded.rms_norm(x.ctypes.data, gain.ctypes.data, together.ctypes.data, 600, 1e-5)
    for row in range(600):
        loaded.rms_norm(x[row:].ctypes.data, gain.ctypes.data, alone[row:].ctypes.data, 1, 1e-5)
    np.testing.assert_array_equal(together.view(np.uint8), alone.view(np.uint8))


def test_no_rows_is_no_work(loaded):
    out = np.full((1, HIDDEN), 7, activation(loaded))
    x, gain = normal((1, HIDDEN), 12), normal(HIDDEN, 13)
    loaded.rms_norm(x.ctypes.data, gain.ctypes.data, out.ctypes.data, 0, 1e-5)
    assert (out == 7).all()
