"""Prints which instructions the int4 product is compiled to; run where numba is told to compile for another CPU."""

import re

from numba import njit

from trtcb.plugins.cpu import grouped
from trtcb.plugins.cpu.group_spec import GroupSpec
from trtcb.plugins.cpu.group_tile import define_group_tile
from trtcb.plugins.cpu.simd import JIT_OPTIONS

tile = define_group_tile(GroupSpec(2, 16, 64, grouped.row_bytes(64), 16))


@njit("void(int64, int64, int64)", **JIT_OPTIONS)
def run(a: int, b: int, c: int) -> None:
    """Never run: this processor may not have what it was compiled for."""
    tile(a, b, c, 64, b)


[assembly] = run.inspect_asm().values()
print(*sorted(set(re.findall(r"vp(?:madd|dp)\w+", assembly))))
