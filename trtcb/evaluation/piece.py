"""What one sequence brings to a step of an evaluation, and the greedy batch that several make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trtcb.executor.runtime import Batch, Int32, SamplingRows


@dataclass(frozen=True, slots=True)
class Piece:
    """``tokens`` at the positions ``start, start + 1, ...`` of a sequence that owns ``blocks``.

    ``logits`` says after which of them they are wanted.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    logits: Literal["all", "last", "none"]


def pack(pieces: Sequence[Piece], block_size: int) -> Batch:
    """One step of these pieces, in order; every row that has logits also draws its likeliest token."""
    lengths = [len(piece.tokens) for piece in pieces]
    cu_q = np.cumsum([0, *lengths])
    tables = np.zeros((len(pieces), max(len(piece.blocks) for piece in pieces)), np.int32)
    for row, piece in zip(tables, pieces, strict=True):
        row[: len(piece.blocks)] = piece.blocks
    owner = np.repeat(np.arange(len(pieces)), lengths)
    starts = np.array([piece.start for piece in pieces])
    positions = np.arange(cu_q[-1]) + np.repeat(starts - cu_q[:-1], lengths)
    rows = [_logit_rows(piece, int(end)) for piece, end in zip(pieces, cu_q[1:], strict=True)]
    logit_index = np.concatenate(rows)
    return Batch(
        input_ids=np.concatenate([np.asarray(piece.tokens, np.int32) for piece in pieces]),
        positions=positions.astype(np.int32),
        slot_mapping=(tables[owner, positions // block_size] * block_size + positions % block_size).astype(np.int32),
        cu_q=cu_q.astype(np.int32),
        block_tables=tables,
        slots=np.arange(len(pieces)),
        logit_index=logit_index,
        sampling=_greedy(len(logit_index)),
    )


def _logit_rows(piece: Piece, end: int) -> Int32:
    """Rows of the step whose logits ``piece`` wants; its own end before ``end``."""
    count = {"all": len(piece.tokens), "last": 1, "none": 0}[piece.logits]
    return np.arange(end - count, end, dtype=np.int32)


def _greedy(num_rows: int) -> SamplingRows:
    zeros, none = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.int32)
    return SamplingRows(
        temperature=zeros,
        top_k=none,
        top_p=np.ones(num_rows, np.float32),
        min_p=zeros,
        seed=np.zeros(num_rows, np.uint64),
        position=none,
    )
