"""What a plan and its KV pool will cost, from the model's shape alone."""

from dataclasses import dataclass

from trtcb.memory import pool_memory
from trtcb.plan_format import ITEM_BYTES
from trtcb.plugins.cpu.grouped import GROUP, WEIGHT_BYTES
from trtcb.plugins.cpu.rows import row_bytes
from trtcb.spec import BuildLimits, KVDtype, ModelSpec, WeightDtype

# Tokenizer, graph, tables and padding: a few MB in every model seen (SmolLM2 3.5 MB, Llama 3 17 MB).
_BYTES_PER_VOCAB_ENTRY = 80


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes, and the blocks and sequences (each of ``max_seq_len`` tokens) that the pool holds.

    ``activation_bytes`` is the widest step's intermediates and logits; ``kv_share_of_fp16`` compares a token's KV with
    fp16's, scales included.
    """

    num_params: int
    weight_bytes: int
    plan_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    kv_share_of_fp16: float
    block_bytes: int
    pool_bytes: int
    num_blocks: int
    num_sequences: int

    @property
    def resident_bytes(self) -> int:
        """All of a serving process but what Python and its libraries take."""
        return self.weight_bytes + self.activation_bytes + self.num_blocks * self.block_bytes


def estimate(
    spec: ModelSpec,
    *,
    weight_dtype: WeightDtype,
    kv_dtype: KVDtype,
    limits: BuildLimits,
    available_bytes: int,
    kv_memory_bytes: int | None = None,
    kv_memory_fraction: float = 0.9,
) -> MemoryEstimate:
    """Estimate a build of ``spec``. Without ``kv_memory_bytes`` the pool gets what the fraction leaves."""
    rope_bytes = limits.max_seq_len * spec.head_dim * 4
    weight_bytes = _weight_bytes(spec, weight_dtype) + rope_bytes
    activation_bytes = _activation_bytes(spec, weight_dtype, limits)
    per_token = spec.kv_bytes_per_token(kv_dtype)
    block_bytes = per_token * limits.block_size
    if kv_memory_bytes is None:
        pool_bytes = pool_memory(available_bytes, weight_bytes + activation_bytes, kv_memory_fraction)
    else:
        pool_bytes = kv_memory_bytes
    num_blocks = pool_bytes // block_bytes
    blocks_per_sequence = -(-limits.max_seq_len // limits.block_size)
    return MemoryEstimate(
        num_params=spec.num_params,
        weight_bytes=weight_bytes,
        plan_bytes=weight_bytes + spec.vocab_size * _BYTES_PER_VOCAB_ENTRY,
        activation_bytes=activation_bytes,
        kv_bytes_per_token=per_token,
        kv_share_of_fp16=per_token / spec.kv_bytes_per_token(KVDtype.FP16),
        block_bytes=block_bytes,
        pool_bytes=pool_bytes,
        num_blocks=num_blocks,
        num_sequences=num_blocks // blocks_per_sequence,
    )


def _weight_bytes(spec: ModelSpec, weight_dtype: WeightDtype) -> int:
    table = spec.vocab_size * spec.hidden_size
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    layers = spec.num_params - norms - table * (1 if spec.tie_embeddings else 2)
    outputs = spec.q_size + 2 * spec.kv_size + 2 * spec.hidden_size + 2 * spec.intermediate_size
    head = weight_dtype.head_dtype
    is_stored_once = spec.tie_embeddings and head.value == weight_dtype.table_dtype
    return (
        _product_bytes(layers, spec.num_layers * outputs, weight_dtype)
        + (0 if is_stored_once else _product_bytes(table, spec.vocab_size, head))
        + table * ITEM_BYTES[weight_dtype.table_dtype]
        + norms * 4
    )


def _product_bytes(num_weights: int, num_outputs: int, weight_dtype: WeightDtype) -> int:
    if weight_dtype is WeightDtype.INT4:
        return num_weights // GROUP * WEIGHT_BYTES
    scales = 4 * num_outputs if weight_dtype is WeightDtype.INT8 else 0
    return num_weights * ITEM_BYTES[weight_dtype.value] + scales


def _activation_bytes(spec: ModelSpec, weight_dtype: WeightDtype, limits: BuildLimits) -> int:
    # Per token: the fp32 residual and delta, one hidden row, qkv, query and context, gate|up and their product.
    width = 3 * spec.hidden_size + 3 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size
    token = width * 4
    row = (spec.vocab_size + 2 * spec.hidden_size) * 4  # per row of logits: its residual and hidden row as well
    rounded, rounded_rows = weight_dtype.quantized_rows, weight_dtype.head_dtype.quantized_rows
    if rounded is not None:
        token += sum(row_bytes(rounded, inner) for inner in (spec.hidden_size, spec.q_size, spec.intermediate_size))
    if rounded_rows is not None:
        row += row_bytes(rounded_rows, spec.hidden_size)
    return limits.max_num_tokens * token + limits.max_batch_size * row
