"""The ``cpu`` compiler: lowers the ONNX graph to a call list and lays the weights out for the portable engine."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trtcb.builder.compiler import Compiled, CompileOptions
from trtcb.builder.export import build_graph
from trtcb.builder.lower import WeightRecipe, lower
from trtcb.plan_writer import Section, TensorSource, numpy_dtype
from trtcb.plugins.cpu.quantized import quantize, rotate
from trtcb.spec import WeightDtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from trtcb.builder.checkpoint import Checkpoint

_ROPE_TABLES = ("rope_cos", "rope_sin")


class CpuCompiler:
    """Compiles for any CPU: weights stay row-major ``[N, K]``; the runtime, which knows its processor, packs them."""

    target = "cpu"

    def compile(self, checkpoint: Checkpoint, options: CompileOptions) -> Compiled:
        """Export the graph, lower it, and describe the sections; see :class:`~trtcb.builder.compiler.Compiler`."""
        limits = options.limits
        graph = build_graph(
            checkpoint.spec,
            dtype=options.weight_dtype.table_dtype,
            kv_dtype=options.kv_dtype,
            block_size=limits.block_size,
            max_positions=limits.max_seq_len,
        )
        lowered = lower(graph, checkpoint.spec, options.weight_dtype)
        load = _WeightLoader(checkpoint, limits.max_seq_len)
        return Compiled(
            fingerprint={},
            sections=(
                Section.of_bytes("graph", graph.SerializeToString()),
                Section.of_json("program", lowered.program.to_json()),
            ),
            tensors=tuple(
                TensorSource(recipe.name, recipe.dtype, load.shape(recipe), partial(load, recipe))
                for recipe in lowered.weights
            ),
            versions={"onnx": version("onnx")},
        )

    def prepare(self, checkpoint: Checkpoint, options: CompileOptions, on_progress: Callable[[str], None]) -> None:
        """Compile the kernels of this shape into the user's cache."""
        from trtcb.plugins.cpu.isa import default_engine
        from trtcb.plugins.cpu.kernels import KernelConfig, load_kernels
        from trtcb.plugins.cpu.linear import compile_linear, compile_pack
        from trtcb.plugins.cpu.logits import LogitEditor
        from trtcb.plugins.cpu.quantizer import compile_quantizer
        from trtcb.plugins.cpu.sampling import Sampler
        from trtcb.plugins.cpu.step import compile_step

        spec, weights = checkpoint.spec, options.weight_dtype
        own_products = default_engine(weights.value) == "whole_step"
        activation = "fp32" if own_products else weights.activation_dtype
        config = KernelConfig.of(spec, options.kv_dtype, activation, options.limits.block_size)
        load_kernels(config, on_progress=on_progress)
        compile_pack(on_progress)
        compile_linear(spec.vocab_size, spec.hidden_size, weights.value, on_progress=on_progress)
        if own_products or weights is WeightDtype.INT8:
            for width, depth in spec.layer_shapes:
                compile_linear(width, depth, weights.value, on_progress=on_progress)
                if weights is WeightDtype.INT8:
                    compile_quantizer(depth, on_progress=on_progress)
        if own_products:
            compile_step(on_progress)
        Sampler(spec.vocab_size, on_progress=on_progress)
        LogitEditor(spec.vocab_size, on_progress=on_progress)


class _WeightLoader:
    """Materialises one tensor of the plan at a time, so that a build never holds more than its largest one."""

    def __init__(self, checkpoint: Checkpoint, max_positions: int) -> None:
        self._checkpoint = checkpoint
        self._max_positions = max_positions
        self._rounded: tuple[tuple[str, ...], npt.NDArray[np.int8], npt.NDArray[np.float32]] | None = None

    def shape(self, recipe: WeightRecipe) -> tuple[int, ...]:
        """Shape of a tensor of the plan."""
        if recipe.parts[0] in _ROPE_TABLES:
            return (self._max_positions, self._checkpoint.spec.head_dim // 2)
        shapes = [self._checkpoint.shape(part) for part in recipe.parts]
        num_rows = sum(shape[0] for shape in shapes)
        return (num_rows,) if recipe.is_scale else (num_rows, *shapes[0][1:])

    def __call__(self, recipe: WeightRecipe) -> npt.NDArray[Any]:
        if recipe.parts[0] in _ROPE_TABLES:
            return self._checkpoint.spec.rope_tables(self._max_positions)[_ROPE_TABLES.index(recipe.parts[0])]
        if recipe.dtype == "int8" or recipe.is_scale:
            _, codes, scales = self._int8(recipe.parts)
            return scales if recipe.is_scale else codes
        out = np.empty(self.shape(recipe), numpy_dtype(recipe.dtype))
        row = 0
        for part in recipe.parts:
            tensor = self._checkpoint.tensor(part)
            out[row : row + len(tensor)] = tensor  # rounds to nearest even while it copies
            row += len(tensor)
        return out

    def _int8(self, parts: tuple[str, ...]) -> tuple[tuple[str, ...], npt.NDArray[np.int8], npt.NDArray[np.float32]]:
        """Codes and scales of stacked parts. In a plan one follows the other, so the last ones are kept."""
        if self._rounded is None or self._rounded[0] != parts:
            rounded = [quantize(rotate(self._checkpoint.tensor(part))) for part in parts]
            codes, scales = (np.concatenate(arrays) for arrays in zip(*rounded, strict=True))
            self._rounded = (parts, codes, scales)
        return self._rounded
