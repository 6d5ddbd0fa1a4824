"""Runs an exported step graph in onnxruntime on the CPU: the oracle for every other runtime."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.inliner
import onnxruntime
from onnx import TensorProto

from trtcb.builder.checkpoint import Checkpoint
from trtcb.builder.export import build_graph, write_onnx
from trtcb.evaluation.piece import Piece, pack
from trtcb.executor.runtime import Batch, Float32
from trtcb.spec import KVDtype

_POOL_TYPES = {
    "tensor(float)": (np.dtype(np.float32), TensorProto.FLOAT),
    "tensor(float16)": (np.dtype(np.float16), TensorProto.FLOAT16),
    "tensor(bfloat16)": (np.dtype(ml_dtypes.bfloat16), TensorProto.BFLOAT16),
    "tensor(int8)": (np.dtype(np.int8), TensorProto.INT8),
}
_ELEMENT_TYPES = dict(_POOL_TYPES.values())


class OrtRunner:
    """A session with its own zeroed KV pools, which every step updates in place.

    ``model`` is the path of an ONNX file or a serialised model. ``pools`` maps input names (``layers.0.k_pool``) to
    arrays ``[num_blocks * block_size, ...]`` that a test may read or preset between steps. Of a deferred graph, this
    stores what a step adds to them.
    """

    def __init__(self, model: str | PathLike[str] | bytes, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        source = model if isinstance(model, bytes) else str(model)
        self._session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        self.pools: dict[str, np.ndarray] = {}
        self._values: dict[str, onnxruntime.OrtValue] = {}
        for port in self._session.get_inputs():
            if port.type in _POOL_TYPES:
                dtype, element_type = _POOL_TYPES[port.type]
                # The OrtValue neither copies nor owns: `pools` keeps the memory alive.
                pool = np.zeros((num_blocks * block_size, *port.shape[1:]), dtype)
                self.pools[port.name] = pool
                self._values[port.name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(pool, element_type)
        self._inputs = {port.name for port in self._session.get_inputs()}
        self._new = [port.name for port in self._session.get_outputs() if port.name.endswith("_new")]

    def step(self, batch: Batch) -> Float32:
        """Run one step; logits ``[NL, vocab_size]``."""
        lengths = np.diff(batch.cu_q)
        values = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "slot_mapping": batch.slot_mapping,
            "token_sequence": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
            "cu_q": batch.cu_q,
            "block_tables": batch.block_tables,
            "q_range": np.arange(lengths.max(), dtype=np.int32),
            "logit_index": batch.logit_index,
        }
        inputs = {name: np.ascontiguousarray(array) for name, array in values.items()}  # alive until the run ends
        binding = self._session.io_binding()
        for name in self._inputs & inputs.keys():
            binding.bind_cpu_input(name, inputs[name])
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)
            if not self._new:
                binding.bind_ortvalue_output(f"{name}_out", value)
        new = {}
        for name in self._new:
            pool = self.pools[name.replace("_new", "_pool")]
            new[name] = np.empty((len(batch.positions), *pool.shape[1:]), pool.dtype)
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(new[name], _ELEMENT_TYPES[pool.dtype])
            binding.bind_ortvalue_output(name, value)
        binding.bind_output("logits", "cpu")
        self._session.run_with_iobinding(binding)
        for name, rows in new.items():
            self.pools[name.replace("_new", "_pool")][batch.slot_mapping] = rows
        return binding.get_outputs()[-1].numpy()


def export_runner(
    folder: Path,
    checkpoint: Checkpoint,
    kv_dtype: KVDtype,
    *,
    num_blocks: int,
    block_size: int,
    inlined: bool = False,
    deferred: bool = False,
) -> OrtRunner:
    """Export ``checkpoint`` in fp32 to ``folder`` and open it; its operators stay functions unless ``inlined``."""
    spec, path = checkpoint.spec, folder / f"{checkpoint.spec.name}.onnx"
    model = build_graph(
        spec,
        dtype="fp32",
        kv_dtype=kv_dtype,
        block_size=block_size,
        max_positions=min(spec.max_position, 1024),
        deferred=deferred,
    )
    write_onnx(model, checkpoint, path)
    if not inlined:
        return OrtRunner(path, num_blocks=num_blocks, block_size=block_size)
    flat = onnx.inliner.inline_local_functions(onnx.load(path))
    return OrtRunner(flat.SerializeToString(), num_blocks=num_blocks, block_size=block_size)


def run_packed(
    runner: OrtRunner,
    sequences: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    packing: Sequence[Sequence[int]],
) -> dict[tuple[int, int], Float32]:
    """Feed known ``sequences``; a step takes ``packing[step][row]`` tokens of sequence ``row``.

    Returns the logits of the last token of every piece, by (sequence, position).
    """
    done = [0] * len(sequences)
    found = {}
    for counts in packing:
        rows = [row for row, count in enumerate(counts) if count]
        pieces = [
            Piece(sequences[row][done[row] : done[row] + counts[row]], done[row], tables[row], "last") for row in rows
        ]
        logits = runner.step(pack(pieces, runner.block_size))
        for row, values in zip(rows, logits, strict=True):
            done[row] += counts[row]
            found[row, done[row] - 1] = values
    return found
