"""The product of many rows with int4 weights by the matrix unit, for jitted code."""

from collections.abc import Callable

from trtcb.plugins.cpu.group_matrix_tile import SPREAD_BYTES, define_matrix_tile, define_spread
from trtcb.plugins.cpu.group_spec import GroupSpec
from trtcb.plugins.cpu.grouped import GROUP, WEIGHT_BYTES, row_bytes
from trtcb.plugins.cpu.matrix_unit import COLUMNS, enter_depth, leave, saved_configuration
from trtcb.plugins.cpu.simd import jit, stack

MIN_ROWS = 8
_LARGE = 16
_BLOCK_BYTES = 1 << 20  # of rows that stay in the second cache while panels pass over them


def define_matrix_product(depth: int, width: int) -> Callable[[int, int, int, int, int, int], None]:
    """Make ``product(x, panels, out, num_rows, first, end)``: the columns of some whole panels, of 8 rows or more.

    Where the last rows do not fill a tile, some before them are multiplied again.
    """
    x_bytes, panel_bytes = row_bytes(depth), depth // GROUP * WEIGHT_BYTES * COLUMNS
    spread, codes_of = define_spread(depth), stack(depth // GROUP * SPREAD_BYTES)
    first_large, more_large = (
        define_matrix_tile(GroupSpec(_LARGE, COLUMNS, depth, x_bytes, width, fetch)) for fetch in (True, False)
    )
    small = define_matrix_tile(GroupSpec(MIN_ROWS, COLUMNS, depth, x_bytes, width, fetch=True))
    block = max(1, _BLOCK_BYTES // x_bytes // _LARGE) * _LARGE

    @jit
    def multiply_block(x: int, panel: int, out: int, num_rows: int, start: int, end: int) -> None:
        codes, following = codes_of(), panel + panel_bytes
        spread(panel, codes)
        if num_rows < _LARGE:
            small(x, codes, panel, out, following)
            at = num_rows - MIN_ROWS
            if at:
                small(x + at * x_bytes, codes, panel, out + at * width * 4, following)
            return
        for row in range(start, end, _LARGE):
            at = min(row, num_rows - _LARGE)
            if row == start:
                first_large(x + at * x_bytes, codes, panel, out + at * width * 4, following)
            else:
                more_large(x + at * x_bytes, codes, panel, out + at * width * 4, following)

    @jit
    def product(x: int, panels: int, out: int, num_rows: int, first: int, end: int) -> None:
        saved = saved_configuration()
        enter_depth(saved, _LARGE if num_rows >= _LARGE else MIN_ROWS, GROUP)
        for start in range(0, num_rows, block):
            for index in range(first, end):
                panel, columns = panels + index * panel_bytes, out + index * COLUMNS * 4
                multiply_block(x, panel, columns, num_rows, start, min(num_rows, start + block))
        leave(saved)

    return product
