"""Source of the sampling kernel. ``specialize.py`` compiles it once for all models; not used directly.

A row's logits become one token. All filters are thresholds on the logit, found by radix selection on its bits instead
of a sort: tokens that tie with the last one kept are kept too. Sums run in order of token id and the random number is a
function of (seed, position), so a row's token never depends on its neighbours.
"""

import numpy as np
from numba import types

from trtcb.plugins.cpu.simd import (
    Real,
    add,
    any_at_least,
    exp,
    fetch_add,
    jit,
    load_f32,
    max_lanes,
    mul,
    read_f32,
    read_f64,
    read_i32,
    read_i64,
    read_u32,
    splat,
    store_f32,
    sub,
    sum_lanes,
    write_f32,
    write_f64,
    write_i32,
)
from trtcb.plugins.cpu.vector_ir import (
    I32,
    LANES,
    Builder,
    Value,
    define,
    emit_call,
    f32x16,
)

CHUNK = 256  # tokens whose weights are summed together in fp32
BINS = 2048
FIRST_CUT = np.float32(2.0**-8)  # weights below a cut are looked at only if a filter reaches that far
NEXT_CUT = np.float32(2.0**-8)
LAST_CUT = np.float32(2.0**-24)
FAILED = -1
MORE = -2
ZERO = np.float32(0)
LARGEST = np.float32(np.finfo(np.float32).max)
WORD = np.uint64(0xFFFFFFFF)
HALF_WORD = np.uint64(32)

# one thread's scratch: bins [BINS] f64, chunk sums [V / CHUNK] f64, weights [V] f32, candidates [V] i32
BINS_AT = 0
SUMS_AT = BINS * 8


def scratch_bytes(vocab_size: int) -> int:
    """Bytes of scratch one thread needs."""
    padded = (vocab_size + CHUNK - 1) // CHUNK * CHUNK
    return (SUMS_AT + padded // CHUNK * 8 + padded * 8 + 4095) // 4096 * 4096


@define(f32x16, f32x16, f32x16)
def sticky_maximum(builder: Builder, x: Value, y: Value) -> Value:
    """Lane-wise maximum that is NaN where either is."""
    return emit_call(builder, "maximum", x, y)


@define(types.float32, types.float32, types.float32)
def sticky_max(builder: Builder, x: Value, y: Value) -> Value:
    """Maximum that is NaN if either is."""
    return emit_call(builder, "maximum", x, y)


@define(types.float32, f32x16, types.int64)
def lane(builder: Builder, x: Value, index: Value) -> Value:
    """One lane."""
    return builder.extract_element(x, builder.trunc(index, I32))


@jit
def row_peak(logits: int, vocab: int) -> Real:
    """Largest logit, NaN if any is NaN."""
    first = splat(np.float32(-np.inf))
    second, third, fourth = first, first, first  # four chains hide the latency
    whole = vocab // (4 * LANES) * 4 * LANES
    for i in range(0, whole, 4 * LANES):
        first = sticky_maximum(first, load_f32(logits, i))
        second = sticky_maximum(second, load_f32(logits, i + LANES))
        third = sticky_maximum(third, load_f32(logits, i + 2 * LANES))
        fourth = sticky_maximum(fourth, load_f32(logits, i + 3 * LANES))
    peaks = sticky_maximum(sticky_maximum(first, second), sticky_maximum(third, fourth))
    peak = np.float32(-np.inf)
    for i in range(LANES):
        peak = sticky_max(peak, lane(peaks, i))
    for i in range(whole, vocab):
        peak = sticky_max(peak, read_f32(logits, i))
    return peak


@jit
def first_equal(logits: int, vocab: int, peak: Real) -> int:
    """Lowest token id whose logit is ``peak``."""
    start = 0
    while start + LANES <= vocab and not any_at_least(load_f32(logits, start), peak):
        start += LANES
    for i in range(start, vocab):
        if read_f32(logits, i) == peak:
            return i
    return FAILED


@jit
def weigh(logits: int, vocab: int, peak: Real, temperature: Real, weights: int, sums: int) -> Real:
    """Unnormalised probabilities ``exp((logit - peak) / temperature)`` and their sums per chunk; returns the total."""
    inverse = splat(min(np.float32(1) / temperature, LARGEST))
    shift = splat(peak)
    total = 0.0
    for chunk in range((vocab + CHUNK - 1) // CHUNK):
        start, end = chunk * CHUNK, min(vocab, (chunk + 1) * CHUNK)
        whole = start + (end - start) // LANES * LANES
        mass = splat(ZERO)
        for i in range(start, whole, LANES):
            weight = exp(mul(sub(load_f32(logits, i), shift), inverse))
            store_f32(weights, i, weight)
            mass = add(mass, weight)
        partial = np.float64(sum_lanes(mass))
        for i in range(whole, end):
            weight = exp(mul(sub(splat(read_f32(logits, i)), shift), inverse))
            write_f32(weights, i, max_lanes(weight))
            partial += np.float64(max_lanes(weight))
        write_f64(sums, chunk, partial)
        total += partial
    return total


@jit
def uniform(seed: int, position: int) -> Real:
    """Draw from [0, 1) with Philox4x32-10 (Salmon et al., 2011), keyed by ``seed``, at counter ``position``."""
    key0, key1 = np.uint64(seed) & WORD, np.uint64(seed) >> HALF_WORD
    c0, c1, c2, c3 = np.uint64(position), np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(10):
        low = np.uint64(0xD2511F53) * c0
        high = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (high >> HALF_WORD) ^ c1 ^ key0, high & WORD, (low >> HALF_WORD) ^ c3 ^ key1, low & WORD
        key0 = (key0 + np.uint64(0x9E3779B9)) & WORD
        key1 = (key1 + np.uint64(0xBB67AE85)) & WORD
    bits = ((c0 >> np.uint64(5)) << np.uint64(26)) | (c1 >> np.uint64(6))
    return np.float64(bits) * 2.0**-53


@jit
def draw_any(weights: int, sums: int, vocab: int, target: Real) -> int:
    """First token at which the running weight passes ``target``."""
    chunk = 0
    last_chunk = (vocab + CHUNK - 1) // CHUNK - 1
    while chunk < last_chunk and read_f64(sums, chunk) <= target:
        target -= read_f64(sums, chunk)
        chunk += 1
    chosen = FAILED
    while chosen == FAILED and chunk >= 0:  # rounding may carry past a chunk's end, or its weights may all be zero
        for i in range(chunk * CHUNK, min(vocab, (chunk + 1) * CHUNK)):
            weight = read_f32(weights, i)
            if weight > ZERO:
                chosen = i
                target -= np.float64(weight)
                if target < 0.0:
                    break
        chunk -= 1
    return chosen


@jit
def order_key(logits: int, token: int) -> int:
    """Turn a logit's bits into an unsigned 32-bit number of the same order."""
    bits: int = read_u32(logits, token)
    return bits ^ 0xFFFFFFFF if bits & 0x80000000 else bits | 0x80000000


@jit
def gather(weights: int, vocab: int, cut: Real, candidates: int) -> int:
    """List the tokens with a weight of at least ``cut``, by id; returns how many."""
    count = 0
    for start in range(0, vocab, LANES):
        if start + LANES <= vocab and not any_at_least(load_f32(weights, start), cut):
            continue
        for i in range(start, min(vocab, start + LANES)):
            if read_f32(weights, i) >= cut:
                write_i32(candidates, count, i)
                count += 1
    return count


@jit
def mass_of(weights: int, candidates: int, count: int) -> Real:
    """Sum of the candidates' weights, by id."""
    mass = 0.0
    for i in range(count):
        mass += np.float64(read_f32(weights, read_i32(candidates, i)))
    return mass


@jit
def threshold(logits: int, weights: int, candidates: int, count: int, by_mass: int, target: Real, bins: int) -> int:
    """Find the largest key with candidates of number (or weight) ``target`` at or above it; else the smallest key."""
    prefix, remaining = 0, target
    for level in range(3):
        shift, width = (21, 11) if level == 0 else ((10, 11) if level == 1 else (0, 10))
        for i in range(1 << width):
            write_f64(bins, i, 0.0)
        lowest = (1 << width) - 1
        for i in range(count):
            token = read_i32(candidates, i)
            key = order_key(logits, token)
            if key >> (shift + width) == prefix:
                at = (key >> shift) & ((1 << width) - 1)
                lowest = min(lowest, at)
                write_f64(bins, at, read_f64(bins, at) + (np.float64(read_f32(weights, token)) if by_mass else 1.0))
        at = (1 << width) - 1
        while at > lowest and (read_f64(bins, at) < remaining or read_f64(bins, at) == 0.0):
            remaining -= read_f64(bins, at)
            at -= 1
        prefix = (prefix << width) | at
    return prefix


@jit
def keep_from(logits: int, candidates: int, count: int, key: int) -> int:
    """Drop the candidates below ``key``; returns how many are left."""
    kept = 0
    for i in range(count):
        token = read_i32(candidates, i)
        if order_key(logits, token) >= key:
            write_i32(candidates, kept, token)
            kept += 1
    return kept


@jit
def filtered(
    logits: int,
    weights: int,
    candidates: int,
    bins: int,
    vocab: int,
    cut: Real,
    total: Real,
    top_k: int,
    top_p: Real,
) -> int:
    """Candidates that pass top-k, then top-p; ``MORE`` if the answer may lie among weights below ``cut``."""
    count = gather(weights, vocab, cut, candidates)
    mass = total
    if top_k > 0 and top_k < vocab:
        if count < top_k:
            return MORE
        key = threshold(logits, weights, candidates, count, 0, np.float64(top_k), bins)
        count = keep_from(logits, candidates, count, key)
        mass = mass_of(weights, candidates, count)
    if top_p < np.float32(1):
        target = np.float64(top_p) * mass
        if cut > ZERO and mass_of(weights, candidates, count) < target:
            return MORE
        count = keep_from(logits, candidates, count, threshold(logits, weights, candidates, count, 1, target, bins))
    return count


@jit
def draw_listed(weights: int, candidates: int, count: int, floor: Real, random: Real) -> int:
    """Draw among the candidates whose weight is at least ``floor``, by inverse transform in order of id."""
    mass = 0.0
    for i in range(count):
        weight = read_f32(weights, read_i32(candidates, i))
        if weight >= floor:
            mass += np.float64(weight)
    target, chosen = random * mass, FAILED
    for i in range(count):
        weight = read_f32(weights, read_i32(candidates, i))
        if weight >= floor and weight > ZERO:
            chosen = read_i32(candidates, i)
            target -= np.float64(weight)
            if target < 0.0:
                break
    return chosen


@jit
def sample_row(
    logits: int, vocab: int, temperature: Real, top_k: int, top_p: Real, min_p: Real, random: Real, scratch: int
) -> int:
    """One token, or ``FAILED`` if a logit is NaN or none is finite."""
    peak = row_peak(logits, vocab)
    if not np.isfinite(peak):
        return FAILED
    if temperature <= ZERO:
        return first_equal(logits, vocab, peak)
    chunks = (vocab + CHUNK - 1) // CHUNK
    bins, sums, weights = scratch + BINS_AT, scratch + SUMS_AT, scratch + SUMS_AT + chunks * 8
    candidates = weights + chunks * CHUNK * 4
    total = weigh(logits, vocab, peak, temperature, weights, sums)
    if (top_k <= 0 or top_k >= vocab) and top_p >= np.float32(1) and min_p <= ZERO:
        return draw_any(weights, sums, vocab, random * total)
    floor = min(min_p, np.float32(1))
    cut = FIRST_CUT if floor <= ZERO else min(FIRST_CUT, floor)
    count = filtered(logits, weights, candidates, bins, vocab, cut, total, top_k, top_p)
    while count == MORE:
        cut = cut * NEXT_CUT if cut > LAST_CUT else ZERO
        count = filtered(logits, weights, candidates, bins, vocab, cut, total, top_k, top_p)
    return draw_listed(weights, candidates, count, floor, random)


def sample(arguments: int, part: int, parts: int) -> None:
    """Claim and sample rows until none is left.

    Arguments: logits, vocabulary size, temperature, top_k, top_p, min_p, seed, position, tokens, rows, scratch, bytes
    of scratch per thread; the last word of the argument block is the claim counter.
    """
    logits, vocab = read_i64(arguments, 0), read_i64(arguments, 1)
    scratch = read_i64(arguments, 10) + part * read_i64(arguments, 11)
    row = fetch_add(arguments + 15 * 8, 1)
    while row < read_i64(arguments, 9):
        token = sample_row(
            logits + row * vocab * 4,
            vocab,
            read_f32(read_i64(arguments, 2), row),
            read_i32(read_i64(arguments, 3), row),
            read_f32(read_i64(arguments, 4), row),
            read_f32(read_i64(arguments, 5), row),
            uniform(read_i64(read_i64(arguments, 6), row), read_i32(read_i64(arguments, 7), row)),
            scratch,
        )
        write_i32(read_i64(arguments, 8), row, token)
        row = fetch_add(arguments + 15 * 8, 1)


KERNELS = (sample,)
