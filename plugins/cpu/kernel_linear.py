"""Source of the products with a weight, with fp32 results. ``specialize.py`` rewrites the constants; not used directly.

With bf16 or fp32 weights, rows are fp32, and every element is one chain of fused multiply-adds in order of depth,
whatever the number of rows and of threads. Results are not rounded to bf16: a logit of 20 would be off by up to 0.06,
and the best two tokens are often closer. With int8 weights, rows are what ``quantized.py`` describes, and sums are
exact. With int4 weights, rows and panels are what ``grouped.py`` describes. ``bf16_pairs`` are bf16 weights in pairs
along the depth with rows of bf16, see ``pair_tile.py``.

Weights are packed in panels of a few vectors of columns, ``[panel, depth, columns]``, the last one padded with zeros.
A panel stays in the cache while a block of rows passes over it, in tiles of ``LARGE``, ``MEDIUM``, ``SMALL`` and single
rows; a large tile may cover some of its columns only. The rows of a block, and the panels of a part, stay in the next
cache. A row alone reads panels in several streams.

From ``MATRIX_ROWS`` rows on (0: never) the matrix unit multiplies, which of int8 gives the same sums.
"""

from trtcb.plugins.cpu import grouped, quantized
from trtcb.plugins.cpu.byte_product import define_byte_product
from trtcb.plugins.cpu.dot_tile import DotSpec, define_dot_tile
from trtcb.plugins.cpu.group_spec import GroupSpec
from trtcb.plugins.cpu.group_tile import define_group_tile
from trtcb.plugins.cpu.isa import multiplies_bytes
from trtcb.plugins.cpu.pair_tile import PairSpec, define_pair_tile
from trtcb.plugins.cpu.simd import jit, load_f32, read_f32, read_i64, stack, store_f32, write_f32
from trtcb.plugins.cpu.streams import Streams
from trtcb.plugins.cpu.tile import TileSpec, define_tile
from trtcb.plugins.cpu.vector_ir import LANES

# --- constants of a specialisation ---
DEPTH = 576
WIDTH = 49152
WEIGHTS = "bf16"
PANEL = 64
ROWS = 6
VECTORS = 4
MATRIX_ROWS = 0
# --- end of constants ---

IS_INT8 = WEIGHTS == "int8"
IS_INT4 = WEIGHTS == "int4"
IS_PAIRS = WEIGHTS == "bf16_pairs"
WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "bf16_pairs": 2, "int8": 1, "int4": 0}[WEIGHTS]  # of one alone
if IS_INT4:
    X_BYTES, PANEL_BYTES = grouped.row_bytes(DEPTH), DEPTH // grouped.GROUP * grouped.WEIGHT_BYTES * PANEL
elif IS_INT8:
    X_BYTES, PANEL_BYTES = quantized.row_bytes(DEPTH), quantized.panel_bytes(DEPTH, PANEL)
else:
    X_BYTES, PANEL_BYTES = (2 if IS_PAIRS else 4) * DEPTH, WEIGHT_BYTES * DEPTH * PANEL
NUM_PANELS = -(-WIDTH // PANEL)
NUM_WHOLE = WIDTH // PANEL
LARGE = ROWS
PIECE = VECTORS * LANES  # columns of a large tile; all of them where weights are quantised
MEDIUM = max(1, LARGE // 3)
SMALL = min(2, MEDIUM)
BLOCK = max(1, (160 << 10) // X_BYTES // LARGE) * LARGE  # rows
STREAMS = 4 if IS_INT4 and multiplies_bytes() else 2  # panels that a single row is multiplied with at once
AHEAD = 4096  # bytes between what is multiplied and what is fetched: hides the latency of main memory


def define_single_row(streams: Streams):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Make the product of a single row with several panels at once."""
    if IS_INT4:
        return define_group_tile(GroupSpec(1, PANEL, DEPTH, X_BYTES, WIDTH, streams=streams))
    if IS_INT8:
        return define_dot_tile(DotSpec(1, PANEL // LANES, DEPTH, X_BYTES, WIDTH, streams=streams))
    if IS_PAIRS:
        return define_pair_tile(PairSpec(1, PANEL // LANES, DEPTH, WIDTH, streams=streams))
    return define_tile(TileSpec(1, PANEL // LANES, WEIGHTS, DEPTH, PANEL, WIDTH, streams=streams))


def define_product(rows: int, columns: int, c_stride: int, *, fetch: bool):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Make the product of ``rows`` rows with columns of a panel. Only the first to touch a panel fetches it."""
    vectors = columns // LANES
    if IS_INT4:
        return define_group_product(rows, c_stride, fetch=fetch)
    if IS_INT8:
        fetched = 4 * PANEL if fetch else 0
        return define_dot_tile(DotSpec(rows, vectors, DEPTH, X_BYTES, c_stride, fetched))
    fetched = WEIGHT_BYTES * PANEL if fetch else 0
    if IS_PAIRS:
        return define_pair_tile(PairSpec(rows, vectors, DEPTH, c_stride, 2 * fetched))
    return define_tile(TileSpec(rows, vectors, WEIGHTS, DEPTH, PANEL, c_stride, prefetch_bytes=fetched))


def define_group_product(rows: int, c_stride: int, *, fetch: bool):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Make the same of int4 weights, whose tile may add to its results in memory, group after group.

    They lie side by side meanwhile: rows that are some multiple of 4,096 bytes apart would get in each other's way.
    """
    if multiplies_bytes():
        return define_group_tile(GroupSpec(rows, PANEL, DEPTH, X_BYTES, c_stride, fetch))
    tile = define_group_tile(GroupSpec(rows, PANEL, DEPTH, X_BYTES, PANEL, fetch))
    gathered = stack(rows * PANEL * 4)

    @jit
    def product(x: int, panel: int, out: int, depth: int, ahead: int) -> None:
        sums = gathered()
        tile(x, panel, sums, depth, ahead)
        for row in range(rows):
            for column in range(0, PANEL, LANES):
                store_f32(out, row * c_stride + column, load_f32(sums, row * PANEL + column))

    return product


single_row = define_single_row(Streams(STREAMS, PANEL_BYTES, PANEL))
first_large = define_product(LARGE, PIECE, WIDTH, fetch=True)
more_large = define_product(LARGE, PIECE, WIDTH, fetch=False)
first_medium = define_product(MEDIUM, PANEL, WIDTH, fetch=True)
more_medium = define_product(MEDIUM, PANEL, WIDTH, fetch=False)
first_small = define_product(SMALL, PANEL, WIDTH, fetch=True)
first_row = define_product(1, PANEL, WIDTH, fetch=True)
more_row = define_product(1, PANEL, WIDTH, fetch=False)
edge_row = define_product(1, PANEL, PANEL, fetch=False)
edge_columns = stack(PANEL * 4)


@jit
def large_tile(x: int, panel: int, out: int, is_first: int) -> None:
    """``LARGE`` rows of one panel, piece by piece."""
    for start in range(0, PANEL, PIECE):
        weights, columns = panel + start * WEIGHT_BYTES, out + start * 4
        if is_first and start == 0:
            first_large(x, weights, columns, DEPTH, panel + AHEAD)
        else:
            more_large(x, weights, columns, DEPTH, panel)


@jit
def whole_panel(x: int, panel: int, out: int, num_rows: int) -> None:
    """All rows' columns of one panel; ``out`` is the address of the first row's first."""
    row = 0
    if num_rows < SMALL:
        first_row(x, panel, out, DEPTH, panel + AHEAD)
        row = 1
    elif num_rows < MEDIUM:
        first_small(x, panel, out, DEPTH, panel + AHEAD)
        row = SMALL
    elif num_rows < LARGE:
        first_medium(x, panel, out, DEPTH, panel + AHEAD)
        row = MEDIUM
    while row + LARGE <= num_rows:
        large_tile(x + row * X_BYTES, panel, out + row * WIDTH * 4, row == 0)
        row += LARGE
    while row + MEDIUM <= num_rows:
        more_medium(x + row * X_BYTES, panel, out + row * WIDTH * 4, DEPTH, panel)
        row += MEDIUM
    if row + 1 < num_rows and num_rows > MEDIUM:  # with rows before them, which get the same bits again: it is faster
        last = num_rows - MEDIUM
        more_medium(x + last * X_BYTES, panel, out + last * WIDTH * 4, DEPTH, panel)
        row = num_rows
    while row < num_rows:
        more_row(x + row * X_BYTES, panel, out + row * WIDTH * 4, DEPTH, panel)
        row += 1


@jit
def last_panel(x: int, panel: int, out: int, num_rows: int) -> None:
    """The same where the width ends inside the panel."""
    columns = edge_columns()
    for row in range(num_rows):
        edge_row(x + row * X_BYTES, panel, columns, DEPTH, panel)
        for column in range(WIDTH - NUM_WHOLE * PANEL):
            write_f32(out, row * WIDTH + column, read_f32(columns, column))


@jit
def multiply_single_row(x: int, panels: int, out: int, first: int, end: int) -> None:
    """The columns of some whole panels, in streams that are as long as can be."""
    apart = (end - first) // STREAMS
    for index in range(first, first + apart):
        single_row(x, panels + index * PANEL_BYTES, out + index * PANEL * 4, DEPTH, apart)
    for index in range(first + apart * STREAMS, end):
        panel = panels + index * PANEL_BYTES
        first_row(x, panel, out + index * PANEL * 4, DEPTH, panel + AHEAD)


@jit
def multiply_in_tiles(x: int, panels: int, out: int, num_rows: int, first: int, end: int) -> None:
    """All rows' columns of some panels."""
    for start in range(0, num_rows, BLOCK):
        rows, count = x + start * X_BYTES, min(BLOCK, num_rows - start)
        for index in range(first, end):
            panel, columns = panels + index * PANEL_BYTES, out + (start * WIDTH + index * PANEL) * 4
            if index < NUM_WHOLE:
                whole_panel(rows, panel, columns, count)
            else:
                last_panel(rows, panel, columns, count)


multiply_many = define_byte_product(__name__, DEPTH, WIDTH) if MATRIX_ROWS else multiply_in_tiles


def linear(arguments: int, part: int, parts: int) -> None:
    """Arguments: rows, panels, output (fp32), number of rows, which may be 0."""
    x, panels, out = read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 2)
    num_rows = read_i64(arguments, 3)
    first, end = NUM_PANELS * part // parts, NUM_PANELS * (part + 1) // parts
    if num_rows == 1:
        multiply_single_row(x, panels, out, first, min(end, NUM_WHOLE))
        multiply_in_tiles(x, panels, out, num_rows, NUM_WHOLE, end)
    elif num_rows < MATRIX_ROWS:
        multiply_in_tiles(x, panels, out, num_rows, first, end)
    elif num_rows:
        multiply_many(x, panels, out, num_rows, first, end)


KERNELS = (linear,)
