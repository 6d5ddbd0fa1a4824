"""What every model source offers the builder: a spec, lazily mapped tensors, and a tokenizer."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

from trtcb.errors import PlanError, UsageError
from trtcb.plugins.cpu.grouped import Int4Weight
from trtcb.spec import ModelSpec
from trtcb.tokenizer import TokenizerAssets

# Above this, hashing every byte would cost more than a build's other reading: about 4 s at 1 GB/s.
FULL_DIGEST_BYTES = 4 << 30


class Checkpoint(Protocol):
    """A model's weights and tokenizer. Opening one reads headers only; every error in them is raised by then.

    Weight matrices are ``[out, in]`` (``[N, K]``) in Hugging Face's row order, i.e. rotary pairs are (i, i + head_dim
    / 2).
    """

    @property
    def spec(self) -> ModelSpec:
        """Shape of the model."""

    @property
    def source(self) -> str:
        """What the user named: a path, a hub id or a preset."""

    @property
    def weight_dtype(self) -> str:
        """How most weights are stored: ``fp32``, ``fp16``, ``bf16``, or a GGUF type such as ``q4_1``."""

    @property
    def digest(self) -> str:
        """Identity of the content, ``method:hex``; see :func:`files_digest`. May read the whole file once."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences a user should see before building, such as a stand-in tokenizer."""

    @property
    def assets(self) -> TokenizerAssets:
        """The tokenizer; raises a :class:`trtcb.errors.TrtcbError` if the source has none that works."""

    def tensor_names(self) -> Iterable[str]:
        """Names in model order. A tied head is not among them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; ``KeyError`` for a foreign name."""

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """One tensor as float32, float16 or ``ml_dtypes.bfloat16``: a read-only view of the file, or else a new array.

        The caller drops it before asking for the next, so that only one large tensor is resident.
        """


@runtime_checkable
class Int4Checkpoint(Protocol):
    """A checkpoint that may hold matrices as ``int4`` weights, so that they need not be rounded again."""

    def is_int4(self, name: str) -> bool:
        """Whether a tensor is stored so."""

    def int4(self, name: str) -> Int4Weight:
        """One such tensor as it is stored, rows in the order of :meth:`Checkpoint.tensor`."""


def llama_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Llama of this spec, in model order."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (spec.q_size, hidden),
            f"{prefix}.self_attn.k_proj.weight": (spec.kv_size, hidden),
            f"{prefix}.self_attn.v_proj.weight": (spec.kv_size, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, spec.q_size),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def check_tensors(
    origin: str,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    ignored: Sequence[str] = (),
) -> None:
    """Compare a file's tensors with the model's, both under the file's names; ones ending in ``ignored`` may be extra.

    Raises :class:`PlanError` for a missing or misshapen tensor and :class:`UsageError` for one the model has no place
    for.
    """
    for name, shape in expected.items():
        if name not in found:
            raise PlanError(f"{origin} lacks the tensor {name!r}: it is incomplete, fetch it again.")
        if found[name] != shape:
            raise PlanError(
                f"{origin}: the tensor {name!r} has shape {list(found[name])} where the configuration says "
                f"{list(shape)}: fetch it again."
            )
    for name in found:
        if name not in expected and not name.endswith(tuple(ignored)):
            what = "biases are" if name.endswith(".bias") else "a plain Llama has no such tensor, this architecture is"
            raise UsageError(f"{origin} holds the tensor {name!r}: {what} not supported, choose a Llama-family model.")


def files_digest(paths: Sequence[Path], headers: Mapping[Path, int]) -> str:
    """Identity of a set of files, in the given order.

    ``sha256:`` covers every byte. When the files together exceed ``FULL_DIGEST_BYTES``, ``sha256-headers:`` covers
    each file's first ``headers[path]`` bytes (names, shapes and offsets of all tensors) and its size, so edited
    weights go unnoticed.
    """
    sizes = [path.stat().st_size for path in paths]
    full = sum(sizes) <= FULL_DIGEST_BYTES
    digest = hashlib.sha256()
    for path, size in zip(paths, sizes, strict=True):
        if len(paths) > 1 or not full:
            digest.update(f"{path.name} {size}\n".encode())
        remaining = size if full else headers[path]
        with path.open("rb") as file:
            while chunk := file.read(min(1 << 20, remaining)):
                digest.update(chunk)
                remaining -= len(chunk)
    return f"{'sha256' if full else 'sha256-headers'}:{digest.hexdigest()}"
