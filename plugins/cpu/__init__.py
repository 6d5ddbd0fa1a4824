"""CPU kernels, written in numba over a small vocabulary of portable 16-lane vectors."""
