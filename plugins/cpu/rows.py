"""Rows of values between kernels: how many bytes one has, by the type that a program gives a value."""

from trtcb.plugins.cpu import grouped, quantized

QUANTIZED = {"int8": quantized.row_bytes, "int8_g32": grouped.row_bytes}
"""Types of quantised rows: their bytes, by width."""


def row_bytes(dtype: str, width: int) -> int:
    """Bytes of a row of ``width`` elements, scales included. Between kernels of our own, bf16 values are fp32."""
    return QUANTIZED[dtype](width) if dtype in QUANTIZED else 4 * width
