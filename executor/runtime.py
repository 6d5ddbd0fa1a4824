"""The seam between the engine and a target: a packed ragged batch goes in, one token per sampled row comes out."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UNKNOWN_TOKEN = -1


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What is done to a step's logits ``[NL, vocab]`` before tokens are drawn; rows nobody asked for have no entries.

    Row ``i`` first gets ``bias`` added at ``bias_ids`` (entries ``bias_start[i]:bias_start[i + 1]``; ``-inf`` rules a
    token out; an id may come twice), then its penalties at ``token_ids`` (likewise by ``token_start``): the distinct
    tokens of prompt and output, with how often each is in the output. A penalty is in fp32: repetition divides logits
    above 0 and multiplies the others, then ``frequency * count`` is subtracted, then ``presence`` where the count is
    not 0.
    """

    repetition: Float32  # [NL], 1 is off
    frequency: Float32  # [NL], 0 is off
    presence: Float32  # [NL], 0 is off
    token_start: Int32  # [NL + 1]
    token_ids: Int32  # [NT]
    output_counts: Int32  # [NT]
    bias_start: Int32  # [NL + 1]
    bias_ids: Int32  # [NB]
    bias: Float32  # [NB]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling settings of the rows that want a token, one entry per row ``[NL]``.

    ``seed`` and ``position`` (index of the token to be drawn, counted over prompt and output) key the random numbers,
    so a row's token does not depend on its neighbours, on pauses or on the step it runs in. ``temperature == 0`` is
    greedy.

    ``edits`` is None if no row wants any. ``num_logprobs`` is how many likeliest tokens a row wants told beside its own
    (-1: not even that one), or None if no row wants logprobs.
    """

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seed: npt.NDArray[np.uint64]
    position: Int32
    edits: LogitEdits | None = None
    num_logprobs: Int32 | None = None  # [NL]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: ``T`` tokens of ``B`` sequences, packed without padding.

    The arrays belong to the caller and stay valid, and unchanged, until ``Runtime.wait`` for this step returns. A
    sequence contributes the rows ``cu_q[b]:cu_q[b+1]``; its tokens are consecutive positions. ``block_tables`` rows are
    padded with 0. ``logit_index`` lists the rows (of ``T``) whose next token is wanted, in order of sequence.

    An input id is ``UNKNOWN_TOKEN`` where it is drawn by a step that was still in flight: it is what was drawn last in
    the sequence's slot, which only the runtime knows (:class:`~trtcb.executor.last_tokens.LastTokens`). Such a sequence
    has one row.

    ``copies`` are pairs of blocks, read and written. They come before all that the step writes, and all of them are
    read before any is written; a destination occurs once.
    """

    input_ids: Int32  # [T]
    positions: Int32  # [T]
    slot_mapping: Int32  # [T] block * block_size + offset
    cu_q: Int32  # [B + 1]
    block_tables: Int32  # [B, MB]
    slots: npt.NDArray[np.intp]  # [B] below ``max_batch_size``
    logit_index: Int32  # [NL]
    sampling: SamplingRows  # [NL]
    copies: Int32 = field(default_factory=lambda: np.zeros((0, 2), np.int32))  # [NC, 2]


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities of a step's rows, of the logits before edits and temperature.

    ``top_ids`` and ``top`` hold the likeliest tokens in falling order, of equals the lowest id first; ``K`` is the most
    that any row wants, and a row's entries beyond what it wants mean nothing.
    """

    drawn: Float32  # [NL]
    top_ids: Int32  # [NL, K]
    top: Float32  # [NL, K]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step came to. ``tokens[i] < 0`` if row ``i`` had no valid logits; ``logprobs`` as asked for, or None."""

    tokens: Int32  # [NL]
    logprobs: StepLogprobs | None = None


class Runtime(Protocol):
    """A compiled engine on its device. Used by one thread.

    ``num_blocks`` blocks of ``block_size`` tokens are owned by the runtime and addressed by the engine's block tables.

    Up to ``overlap_depth + 1`` steps are in flight. They run strictly in the order of their launch: whatever a later
    step reads or writes, it does after the earlier one is through. So blocks and slots may be given to a step while
    another one still uses them, and a token that one draws is there for the next.
    """

    num_blocks: int
    block_size: int

    def launch(self, batch: Batch) -> None:
        """Start one step."""

    def wait(self) -> StepOutput:
        """Finish the oldest launched step and return what it drew, in arrays that no later step touches.

        Raises what went wrong on the device.
        """

    def close(self) -> None:
        """Finish or drop what is in flight, and free the device's memory. Idempotent."""
