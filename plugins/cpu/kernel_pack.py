"""Source of the kernel that packs weights into panels of columns; ``specialize.py`` compiles it once for all models."""

from trtcb.plugins.cpu.simd import jit, read_i64, read_u16, read_u32, write_i32, write_u16

# --- constants of a specialisation ---
BLOCK = 16
# --- end of constants ---


@jit
def pack_panel(source: int, target: int, columns: int, depth: int, panel_columns: int, is_wide: int) -> None:
    """Turn ``columns`` rows of ``depth`` items into columns, a few items at a time, so that lines are used whole."""
    for start in range(0, depth, BLOCK):
        for column in range(columns):
            for item in range(start, min(start + BLOCK, depth)):
                if is_wide:
                    write_i32(target, item * panel_columns + column, read_u32(source, column * depth + item))
                else:
                    write_u16(target, item * panel_columns + column, read_u16(source, column * depth + item))


def pack(arguments: int, part: int, parts: int) -> None:
    """Arguments: rows, panels, number of rows, items in a row, rows of a panel, bytes of one, are items 4 bytes (or 2).

    What lies behind the last row in the last panel, and behind the items in each, is left alone.
    """
    source, target = read_i64(arguments, 0), read_i64(arguments, 1)
    num_rows, depth, columns = read_i64(arguments, 2), read_i64(arguments, 3), read_i64(arguments, 4)
    panel_bytes, is_wide = read_i64(arguments, 5), read_i64(arguments, 6)
    num_panels = (num_rows + columns - 1) // columns
    row_bytes = depth * 4 if is_wide else depth * 2
    for panel in range(num_panels * part // parts, num_panels * (part + 1) // parts):
        first = panel * columns
        count = min(columns, num_rows - first)
        pack_panel(source + first * row_bytes, target + panel * panel_bytes, count, depth, columns, is_wide)


KERNELS = (pack,)
