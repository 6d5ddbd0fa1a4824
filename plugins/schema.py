"""The ``trtcb`` operators: one schema each, which the exporter, the function bodies, the kernels and the plugins share.

A packed step has ``T`` tokens of ``B`` sequences. Letters in shapes:

====== ============================================= ====== =============================================
T      tokens of the step                            SLOTS  token places of the pool (blocks x block_size)
B      sequences of the step                         MB     blocks of the longest block table
H      query heads                                   S      tokens of the sequence with the most in this step
HK     key/value heads, ``H`` a multiple of it       D      head dimension
====== ============================================= ====== =============================================

Rules all implementations follow:

* A slot is ``block * block_size + offset``. Slots of one step are distinct and in ``[0, SLOTS)``; padding writes to a
  block set aside for it, never to a negative slot.
* Pools are updated in place: an output that names an ``alias`` is the same memory as that input. A target without
  aliasing may copy, the values are the same.
* No pool ever holds NaN or infinity: NaN is stored as 0, values beyond the pool's type saturate. Otherwise a freed
  block would reach its next owner as ``0 * NaN``. Pools are zeroed once, when they are allocated.
* Quantised keys and values have one fp16 scale per token and KV head, from that token's own values alone. With ``x``
  clipped to +-65504, all in fp32: ``scale = fp16(max(amax(x) / q, 2**-14))``, then ``x / scale`` is rounded half to
  even and saturates at ``+-q``, which is 127 (int8) or 448 (e4m3). The division uses the scale as stored, and the floor
  is a normal fp16 number, so that small rows lose nothing. A row of zeros stores zeros, and so does negative zero.
* A query at position ``p`` of sequence ``b`` attends to positions ``0..p`` of block table row ``b``; of the deferred
  pair, those from the sequence's first row of the step on are that row's and its successors' new keys and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from trtcb.spec import KVDtype

DOMAIN: Final = "trtcb"
VERSION: Final = 1

KVFormat = Literal["int8", "e4m3"]
KV_FORMATS: Final[Mapping[KVDtype, KVFormat]] = MappingProxyType({KVDtype.INT8: "int8", KVDtype.FP8: "e4m3"})
"""Value of the ``kv_format`` attribute. Both formats are raw bytes in pools of element type INT8."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output. ``kind`` is what decides its element type.

    ``compute`` is the graph's float type, ``pool`` the KV cache's (INT8 when quantised), ``scale`` fp16. An output's
    ``alias`` names the input it updates in place.
    """

    name: str
    kind: Literal["compute", "pool", "scale", "int32"]
    shape: tuple[str, ...]
    alias: str | None = None


@dataclass(frozen=True, slots=True)
class Attribute:
    """A required attribute; none has a default, because TensorRT plugins know none."""

    name: str
    kind: Literal["int", "float", "str"]


@dataclass(frozen=True, slots=True)
class OpSchema:
    """The fixed signature of an operator: names and order of everything that goes in and comes out."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...] = ()

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return tuple(tensor.name for tensor in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in order."""
        return tuple(tensor.name for tensor in self.outputs)

    @property
    def attribute_names(self) -> tuple[str, ...]:
        """Names of the attributes, in order."""
        return tuple(attribute.name for attribute in self.attributes)


_FRESH = (Tensor("k", "compute", ("T", "HK", "D")), Tensor("v", "compute", ("T", "HK", "D")))
_QUERY = Tensor("q", "compute", ("T", "H", "D"))
_POOLS = (Tensor("k_pool", "pool", ("SLOTS", "HK", "D")), Tensor("v_pool", "pool", ("SLOTS", "HK", "D")))
_SCALE_POOLS = (Tensor("k_scale_pool", "scale", ("SLOTS", "HK")), Tensor("v_scale_pool", "scale", ("SLOTS", "HK")))
_SLOTS = Tensor("slot_mapping", "int32", ("T",))
_RAGGED = (
    Tensor("block_tables", "int32", ("B", "MB")),  # rows padded with any valid block
    Tensor("positions", "int32", ("T",)),  # of each token in its sequence
    Tensor("cu_q", "int32", ("B+1",)),  # sequence b has the rows cu_q[b]:cu_q[b+1]
    Tensor("token_sequence", "int32", ("T",)),  # the b of each token
    Tensor("q_range", "int32", ("S",)),  # 0, 1, .. S-1: its length carries S, which launch dimensions need
)
_CONTEXT = Tensor("context", "compute", ("T", "H", "D"))
BLOCK_SIZE: Final = Attribute("block_size", "int")
SCALE: Final = Attribute("scale", "float")  # factor of q . k
_FORMAT = Attribute("kv_format", "str")


def _updated(pools: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(Tensor(f"{pool.name}_out", pool.kind, pool.shape, alias=pool.name) for pool in pools)


KV_CACHE_WRITE: Final = OpSchema("KVCacheWrite", (*_FRESH, *_POOLS, _SLOTS), _updated(_POOLS))
PAGED_ATTENTION: Final = OpSchema(
    "PagedAttention", (_QUERY, *_POOLS, *_RAGGED), (_CONTEXT,), attributes=(BLOCK_SIZE, SCALE)
)
QUANT_KV_CACHE_WRITE: Final = OpSchema(
    "QuantKVCacheWrite",
    (*_FRESH, *_POOLS, *_SCALE_POOLS, _SLOTS),
    _updated((*_POOLS, *_SCALE_POOLS)),
    attributes=(_FORMAT,),
)
QUANT_PAGED_ATTENTION: Final = OpSchema(
    "QuantPagedAttention",
    (_QUERY, *_POOLS, *_SCALE_POOLS, *_RAGGED),
    (_CONTEXT,),
    attributes=(BLOCK_SIZE, SCALE, _FORMAT),
)

# The deferred pair, for runtimes without plugins: what a step adds to the pools is an output, and pools are only read.
_NEW = (Tensor("k_new", "pool", ("T", "HK", "D")), Tensor("v_new", "pool", ("T", "HK", "D")))
_NEW_SCALES = (Tensor("k_scale_new", "scale", ("T", "HK")), Tensor("v_scale_new", "scale", ("T", "HK")))
FRESH_KV: Final = OpSchema("FreshKV", _FRESH, _NEW)
FRESH_ATTENTION: Final = OpSchema(
    "FreshPagedAttention", (_QUERY, *_NEW, *_POOLS, *_RAGGED), (_CONTEXT,), attributes=(BLOCK_SIZE, SCALE)
)
QUANT_FRESH_KV: Final = OpSchema("QuantFreshKV", _FRESH, (*_NEW, *_NEW_SCALES), attributes=(_FORMAT,))
QUANT_FRESH_ATTENTION: Final = OpSchema(
    "QuantFreshPagedAttention",
    (_QUERY, *_NEW, *_NEW_SCALES, *_POOLS, *_SCALE_POOLS, *_RAGGED),
    (_CONTEXT,),
    attributes=(BLOCK_SIZE, SCALE, _FORMAT),
)

OPS: Final[Mapping[str, OpSchema]] = MappingProxyType(
    {
        op.name: op
        for op in (
            *(KV_CACHE_WRITE, PAGED_ATTENTION, QUANT_KV_CACHE_WRITE, QUANT_PAGED_ATTENTION),
            *(FRESH_KV, FRESH_ATTENTION, QUANT_FRESH_KV, QUANT_FRESH_ATTENTION),
        )
    }
)
"""All operators by name. Quantised ones are apart because a plugin has one signature and no optional inputs."""


def write_op(kv_dtype: KVDtype) -> OpSchema:
    """Return the operator that stores a step's keys and values in pools of ``kv_dtype``."""
    return QUANT_KV_CACHE_WRITE if kv_dtype.is_quantized else KV_CACHE_WRITE


def attention_op(kv_dtype: KVDtype) -> OpSchema:
    """Return the operator that attends over pools of ``kv_dtype``."""
    return QUANT_PAGED_ATTENTION if kv_dtype.is_quantized else PAGED_ATTENTION


def fresh_op(kv_dtype: KVDtype) -> OpSchema:
    """Return the operator that encodes a step's keys and values for pools of ``kv_dtype``, and stores nothing."""
    return QUANT_FRESH_KV if kv_dtype.is_quantized else FRESH_KV


def fresh_attention_op(kv_dtype: KVDtype) -> OpSchema:
    """Return the operator that attends over pools of ``kv_dtype`` and to what this step will add to them."""
    return QUANT_FRESH_ATTENTION if kv_dtype.is_quantized else FRESH_ATTENTION
