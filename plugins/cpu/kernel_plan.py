"""Source of the kernel that cuts a batch into attention's work items; ``specialize.py`` rewrites the constant."""

from trtcb.plugins.cpu.simd import (
    jit,
    read_i32,
    read_i64,
    stack,
    write_i32,
    write_i64,
)

# --- constants of a specialisation ---
TOKENS_PER_ITEM = 32
# --- end of constants ---

ITEM_FIELDS = 3  # int32: sequence, first row, number of rows
COST_BUCKETS = 64

bucket_counts = stack(COST_BUCKETS * 8)


@jit
def cost_bucket(num_tokens: int, position: int) -> int:
    """Half-octave class of an item's work, the most expensive first."""
    cost = num_tokens * (position + num_tokens)
    bucket = 0
    while cost >= 2:
        if cost < 4:
            bucket += cost - 1
            break
        bucket += 2
        cost >>= 1
    return max(0, COST_BUCKETS - 1 - bucket)


def plan_attention(arguments: int, part: int, parts: int) -> None:
    """Cut the batch into work items, longest first, so that the last one claimed is a short one.

    Arguments: cu_q, positions, number of sequences, items (room for one per token), result (int64: number of items,
    then the sum over rows of their items' context lengths).
    """
    cu_q, positions, num_sequences = read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 2)
    items, result = read_i64(arguments, 3), read_i64(arguments, 4)
    counts = bucket_counts()
    for bucket in range(COST_BUCKETS):
        write_i64(counts, bucket, 0)
    num_items, work = 0, 0
    for placing in range(2):
        for sequence in range(num_sequences):
            for first in range(read_i32(cu_q, sequence), read_i32(cu_q, sequence + 1), TOKENS_PER_ITEM):
                num_tokens = min(TOKENS_PER_ITEM, read_i32(cu_q, sequence + 1) - first)
                bucket = cost_bucket(num_tokens, read_i32(positions, first))
                place = read_i64(counts, bucket)
                write_i64(counts, bucket, place + 1)
                if placing:
                    write_i32(items, place * ITEM_FIELDS, sequence)
                    write_i32(items, place * ITEM_FIELDS + 1, first)
                    write_i32(items, place * ITEM_FIELDS + 2, num_tokens)
                    work += num_tokens * (read_i32(positions, first) + num_tokens)
        if not placing:  # counts to first places
            for bucket in range(COST_BUCKETS):
                count = read_i64(counts, bucket)
                write_i64(counts, bucket, num_items)
                num_items += count
    write_i64(result, 0, num_items)
    write_i64(result, 1, work)


KERNELS = (plan_attention,)
