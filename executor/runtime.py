"""The seam between the engine and a target: a packed ragged batch goes in, one token per sampled row comes out."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling settings of the rows that want a token, one entry per row ``[NL]``.

    ``seed`` and ``position`` (index of the token to be drawn, counted over prompt and output) key the random numbers,
    so a row's token does not depend on its neighbours, on pauses or on the step it runs in. ``temperature == 0`` is
    greedy.
    """

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seed: npt.NDArray[np.uint64]
    position: Int32


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: ``T`` tokens of ``B`` sequences, packed without padding.

    The arrays belong to the caller and stay valid, and unchanged, until ``Runtime.wait`` for this step returns. A
    sequence contributes the rows ``cu_q[b]:cu_q[b+1]``; its tokens are consecutive positions. ``block_tables`` rows are
    padded with 0. ``logit_index`` lists the rows (of ``T``) whose next token is wanted, in order of sequence.
    """

    input_ids: Int32  # [T]
    positions: Int32  # [T]
    slot_mapping: Int32  # [T] block * block_size + offset
    cu_q: Int32  # [B + 1]
    block_tables: Int32  # [B, MB]
    logit_index: Int32  # [NL]
    sampling: SamplingRows  # [NL]


class Runtime(Protocol):
    """A compiled engine on its device. Used by one thread. At most one step is in flight at depth 0.

    ``num_blocks`` blocks of ``block_size`` tokens are owned by the runtime and addressed by the engine's block tables.
    """

    num_blocks: int
    block_size: int

    def launch(self, batch: Batch) -> None:
        """Start one step."""

    def wait(self) -> Int32:
        """Finish the oldest launched step and return its tokens ``[NL]``. Raises what went wrong on the device."""

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
