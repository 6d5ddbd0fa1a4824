"""The ``cpu`` compiler: lowers the ONNX graph to a call list and lays the weights out for the portable engine."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from trtcb.builder.checkpoint import Int4Checkpoint
from trtcb.builder.compiler import Compiled, CompileOptions
from trtcb.builder.export import build_graph
from trtcb.builder.lower import Piece, WeightRecipe, lower
from trtcb.builder.report import OnProgress, OnStage, ignore_progress, ignore_stage
from trtcb.errors import UsageError
from trtcb.plan_writer import Section, TensorSource, numpy_dtype
from trtcb.plugins.cpu import grouped, quantized
from trtcb.spec import WeightDtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trtcb.builder.checkpoint import Checkpoint
    from trtcb.plugins.cpu.grouped import Int4Weight

_ROPE_TABLES = ("rope_cos", "rope_sin")


class CpuCompiler:
    """Compiles for any CPU: weights stay row-major ``[N, K]``; the runtime, which knows its processor, packs them."""

    target = "cpu"

    def compile(
        self,
        checkpoint: Checkpoint,
        options: CompileOptions,
        on_stage: OnStage = ignore_stage,
        on_progress: OnProgress = ignore_progress,
    ) -> Compiled:
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
            notes=_notes(checkpoint, lowered.weights),
        )

    def prepare(self, checkpoint: Checkpoint, options: CompileOptions, on_progress: Callable[[str], None]) -> None:
        """Compile the kernels of this shape into the user's cache."""
        from trtcb.plugins.cpu.isa import multiplies_bf16_pairs
        from trtcb.plugins.cpu.kernels import KernelConfig, load_kernels
        from trtcb.plugins.cpu.linear import compile_linear, compile_pack
        from trtcb.plugins.cpu.logits import LogitEditor
        from trtcb.plugins.cpu.quantizer import compile_quantizer
        from trtcb.plugins.cpu.sampling import Sampler
        from trtcb.plugins.cpu.step import compile_step

        spec, weights = checkpoint.spec, options.weight_dtype
        rows: Literal["bf16"] | None = "bf16" if weights is WeightDtype.BF16 and multiplies_bf16_pairs() else None
        activation, block_size = rows or "fp32", options.limits.block_size
        config = KernelConfig.of(spec, options.kv_dtype, activation, block_size, fp32_results=True)
        load_kernels(config, on_progress=on_progress)
        compile_pack(on_progress)
        rounded, head = weights.quantized_rows, weights.head_dtype
        compile_linear(spec.vocab_size, spec.hidden_size, head.value, rows=rows, on_progress=on_progress)
        if head.quantized_rows is not None:
            compile_quantizer(spec.hidden_size, head.quantized_rows, on_progress=on_progress)
        for width, depth in spec.layer_shapes:
            compile_linear(width, depth, weights.value, rows=rows, on_progress=on_progress)
            if rounded is not None:
                compile_quantizer(depth, rounded, on_progress=on_progress)
        compile_step(on_progress)
        Sampler(spec.vocab_size, on_progress=on_progress)
        LogitEditor(spec.vocab_size, on_progress=on_progress)


def _notes(checkpoint: Checkpoint, recipes: Sequence[WeightRecipe]) -> tuple[str, ...]:
    """Tell whether weights were rounded to 4 bits that had more."""
    parts = [part for recipe in recipes if recipe.piece == "int4.codes" for part in recipe.parts]
    num_rounded = sum(not (isinstance(checkpoint, Int4Checkpoint) and checkpoint.is_int4(part)) for part in parts)
    if not num_rounded:
        return ()
    return (
        f"{num_rounded} of {len(parts)} matrices are not stored in blocks of 4 bits (GGUF's Q4_0 or Q4_1) and were "
        "rounded, by which small models lose much: measure it with --eval, or use --weight-dtype int8.",
    )


class _WeightLoader:
    """Materialises one tensor of the plan at a time, so that a build never holds more than its largest one."""

    def __init__(self, checkpoint: Checkpoint, max_positions: int) -> None:
        self._checkpoint = checkpoint
        self._max_positions = max_positions
        self._rounded: tuple[tuple[str, ...], dict[Piece, npt.NDArray[Any]]] | None = None

    def shape(self, recipe: WeightRecipe) -> tuple[int, ...]:
        """Shape of a tensor of the plan."""
        if recipe.parts[0] in _ROPE_TABLES:
            return (self._max_positions, self._checkpoint.spec.head_dim // 2)
        shapes = [self._checkpoint.shape(part) for part in recipe.parts]
        num_rows = sum(shape[0] for shape in shapes)
        return recipe.shape((num_rows, *shapes[0][1:]))

    def __call__(self, recipe: WeightRecipe) -> npt.NDArray[Any]:
        if recipe.parts[0] in _ROPE_TABLES:
            return self._checkpoint.spec.rope_tables(self._max_positions)[_ROPE_TABLES.index(recipe.parts[0])]
        if recipe.piece != "whole":
            return self._pieces(recipe)[recipe.piece]
        out = np.empty(self.shape(recipe), numpy_dtype(recipe.dtype))
        row = 0
        for part in recipe.parts:
            tensor = self._checkpoint.tensor(part)
            out[row : row + len(tensor)] = tensor  # rounds to nearest even while it copies
            row += len(tensor)
        return out

    def _pieces(self, recipe: WeightRecipe) -> dict[Piece, npt.NDArray[Any]]:
        """The tensors of quantised weights. In a plan one follows the other, so the last ones are kept."""
        if self._rounded is None or self._rounded[0] != recipe.parts:
            pieces = self._int4 if recipe.piece.startswith("int4") else self._int8
            self._rounded = (recipe.parts, pieces(recipe.parts))
        return self._rounded[1]

    def _int8(self, parts: tuple[str, ...]) -> dict[Piece, npt.NDArray[Any]]:
        rounded = [self._int8_part(part) for part in parts]
        codes, scales = (np.concatenate(arrays) for arrays in zip(*rounded, strict=True))
        return {"int8.codes": codes, "int8.scale": scales}

    def _int8_part(self, part: str) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
        """Codes and scales of a matrix; raises ``UsageError`` where it has no finite ones."""
        with np.errstate(over="ignore", invalid="ignore"):  # it is told below
            codes, scale = quantized.quantize(quantized.rotate(self._checkpoint.tensor(part)))
        if not np.isfinite(scale).all():
            raise UsageError(
                f"{part} has weights that are not finite numbers, or too large for int8: fetch the model again."
            )
        return codes, scale

    def _int4(self, parts: tuple[str, ...]) -> dict[Piece, npt.NDArray[Any]]:
        weights = [self._int4_part(part) for part in parts]
        return {
            "int4.codes": np.concatenate([weight.codes for weight in weights]),
            "int4.scale": np.concatenate([weight.scale for weight in weights]),
            "int4.zero": np.concatenate([weight.zero for weight in weights]),
        }

    def _int4_part(self, part: str) -> Int4Weight:
        """A matrix as the checkpoint stores it, or else rounded; raises ``UsageError`` where fp16 scales do not do."""
        checkpoint = self._checkpoint
        if isinstance(checkpoint, Int4Checkpoint) and checkpoint.is_int4(part):
            weight = checkpoint.int4(part)
        else:
            weight = grouped.quantize(checkpoint.tensor(part))
        if not (np.isfinite(weight.scale).all() and np.isfinite(weight.zero).all()):
            raise UsageError(
                f"{part} has numbers that the fp16 scales of int4 weights cannot hold: use --weight-dtype bf16."
            )
        return weight
