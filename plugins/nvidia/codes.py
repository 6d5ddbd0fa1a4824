"""Device functions that turn keys and values into what a pool stores, and back: bit by bit as ``plugins.reference``.

``FORMAT`` is ``"none"`` (the pool's own float type), ``"int8"`` or ``"e4m3"``, as the ``kv_format`` attribute. Encoding
e4m3 is integer arithmetic: it runs on processors without that type (below compute capability 8.9), and Triton's
interpreter gets the type's rounding wrong.
"""

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: added and taken away again, it rounds half to even
FLOAT16_MAX = tl.constexpr(65504.0)
SCALE_FLOOR = tl.constexpr(2.0**-14)
PORTABLE_E4M3 = tl.constexpr(1.0 / 256.0)  # what decode_e4m3 without the type makes of 1


@triton.jit
def finite(x, limit):
    """fp32 without NaN, which becomes 0, or infinities, which saturate."""
    return tl.minimum(tl.maximum(tl.where(x != x, 0.0, x), -limit), limit)


@triton.jit
def quantize(x, FORMAT: tl.constexpr):
    """One head of one token, fp32 ``[D]``: its scale as stored (fp16), and its raw bytes (int8 ``[D]``)."""
    largest: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
    x = finite(x, FLOAT16_MAX)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 0), largest), SCALE_FLOOR).to(tl.float16)
    y = tl.div_rn(x, scale.to(tl.float32))
    y = tl.minimum(tl.maximum(y, -largest), largest)
    if FORMAT == "int8":
        return scale, ((y + ROUND) - ROUND).to(tl.int8)
    return scale, encode_e4m3(y)


@triton.jit
def encode_e4m3(y):
    """fp32 within +-448 to the bits of float8_e4m3fn, half to even."""
    magnitude = tl.abs(y)
    bits = magnitude.to(tl.int32, bitcast=True)
    # add half of the last kept place, drop 20 bits, move the exponent's bias from 127 to 7
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = ((magnitude * 512.0 + ROUND) - ROUND).to(tl.int32)  # multiples of 2**-9
    code = tl.where(magnitude >= 0.015625, normal, subnormal)
    return tl.where(y < 0.0, code - 128, code).to(tl.int8)


@triton.jit
def decode_e4m3(raw, NATIVE: tl.constexpr):
    """Bits of float8_e4m3fn to fp16, exactly. Without the type (``NATIVE``) times ``PORTABLE_E4M3``."""
    if NATIVE:
        return raw.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    code = raw.to(tl.int16)
    return (((code & 0x7F) << 7) | (code & -32768)).to(tl.float16, bitcast=True)
