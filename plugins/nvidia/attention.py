"""Triton kernels of ``PagedAttention`` and ``QuantPagedAttention`` (``plugins.schema``): one body for all.

A program has ``ROWS`` rows of one sequence and one KV head, grid ``(ceil(S * G / ROWS), HK, B)`` with ``G = H / HK``
query heads per KV head. Row ``r`` is token ``r // G`` and query head ``r % G`` of the group, so a token that decodes
fills ``G`` rows of a tile, and the heads of a prompt chunk share each tile of keys and values. The context is walked in
tiles of ``COLUMNS`` tokens with an online softmax in fp32 (FlashAttention-2, Dao 2023, algorithm 1). What a row gets
depends on its own query and context alone, but for the size of the tiles.

A decoding step over long contexts has too few programs for a GPU. ``split_attention`` cuts each context at multiples of
``SPLIT`` tokens, wherever it ends, and ``merge_splits`` adds up the parts in order (Flash-Decoding, Dao et al. 2023).
A TensorRT plugin is one kernel without workspace, so only the ``cuda`` target splits.
"""

import triton
import triton.language as tl

from trtcb.plugins.nvidia.codes import PORTABLE_E4M3, decode_e4m3

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1.0e30)  # the score of a masked token: finite, as inf - inf is not a number


@triton.jit
def attend(
    queries,
    position,
    k_pool,
    v_pool,
    k_scale_pool,
    v_scale_pool,
    blocks,
    head,
    begin,
    end,
    SCALE: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Attend to tokens ``begin:end`` of one sequence, whose block table is at ``blocks``.

    ``queries`` ``[ROWS, D]``, ``position`` int32 ``[ROWS]``. Gives the weighted sum of values ``[ROWS, D]``, the
    highest score (in powers of 2) and the sum of weights ``[ROWS]``, all fp32.
    """
    rows: tl.constexpr = queries.shape[0]
    d = tl.arange(0, D)
    peak = tl.full([rows], NOTHING, tl.float32)
    total = tl.zeros([rows], tl.float32)
    sums = tl.zeros([rows, D], tl.float32)
    for start in range(begin, end, COLUMNS):
        n = start + tl.arange(0, COLUMNS)
        is_there = n < end
        block = tl.load(blocks + n // BLOCK_SIZE, mask=is_there, other=0)
        place = (block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE) * HK + head
        keys = tl.load(k_pool + place[:, None] * D + d[None, :], mask=is_there[:, None], other=0)
        values = tl.load(v_pool + place[:, None] * D + d[None, :], mask=is_there[:, None], other=0)
        if FORMAT == "e4m3":
            keys, values = decode_e4m3(keys, NATIVE), decode_e4m3(values, NATIVE)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype))) * (SCALE * LOG2_E)
        if FORMAT != "none":
            unit: tl.constexpr = 1.0 / PORTABLE_E4M3 if FORMAT == "e4m3" and not NATIVE else 1.0
            k_scale = tl.load(k_scale_pool + place, mask=is_there, other=0.0).to(tl.float32)
            v_scale = tl.load(v_scale_pool + place, mask=is_there, other=0.0).to(tl.float32)
            scores = scores * (k_scale * unit)[None, :]
            values = values.to(tl.float32) * (v_scale * unit)[:, None]
        scores = tl.where(is_there[None, :] & (n[None, :] <= position[:, None]), scores, NOTHING)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        kept = tl.exp2(peak - higher)
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None] + tl.dot(weights.to(queries.dtype), values.to(queries.dtype))
        peak = higher
    return sums, peak, total


@triton.jit
def attend_tile(
    q,
    k_pool,
    v_pool,
    k_scale_pool,
    v_scale_pool,
    block_tables,
    positions,
    cu_q,
    max_blocks,
    out,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One program: all of its rows' contexts, and their results."""
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = H // HK
    first = tl.load(cu_q + sequence)
    num_rows = (tl.load(cu_q + sequence + 1) - first) * group
    if tile * ROWS < num_rows:
        row = tile * ROWS + tl.arange(0, ROWS)
        is_live = row < num_rows
        token = first + row // group
        d = tl.arange(0, D)
        place = (token.to(tl.int64) * H + head * group + row % group) * D
        queries = tl.load(q + place[:, None] + d[None, :], mask=is_live[:, None], other=0.0)
        position = tl.load(positions + token, mask=is_live, other=-1)
        sums, _, total = attend(
            queries,
            position,
            k_pool,
            v_pool,
            k_scale_pool,
            v_scale_pool,
            block_tables + sequence.to(tl.int64) * max_blocks,
            head,
            0,
            tl.max(position, 0) + 1,
            SCALE,
            HK,
            D,
            BLOCK_SIZE,
            COLUMNS,
            FORMAT,
            NATIVE,
        )
        context = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] + d[None, :], context, mask=is_live[:, None])


@triton.jit
def paged_attention(
    q,
    k_pool,
    v_pool,
    block_tables,
    positions,
    cu_q,
    token_sequence,
    q_range,
    max_blocks,
    context,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Attend over pools of a float type. Arguments are the operator's, with ``max_blocks`` (MB) before its output."""
    attend_tile(
        q,
        k_pool,
        v_pool,
        k_pool,
        v_pool,
        block_tables,
        positions,
        cu_q,
        max_blocks,
        context,
        SCALE,
        H,
        HK,
        D,
        BLOCK_SIZE,
        ROWS,
        COLUMNS,
        "none",
        False,
    )


@triton.jit
def quant_paged_attention(
    q,
    k_pool,
    v_pool,
    k_scale_pool,
    v_scale_pool,
    block_tables,
    positions,
    cu_q,
    token_sequence,
    q_range,
    max_blocks,
    context,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Attend over pools of raw bytes. ``NATIVE``: the processor has e4m3 (compute capability 8.9 and later)."""
    attend_tile(
        q,
        k_pool,
        v_pool,
        k_scale_pool,
        v_scale_pool,
        block_tables,
        positions,
        cu_q,
        max_blocks,
        context,
        SCALE,
        H,
        HK,
        D,
        BLOCK_SIZE,
        ROWS,
        COLUMNS,
        FORMAT,
        NATIVE,
    )


@triton.jit
def split_attention(
    q,
    k_pool,
    v_pool,
    k_scale_pool,
    v_scale_pool,
    block_tables,
    positions,
    max_blocks,
    sums_out,
    peak_out,
    total_out,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Attend of one token per sequence to one part of its context: grid ``(splits, HK, B)``, ``ROWS >= G``.

    Writes fp32 ``[splits, B, H, D]`` and twice ``[splits, B, H]``; nothing for parts behind the token's position.
    """
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = H // HK
    at = tl.load(positions + sequence)
    begin = split * SPLIT
    if begin <= at:
        row = tl.arange(0, ROWS)
        is_live = row < group
        d = tl.arange(0, D)
        place = sequence.to(tl.int64) * H + head * group + row
        queries = tl.load(q + place[:, None] * D + d[None, :], mask=is_live[:, None], other=0.0)
        sums, peak, total = attend(
            queries,
            tl.where(is_live, at, -1),
            k_pool,
            v_pool,
            k_scale_pool,
            v_scale_pool,
            block_tables + sequence.to(tl.int64) * max_blocks,
            head,
            begin,
            tl.minimum(begin + SPLIT, at + 1),
            SCALE,
            HK,
            D,
            BLOCK_SIZE,
            COLUMNS,
            FORMAT,
            NATIVE,
        )
        part = split.to(tl.int64) * tl.num_programs(2) * H + place
        tl.store(sums_out + part[:, None] * D + d[None, :], sums, mask=is_live[:, None])
        tl.store(peak_out + part, peak, mask=is_live)
        tl.store(total_out + part, total, mask=is_live)


@triton.jit
def merge_splits(sums, peak, total, positions, out, H: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr):
    """Add up what :func:`split_attention` wrote, part after part: grid ``(H, B)``, ``out`` ``[B, H, D]``."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    place = sequence.to(tl.int64) * H + head
    apart = tl.num_programs(1).to(tl.int64) * H
    highest = tl.load(peak + place)
    weight = tl.load(total + place)
    context = tl.load(sums + place * D + d)
    for split in range(1, tl.load(positions + sequence) // SPLIT + 1):
        part = split * apart + place
        its_peak = tl.load(peak + part)
        higher = tl.maximum(highest, its_peak)
        kept, added = tl.exp2(highest - higher), tl.exp2(its_peak - higher)
        weight = weight * kept + tl.load(total + part) * added
        context = context * kept + tl.load(sums + part * D + d) * added
        highest = higher
    tl.store(out + place * D + d, (context / weight).to(out.dtype.element_ty))
