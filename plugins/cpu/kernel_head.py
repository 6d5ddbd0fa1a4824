"""Source of the head: bf16 weights, fp32 logits. ``specialize.py`` rewrites the constants; not used directly.

A logit of 20 rounded to bf16 is off by up to 0.06, and the best two tokens are often closer than that: a product that
rounds would choose between them by their index. Here a logit is one chain of fp32 fused multiply-adds in order of
depth, whatever the batch.

Weights are packed in panels of 64 columns, ``[panel, depth, 64]``, the last one padded with zeros. A panel stays in the
cache while all rows pass over it.
"""

from trtcb.plugins.cpu.simd import jit, read_f32, read_i64, stack, write_f32
from trtcb.plugins.cpu.tile import TileSpec, define_tile
from trtcb.plugins.cpu.vector_ir import LANES

# --- constants of a specialisation ---
HIDDEN_SIZE = 576
VOCAB_SIZE = 49152
ACCUMULATORS = 24
# --- end of constants ---

PANEL = 64
PANEL_BYTES = HIDDEN_SIZE * PANEL * 2
NUM_PANELS = -(-VOCAB_SIZE // PANEL)
NUM_WHOLE = VOCAB_SIZE // PANEL
ROWS = max(1, ACCUMULATORS * LANES // PANEL)
AHEAD = 4096  # bytes between what is multiplied and what is fetched: hides the latency of main memory


def define_product(rows: int, c_stride: int, *, fetch: bool):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Make the product of ``rows`` hidden rows with one panel. Only the first to touch a panel fetches it."""
    return define_tile(
        TileSpec(
            rows,
            PANEL // LANES,
            "bf16",
            a_stride=HIDDEN_SIZE,
            b_stride=PANEL,
            c_stride=c_stride,
            prefetch_bytes=2 * PANEL if fetch else 0,
        )
    )


first_rows = define_product(ROWS, VOCAB_SIZE, fetch=True)
more_rows = define_product(ROWS, VOCAB_SIZE, fetch=False)
first_row = define_product(1, VOCAB_SIZE, fetch=True)
more_row = define_product(1, VOCAB_SIZE, fetch=False)
edge_row = define_product(1, PANEL, fetch=False)
edge_logits = stack(PANEL * 4)


@jit
def whole_panel(hidden: int, panel: int, logits: int, num_rows: int) -> None:
    """Logits of all rows for one panel; ``logits`` is the address of the first row's first."""
    row = 0
    if num_rows >= ROWS:
        first_rows(hidden, panel, logits, HIDDEN_SIZE, panel + AHEAD)
        row = ROWS
    else:
        first_row(hidden, panel, logits, HIDDEN_SIZE, panel + AHEAD)
        row = 1
    while row + ROWS <= num_rows:
        more_rows(hidden + row * HIDDEN_SIZE * 4, panel, logits + row * VOCAB_SIZE * 4, HIDDEN_SIZE, panel)
        row += ROWS
    while row < num_rows:
        more_row(hidden + row * HIDDEN_SIZE * 4, panel, logits + row * VOCAB_SIZE * 4, HIDDEN_SIZE, panel)
        row += 1


@jit
def last_panel(hidden: int, panel: int, logits: int, num_rows: int) -> None:
    """The same where the vocabulary ends inside the panel."""
    columns = edge_logits()
    for row in range(num_rows):
        edge_row(hidden + row * HIDDEN_SIZE * 4, panel, columns, HIDDEN_SIZE, panel)
        for column in range(VOCAB_SIZE - NUM_WHOLE * PANEL):
            write_f32(logits, row * VOCAB_SIZE + column, read_f32(columns, column))


def head(arguments: int, part: int, parts: int) -> None:
    """Arguments: hidden (fp32 rows), panels, logits, number of rows."""
    hidden, panels, logits = read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 2)
    num_rows = read_i64(arguments, 3)
    for index in range(NUM_PANELS * part // parts, NUM_PANELS * (part + 1) // parts):
        panel, out = panels + index * PANEL_BYTES, logits + index * PANEL * 4
        if index < NUM_WHOLE:
            whole_panel(hidden, panel, out, num_rows)
        else:
            last_panel(hidden, panel, out, num_rows)


KERNELS = (head,)
