"""The operators as TensorRT plugins whose kernels become part of the engine: serving it needs no Python callback.

TensorRT reads a plugin's arguments off the signatures of the functions that describe it (``tensorrt.plugin``). Here all
of them follow from the operator's schema, so a plugin cannot differ from the graph's operator of that name.

A process can register one shape: TensorRT keeps one plugin of a name. Needs TensorRT 10.8 or newer and Triton.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import GenericAlias
from typing import Any

import numpy as np
import tensorrt.plugin as trtp

from trtcb.errors import TargetUnavailableError
from trtcb.plugins.nvidia.aot import PtxKernel, compile_attention, compile_write
from trtcb.plugins.nvidia.shape import DECODE, MIXED, PagedShape
from trtcb.plugins.ports import GraphDtype
from trtcb.plugins.schema import BLOCK_SIZE, DOMAIN, KV_FORMATS, SCALE, OpSchema, attention_op, write_op

TACTICS = {1: DECODE, 2: MIXED}
"""Tiles by the number under which TensorRT tries them."""

Arguments = Mapping[str, Any]

_TYPES = {"fp32": "FP32", "bf16": "BF16", "fp16": "FP16", "int8": "INT8", "fp8": "INT8"}
_PYTHON_TYPES = {"int": int, "float": float, "str": str}


def register(shape: PagedShape, dtype: GraphDtype, capability: int, *, lazy: bool = False) -> None:
    """Register the write and the attention of one engine's graph, for a compute capability (times ten).

    ``lazy`` leaves the creators out of TensorRT's registry, where its ONNX parser looks for them.
    """
    for op in (write_op(shape.kv_dtype), attention_op(shape.kv_dtype)):
        _Plugin(op, shape, dtype, capability).register(lazy=lazy)


@dataclass(frozen=True)
class _Plugin:
    op: OpSchema
    shape: PagedShape
    dtype: GraphDtype
    capability: int

    def register(self, *, lazy: bool) -> None:
        name = f"{DOMAIN}::{self.op.name}"
        descriptors = (trtp.TensorDesc,) * len(self.op.outputs)
        described = descriptors[0] if len(descriptors) == 1 else GenericAlias(tuple, descriptors)
        outputs = {"outputs": GenericAlias(tuple, descriptors)}
        compiled = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]
        trtp.register(name, lazy_register=lazy)(self._signed(self.describe, {}, described))
        trtp.autotune(name)(self._signed(self.combinations, outputs, list[trtp.AutoTuneCombination]))
        trtp.aot_impl(name)(self._signed(self.compile, {**outputs, "tactic": int}, compiled))

    def _signed(self, method: Callable[[Arguments], Any], more: dict[str, Any], result: Any) -> Any:
        """Make a function of a method, with the signature that TensorRT looks at."""
        kinds: dict[str, Any] = dict.fromkeys(self.op.input_names, trtp.TensorDesc)
        kinds |= {attribute.name: _PYTHON_TYPES[attribute.kind] for attribute in self.op.attributes}
        kinds |= more
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in kinds.items()
        ]
        signature = inspect.Signature(parameters, return_annotation=result)

        def function(*positional: Any, **named: Any) -> Any:
            return method(signature.bind_partial(*positional, **named).arguments)

        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    def describe(self, arguments: Arguments) -> Any:
        """Outputs: pools are their inputs' memory, the context is like the queries."""
        outputs = tuple(
            arguments[output.alias].aliased() if output.alias else arguments["q"].like() for output in self.op.outputs
        )
        return outputs[0] if len(outputs) == 1 else outputs

    def combinations(self, arguments: Arguments) -> list[trtp.AutoTuneCombination]:
        """Types of all inputs and outputs, and the tactics to be tried."""
        types = {"compute": self.dtype, "pool": self.shape.kv_dtype.value, "scale": "fp16"}
        tensors = (*self.op.inputs, *self.op.outputs)
        names = ", ".join("INT32" if tensor.kind == "int32" else _TYPES[types[tensor.kind]] for tensor in tensors)
        return [trtp.AutoTuneCombination(names, "LINEAR", [] if self._is_write else list(TACTICS))]

    def compile(self, arguments: Arguments) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]:
        """The kernel and how it is launched, in terms of the inputs' dimensions."""
        self._check(arguments)
        shape = self.shape
        if self._is_write:
            kernel = compile_write(shape, self.dtype, self.capability)
            grid, scalars = (arguments["k"].shape_expr[0], shape.num_kv_heads, 1), []
        else:
            tile = TACTICS[arguments["tactic"]]
            kernel = compile_attention(shape, self.dtype, self.capability, tile)
            rows = arguments["q_range"].shape_expr[0] * (shape.num_heads // shape.num_kv_heads)
            grid = (trtp.cdiv(rows, tile.rows), shape.num_kv_heads, arguments["cu_q"].shape_expr[0] - 1)
            scalars = [arguments["block_tables"].shape_expr[1]]  # max_blocks
        return kernel.name, kernel.ptx, _launch(kernel, grid), _expressions(scalars)

    @property
    def _is_write(self) -> bool:
        return self.op == write_op(self.shape.kv_dtype)

    def _check(self, arguments: Arguments) -> None:
        """The parser hands attributes over by position: hold them against what the kernels are compiled for."""
        shape = self.shape
        known = {
            BLOCK_SIZE.name: shape.block_size,
            SCALE.name: shape.scale,
            "kv_format": KV_FORMATS.get(shape.kv_dtype),
        }
        for attribute in self.op.attributes:
            found, expected = arguments[attribute.name], known[attribute.name]
            if found != (np.float32(expected) if attribute.kind == "float" else expected):
                raise TargetUnavailableError(
                    f"the graph's {self.op.name} has {attribute.name}={found!r}, and the plugin is for {expected!r}: "
                    "build the plan again"
                )


def _launch(kernel: PtxKernel, grid: Sequence[Any]) -> trtp.KernelLaunchParams:
    launch = trtp.KernelLaunchParams()
    launch.grid_x, launch.grid_y, launch.grid_z = grid
    launch.block_x, launch.shared_mem = kernel.threads, kernel.shared_bytes
    return launch


def _expressions(values: Sequence[Any]) -> trtp.SymIntExprs:
    expressions = trtp.SymIntExprs(len(values))
    for index, value in enumerate(values):
        expressions[index] = value
    return expressions
