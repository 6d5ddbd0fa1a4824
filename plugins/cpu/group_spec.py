"""What a tile of int4 products is like, whatever the instructions."""

from dataclasses import dataclass

from trtcb.plugins.cpu.streams import ONE_STREAM, Streams

_HALF = 8  # lanes of AVX2


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Shape of a tile: ``columns`` is a multiple of 16; ``c_stride`` counts elements between rows of C (fp32).

    With ``fetch``, what the tile reads is fetched ahead, from the address given at the call. With several ``streams``,
    ``columns`` are those of each.
    """

    rows: int
    columns: int
    depth: int
    a_stride: int
    c_stride: int
    fetch: bool = False
    streams: Streams = ONE_STREAM

    @property
    def vectors(self) -> int:
        """Columns of a panel in vectors of 8."""
        return self.columns // _HALF

    @property
    def all_vectors(self) -> int:
        """The same of all streams."""
        return self.vectors * self.streams.count

    @property
    def symbol(self) -> str:
        """Name of the function in a module."""
        strides = f"{self.a_stride}_{self.c_stride}_{int(self.fetch)}"
        return f"group_{self.rows}x{self.streams.count}x{self.columns}_{self.depth}_{strides}"
