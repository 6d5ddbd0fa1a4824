"""Writing a graph with its weights to disk: ``x.onnx`` and ``x.onnx.data`` beside it."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import StringStringEntryProto, TensorProto

from trtcb.atomic_file import check_replaceable
from trtcb.errors import PlanError, UsageError

if TYPE_CHECKING:
    from trtcb.builder.checkpoint import Checkpoint

_CHUNK_BYTES = 32 << 20  # converted at a time, so that a large embedding is never held twice
_NUMPY_TYPES: dict[str, npt.DTypeLike] = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
_ELEMENT_TYPES = {"fp32": TensorProto.FLOAT, "bf16": TensorProto.BFLOAT16, "fp16": TensorProto.FLOAT16}
_TABLES = ("rope_cos", "rope_sin")
_DTYPES = {element: dtype for dtype, element in _ELEMENT_TYPES.items()}


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """An initialiser that lives in the data file at byte ``offset``; ``dtype`` is ``fp32``, ``bf16`` or ``fp16``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the data file."""
        return math.prod(self.shape) * np.dtype(_NUMPY_TYPES[self.dtype]).itemsize

    def to_proto(self, location: str) -> TensorProto:
        """Return the initialiser as a reference into the file ``location``."""
        place = {"location": location, "offset": str(self.offset), "length": str(self.num_bytes)}
        return TensorProto(
            name=self.name,
            data_type=_ELEMENT_TYPES[self.dtype],
            dims=self.shape,
            data_location=TensorProto.EXTERNAL,
            external_data=[StringStringEntryProto(key=key, value=value) for key, value in place.items()],
        )


def external_tensors(model: onnx.ModelProto) -> tuple[ExternalTensor, ...]:
    """Return the initialisers of ``model`` that live outside it, in order of offset."""
    tensors = []
    for proto in model.graph.initializer:
        if proto.data_location == TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in proto.external_data}
            dtype, shape = _DTYPES[proto.data_type], tuple(proto.dims)
            tensors.append(ExternalTensor(proto.name, dtype, shape, int(place["offset"])))
    return tuple(sorted(tensors, key=lambda tensor: tensor.offset))


def write_onnx(
    model: onnx.ModelProto,
    checkpoint: "Checkpoint",
    path: str | os.PathLike[str],
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write ``model`` to ``path`` and its weights to ``path`` + ``.data``, one tensor in memory at a time.

    Weights are converted to the graph's type; the rotary tables come from the checkpoint's spec. ``on_bytes`` hears of
    every piece written; the pieces add up to the ``num_bytes`` of :func:`external_tensors`. Both files appear complete
    or not at all, whatever interrupts; files of these names are replaced. ``model`` is left as it is. Raises
    :class:`~trtcb.errors.PlanError` if the checkpoint does not fit the graph, :class:`~trtcb.errors.UsageError` if the
    files cannot be written.
    """
    path = Path(path)
    data_path = path.with_name(f"{path.name}.data")
    tensors = external_tensors(model)
    _check_fit(tensors, checkpoint)
    try:
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: create the directory {path.parent} first")
        check_replaceable(path)
        check_replaceable(data_path)
        with _staged(data_path) as data_part, _staged(path) as model_part:
            with _synced(data_part) as file:
                for tensor in tensors:
                    _write_tensor(file, tensor, checkpoint, on_bytes)
            with _synced(model_part) as file:
                file.write(_relocated(model, data_path.name).SerializeToString())
            path.unlink(missing_ok=True)  # at no moment does an old graph stand beside new weights
            data_part.replace(data_path)
            model_part.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise UsageError(f"writing {path} failed: {error}; make room or choose another place") from error


def _relocated(model: onnx.ModelProto, location: str) -> onnx.ModelProto:
    """Copy ``model`` with its weights in the file ``location``."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for proto in copy.graph.initializer:
        for entry in proto.external_data:
            if entry.key == "location":
                entry.value = location
    return copy


def _check_fit(tensors: tuple[ExternalTensor, ...], checkpoint: "Checkpoint") -> None:
    names = set(checkpoint.tensor_names())
    for tensor in tensors:
        if tensor.name in _TABLES:
            continue
        if tensor.name not in names:
            raise PlanError(f"{checkpoint.source} has no tensor {tensor.name}; it is not a checkpoint of this model")
        shape = tuple(checkpoint.shape(tensor.name))
        if shape != tensor.shape:
            raise PlanError(
                f"{tensor.name} of {checkpoint.source} has shape {list(shape)}, the model's configuration says "
                f"{list(tensor.shape)}; use the configuration the checkpoint came with"
            )


def _load(tensor: ExternalTensor, checkpoint: "Checkpoint") -> npt.NDArray[Any]:
    if tensor.name in _TABLES:
        return checkpoint.spec.rope_tables(tensor.shape[0])[_TABLES.index(tensor.name)]
    return checkpoint.tensor(tensor.name)


def _write_tensor(
    file: BinaryIO, tensor: ExternalTensor, checkpoint: "Checkpoint", on_bytes: Callable[[int], None] | None
) -> None:
    # A function of its own, so that nothing holds this tensor while the next one is loaded.
    file.seek(tensor.offset)
    for chunk in _chunks(tensor, _load(tensor, checkpoint)):
        file.write(chunk.data)
        if on_bytes is not None:
            on_bytes(chunk.nbytes)


def _chunks(tensor: ExternalTensor, values: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of ``values`` in the type of ``tensor``, piece by piece."""
    flat = values.reshape(-1)
    dtype = np.dtype(_NUMPY_TYPES[tensor.dtype])
    step = _CHUNK_BYTES // dtype.itemsize
    for start in range(0, flat.size, step):
        piece = flat[start : start + step]
        with np.errstate(over="ignore"):
            converted = np.ascontiguousarray(piece, dtype=dtype)
        if tensor.dtype == "fp16" and np.isinf(converted).any():
            raise PlanError(f"{tensor.name} holds numbers beyond fp16; export with dtype bf16 or fp32")
        yield converted.view(np.uint8)


@contextlib.contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """Lend a temporary name beside ``path``, removed on the way out if it is still there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; it is on the disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
