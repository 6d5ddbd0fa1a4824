"""A Hugging Face model folder as a :class:`Checkpoint`: ``config.json`` and one or several mapped safetensors files."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy.typing as npt

from trtcb.builder.checkpoint import check_tensors, files_digest, llama_tensors
from trtcb.builder.hf_config import read_json, spec_from_config
from trtcb.builder.safetensors_file import DTYPES, SafetensorsFile
from trtcb.builder.tokenizer_assets import folder_assets
from trtcb.errors import PlanError, UsageError
from trtcb.tokenizer import TokenizerAssets

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Old Llama checkpoints store the rotary frequencies, which the configuration already determines.
_REDUNDANT = ("rotary_emb.inv_freq",)


class HfCheckpoint:
    """A :class:`Checkpoint` over a folder. Tensors are views of the mapped files, in the dtype they are stored in.

    Raises :class:`PlanError` for malformed or incomplete files and :class:`UsageError` for a model that is no plain
    Llama.
    """

    def __init__(self, folder: Path, *, name: str | None = None, source: str | None = None) -> None:
        self.folder = folder
        self.source = str(folder) if source is None else source
        self.notes: tuple[str, ...] = ()
        self.spec = spec_from_config(folder, folder.resolve().name if name is None else name)
        self._shapes = llama_tensors(self.spec)
        self._shards = [SafetensorsFile(path) for path in _shard_paths(folder)]
        self._owner: dict[str, SafetensorsFile] = {}
        for shard in self._shards:
            for tensor in shard.entries:
                if tensor in self._owner:
                    raise PlanError(
                        f"{shard.path} repeats the tensor {tensor!r} of another shard: fetch the model again."
                    )
                self._owner[tensor] = shard
        found = {tensor: shard.entries[tensor].shape for tensor, shard in self._owner.items()}
        tied_copy = ("lm_head.weight",) if self.spec.tie_embeddings else ()
        check_tensors(str(folder), found, self._shapes, ignored=(*_REDUNDANT, *tied_copy))

    @property
    def weight_dtype(self) -> str:
        """Dtype of the embedding, which stands for the others: ``fp32``, ``fp16`` or ``bf16``."""
        name = "model.embed_tokens.weight"
        stored = self._owner[name].entries[name].dtype
        if stored not in DTYPES:
            raise UsageError(f"{self.folder}: weights are stored as {stored}; choose a model in F32, F16 or BF16.")
        return DTYPES[stored][0]

    @cached_property
    def digest(self) -> str:
        """See :func:`files_digest`; covers ``config.json`` and every shard."""
        config = self.folder / "config.json"
        headers = {shard.path: shard.header_bytes for shard in self._shards}
        return files_digest([config, *headers], {config: config.stat().st_size, **headers})

    @cached_property
    def assets(self) -> TokenizerAssets:
        """The folder's tokenizer; raises :class:`trtcb.errors.ModelNotFoundError` if it has no ``tokenizer.json``."""
        return folder_assets(self.folder, self.spec)

    def tensor_names(self) -> Iterable[str]:
        """Names in model order."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a read-only view in the stored dtype."""
        self.shape(name)
        return self._owner[name].array(name)


def _shard_paths(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise UsageError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}: convert the model to safetensors, or give a .gguf file."
        )
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise PlanError(f"{folder / _INDEX} has no usable weight_map: fetch the model again.")
    paths = [folder / name for name in sorted(set(weight_map.values()))]
    for path in paths:
        if path.parent != folder or path.name in ("", ".", ".."):
            raise PlanError(
                f"{folder / _INDEX} names a file outside its folder ({path}): fetch the model from its publisher."
            )
        if not path.is_file():
            raise PlanError(f"{folder} lacks the shard {path.name}: the download is incomplete, fetch the model again.")
    return paths
