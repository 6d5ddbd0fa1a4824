"""Source of the products of bf16 rows and weights on the matrix unit, with fp32 results; not used directly.

The unit multiplies a single row, too: its sums are not those of fused multiply-adds. See ``matrix_product.py``.
"""

from trtcb.plugins.cpu.matrix_product import define_bf16_product
from trtcb.plugins.cpu.matrix_unit import PANEL
from trtcb.plugins.cpu.simd import read_i64

# --- constants of a specialisation ---
DEPTH = 576
WIDTH = 49152
# --- end of constants ---

NUM_PANELS = -(-WIDTH // PANEL)

multiply = define_bf16_product(__name__, DEPTH, WIDTH)


def linear(arguments: int, part: int, parts: int) -> None:
    """Arguments: rows (bf16), panels, output (fp32), number of rows, which may be 0."""
    num_rows = read_i64(arguments, 3)
    first, end = NUM_PANELS * part // parts, NUM_PANELS * (part + 1) // parts
    if num_rows:
        multiply(read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 2), num_rows, first, end)


KERNELS = (linear,)
