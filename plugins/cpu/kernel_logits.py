"""Source of the kernels that edit logits before sampling and tell log-probabilities after it.

``specialize.py`` compiles it once for all models; not used directly. Each row is treated by one thread, alone and in a
fixed order. Edits touch only the tokens they list, and what they overwrite is saved, so that they can be undone.
"""

import numpy as np

from trtcb.plugins.cpu.kernel_sampling import row_peak
from trtcb.plugins.cpu.simd import (
    Real,
    add,
    any_at_least,
    exp,
    jit,
    load_f32,
    max_lanes,
    read_f32,
    read_i32,
    read_i64,
    splat,
    sub,
    sum_lanes,
    write_f32,
    write_i32,
)
from trtcb.plugins.cpu.vector_ir import LANES

CHUNK = 256  # tokens whose weights are summed together in fp32
ZERO = np.float32(0)
LOWEST = np.float32(-np.inf)


@jit
def penalized(logit: Real, repetition: Real, frequency: Real, presence: Real, count: int) -> Real:
    """One seen token's logit after its penalties; ``count`` is how often it is in the output."""
    logit = logit / repetition if logit > ZERO else logit * repetition
    logit = logit - frequency * np.float32(count)
    return logit - presence if count > 0 else logit


def edit(arguments: int, part: int, parts: int) -> None:
    """Arguments: logits, vocabulary size, rows, table of addresses, saved logits (biases' first), how many are biases.

    The table: repetition, frequency, presence, token_start, token_ids, output_counts, bias_start, bias_ids, bias.
    """
    vocab, num_rows, table = read_i64(arguments, 1), read_i64(arguments, 2), read_i64(arguments, 3)
    saved, num_biases = read_i64(arguments, 4), read_i64(arguments, 5)
    token_start, token_ids, counts = read_i64(table, 3), read_i64(table, 4), read_i64(table, 5)
    bias_start, bias_ids, bias = read_i64(table, 6), read_i64(table, 7), read_i64(table, 8)
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        logits = read_i64(arguments, 0) + row * vocab * 4
        for i in range(read_i32(bias_start, row), read_i32(bias_start, row + 1)):
            token = read_i32(bias_ids, i)
            logit = read_f32(logits, token)
            write_f32(saved, i, logit)
            write_f32(logits, token, logit + read_f32(bias, i))
        repetition, frequency = read_f32(read_i64(table, 0), row), read_f32(read_i64(table, 1), row)
        presence = read_f32(read_i64(table, 2), row)
        for i in range(read_i32(token_start, row), read_i32(token_start, row + 1)):
            token = read_i32(token_ids, i)
            logit = read_f32(logits, token)
            write_f32(saved, num_biases + i, logit)
            write_f32(logits, token, penalized(logit, repetition, frequency, presence, read_i32(counts, i)))


def restore(arguments: int, part: int, parts: int) -> None:
    """Undo ``edit``, backwards, as a token may be listed more than once. Arguments as there."""
    vocab, num_rows, table = read_i64(arguments, 1), read_i64(arguments, 2), read_i64(arguments, 3)
    saved, num_biases = read_i64(arguments, 4), read_i64(arguments, 5)
    token_start, token_ids = read_i64(table, 3), read_i64(table, 4)
    bias_start, bias_ids = read_i64(table, 6), read_i64(table, 7)
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        logits = read_i64(arguments, 0) + row * vocab * 4
        first = read_i32(token_start, row)
        for back in range(read_i32(token_start, row + 1) - first):
            i = read_i32(token_start, row + 1) - 1 - back
            write_f32(logits, read_i32(token_ids, i), read_f32(saved, num_biases + i))
        first = read_i32(bias_start, row)
        for back in range(read_i32(bias_start, row + 1) - first):
            i = read_i32(bias_start, row + 1) - 1 - back
            write_f32(logits, read_i32(bias_ids, i), read_f32(saved, i))


@jit
def log_total(logits: int, vocab: int, peak: Real) -> Real:
    """Logarithm of the sum of ``exp(logit - peak)``: chunks in fp32, their sums in fp64."""
    shift = splat(peak)
    total = 0.0
    for start in range(0, vocab, CHUNK):
        end = min(vocab, start + CHUNK)
        whole = start + (end - start) // LANES * LANES
        mass = splat(ZERO)
        for i in range(start, whole, LANES):
            mass = add(mass, exp(sub(load_f32(logits, i), shift)))
        total += np.float64(sum_lanes(mass))
        for i in range(whole, end):
            total += np.float64(max_lanes(exp(sub(splat(read_f32(logits, i)), shift))))
    return np.log(total)


@jit
def insert(token: int, logit: Real, count: int, ids: int, values: int) -> None:
    """Put a token into a full list of falling values, behind its equals; the last one drops out."""
    place = count - 1
    while place > 0 and read_f32(values, place - 1) < logit:
        write_f32(values, place, read_f32(values, place - 1))
        write_i32(ids, place, read_i32(ids, place - 1))
        place -= 1
    write_f32(values, place, logit)
    write_i32(ids, place, token)


@jit
def likeliest(logits: int, vocab: int, count: int, ids: int, values: int) -> None:
    """List the ``count <= vocab`` largest logits in falling order, of equals the lowest id first."""
    for i in range(count):
        write_f32(values, i, LOWEST)
        write_i32(ids, i, i)
    for i in range(count):
        insert(i, read_f32(logits, i), i + 1, ids, values)
    for start in range(count, vocab, LANES):
        if start + LANES <= vocab and not any_at_least(load_f32(logits, start), read_f32(values, count - 1)):
            continue
        for i in range(start, min(vocab, start + LANES)):
            if read_f32(logits, i) > read_f32(values, count - 1):
                insert(i, read_f32(logits, i), count, ids, values)


def logprobs(arguments: int, part: int, parts: int) -> None:
    """Tell how likely the drawn and the likeliest tokens are. Rows without a token are left alone.

    Arguments: logits, vocabulary size, rows, tokens, how many likeliest per row (-1: nothing at all), width of the
    lists, logprobs of the tokens, ids and logprobs of the likeliest.
    """
    vocab, num_rows, width = read_i64(arguments, 1), read_i64(arguments, 2), read_i64(arguments, 5)
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        logits = read_i64(arguments, 0) + row * vocab * 4
        token, count = read_i32(read_i64(arguments, 3), row), read_i32(read_i64(arguments, 4), row)
        if token >= 0 and count >= 0:
            peak = row_peak(logits, vocab)
            total = log_total(logits, vocab, peak)
            logprob = np.float64(read_f32(logits, token)) - np.float64(peak) - total
            write_f32(read_i64(arguments, 6), row, np.float32(logprob))
            ids = read_i64(arguments, 7) + row * width * 4
            values = read_i64(arguments, 8) + row * width * 4
            if count > 0:
                likeliest(logits, vocab, count, ids, values)
            for i in range(count):
                logprob = np.float64(read_f32(values, i)) - np.float64(peak) - total
                write_f32(values, i, np.float32(logprob))


KERNELS = (edit, restore, logprobs)
