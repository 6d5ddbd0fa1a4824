"""Several panels at once: memory is read fastest in several streams, and a single row is multiplied as fast as that.

The processor fetches ahead of each stream of addresses that it sees, some way and no further. On two cores of a Zen 3 a
single row's product reads int8 weights at 22 GB/s in one stream per core and at 28 in two, int4 ones at 30 and at 36;
on two of an Emerald Rapids int4 ones at 18 in one stream, at 26 in two and at 27 to 28 in four, where 31 can be read.
"""

from dataclasses import dataclass

import llvmlite.ir as ir

from trtcb.plugins.cpu.vector_ir import I64, Builder, Value, emit_prefetch

AHEAD = 1024


@dataclass(frozen=True, slots=True)
class Streams:
    """How many panels a tile reads side by side: each ``panel_bytes`` long, its results ``columns`` fp32.

    A tile of more than one takes, as its last argument, how many panels each stream starts behind the one before it.
    It fetches ``AHEAD`` bytes ahead in each.
    """

    count: int = 1
    panel_bytes: int = 0
    columns: int = 0

    def fetch_ahead(self, builder: Builder, panels: list[Value], step: Value, num_bytes: int) -> None:
        """Fetch what each stream reads ``AHEAD`` bytes behind its ``step``-th ``num_bytes``."""
        if self.count > 1:
            for panel in panels:
                emit_prefetch(builder, builder.add(panel, ir.Constant(I64, AHEAD)), step, num_bytes)

    def places(self, builder: Builder, b: Value, c: Value, apart: Value) -> list[tuple[Value, Value]]:
        """Addresses of each stream's panel and results."""
        result = [(b, c)]
        for stream in range(1, self.count):
            panels = builder.mul(apart, ir.Constant(I64, stream))
            result.append(
                (
                    builder.add(b, builder.mul(panels, ir.Constant(I64, self.panel_bytes))),
                    builder.add(c, builder.mul(panels, ir.Constant(I64, 4 * self.columns))),
                )
            )
        return result


ONE_STREAM = Streams()
