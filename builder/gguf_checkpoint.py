"""A Llama in a GGUF file as a :class:`Checkpoint`: llama.cpp's names and row order turned into Hugging Face's."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trtcb.builder.checkpoint import check_tensors, files_digest, llama_tensors
from trtcb.builder.gguf import BLOCK_TYPES, GgufFile, GgufTensor
from trtcb.builder.gguf_spec import ROPE_FREQS, spec_from_gguf
from trtcb.builder.gguf_tokenizer import gguf_assets
from trtcb.errors import UsageError
from trtcb.plugins.cpu.grouped import CODE_BYTES, GROUP, Int4Weight
from trtcb.tokenizer import TokenizerAssets

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_DTYPE_NAMES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
# Dequantising makes several temporaries of the size of its output: 4M elements keep them near 50 MB.
_CHUNK_ELEMENTS = 1 << 22


class GgufCheckpoint:
    """A :class:`Checkpoint` over a mapped GGUF file; quantised tensors are dequantised to float32 when asked for.

    Raises :class:`PlanError` for a malformed file and :class:`UsageError` for a model that is no plain Llama.
    """

    def __init__(self, path: Path, *, name: str | None = None, source: str | None = None) -> None:
        self.path = path
        self.source = str(path) if source is None else source
        self.notes: tuple[str, ...] = ()
        self._file = GgufFile(path)
        self.spec = spec_from_gguf(self._file, path.stem if name is None else name)
        self._shapes = llama_tensors(self.spec)
        check_tensors(
            str(path),
            {name: tensor.shape for name, tensor in self._file.tensors.items()},
            {_gguf_name(name): shape for name, shape in self._shapes.items()},
            ignored=(ROPE_FREQS, ".attn_rot_embd.weight"),
        )
        for tensor in map(self._stored, self._shapes):
            if tensor.kind not in {kind for kind, _, _ in BLOCK_TYPES.values()}:
                known = ", ".join(kind for kind, _, _ in BLOCK_TYPES.values())
                raise UsageError(
                    f"{path}: tensor {tensor.name!r} is stored as {tensor.kind}; choose a file in one of {known}."
                )

    @property
    def weight_dtype(self) -> str:
        """Type of the largest share of the file: ``fp32``, ``fp16``, ``bf16`` or a quantised type such as ``q4_1``."""
        sizes: dict[str, int] = {}
        for name in self._shapes:
            tensor = self._stored(name)
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + int(np.prod(tensor.shape))
        kind = max(sizes, key=lambda kind: sizes[kind])
        return _DTYPE_NAMES.get(kind, kind.lower())

    @cached_property
    def digest(self) -> str:
        """See :func:`files_digest`."""
        return files_digest([self.path], {self.path: self._file.header_bytes})

    @cached_property
    def assets(self) -> TokenizerAssets:
        """The tokenizer of the file's metadata."""
        return gguf_assets(self._file, self.spec)

    def tensor_names(self) -> Iterable[str]:
        """Hugging Face names in model order."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Float32 values in Hugging Face's row order; a view of the file if it is stored so."""
        shape = self.shape(name)
        kind, blocks = self._stored(name).kind, self._rows(name)
        if kind == "F32":
            return blocks.view(np.float32).reshape(shape)
        return _dequantize(blocks, kind, shape)

    def is_int4(self, name: str) -> bool:
        """Whether a tensor is stored as Q4_0 or Q4_1."""
        return self._stored(name).kind in ("Q4_0", "Q4_1")

    def int4(self, name: str) -> Int4Weight:
        """One such tensor: codes and scales of its blocks. A zero of Q4_0, whose codes are centred, is -8 scales."""
        num_rows, depth = self.shape(name)
        blocks = self._rows(name).reshape(num_rows, depth // GROUP, -1)
        factors = np.ascontiguousarray(blocks[..., :-CODE_BYTES]).view("<f2")
        scale = factors[..., 0]
        with np.errstate(over="ignore"):  # a zero that is not finite is the caller's to refuse
            zero = -8 * scale if self._stored(name).kind == "Q4_0" else factors[..., 1]
        return Int4Weight(blocks[..., -CODE_BYTES:].reshape(num_rows, -1), scale, zero)

    def _rows(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor's rows, in Hugging Face's order."""
        blocks = self._file.blocks(self._stored(name))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            return blocks[_half_split_rows(len(blocks), self.spec.head_dim)]
        return blocks

    def _stored(self, name: str) -> GgufTensor:
        return self._file.tensors[_gguf_name(name)]


def _gguf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def _half_split_rows(num_rows: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Return the stored row of each row. llama.cpp rotates rows (2i, 2i + 1), Hugging Face (i, i + head_dim / 2)."""
    rows = np.arange(num_rows).reshape(-1, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _dequantize(blocks: npt.NDArray[np.uint8], kind: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    import gguf  # a quarter of a second to import, and listing models never dequantises

    result = np.empty((blocks.shape[0], shape[-1]), dtype=np.float32)
    rows = max(1, _CHUNK_ELEMENTS // shape[-1])
    for start in range(0, blocks.shape[0], rows):
        chunk = gguf.dequantize(np.ascontiguousarray(blocks[start : start + rows]), gguf.GGMLQuantizationType[kind])
        result[start : start + rows] = chunk.reshape(-1, shape[-1])
    return result.reshape(shape)
