"""Takes the plugins through what TensorRT's builder does with them, over its real Python bindings. Prints JSON.

TensorRT itself is not there: the bindings are linked against libraries of empty functions, and dimensions are ours,
with values. What the bindings' own template classes ask of a plugin is asked in the order of the builder.
"""

import json
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tensorrt_bindings


def name_bindings() -> None:
    """Make ``import tensorrt`` mean the bindings, as NVIDIA's own package does."""
    tensorrt = types.ModuleType("tensorrt")
    names = (name for name in dir(tensorrt_bindings) if name[:2] != "__")
    tensorrt.__dict__.update({name: getattr(tensorrt_bindings, name) for name in names})
    tensorrt.__path__ = [os.fspath(Path(tensorrt_bindings.__file__).parent)]
    tensorrt.__version__ = tensorrt_bindings.__version__
    sys.modules["tensorrt"] = tensorrt


name_bindings()

# ruff: noqa: E402
import tensorrt as trt
from tensorrt.plugin import _lib, _plugin_class, _tensor

from tests.conformance.plugin_sizes import MB, SLOTS, B, S, T
from trtcb.plugins.nvidia import plugin
from trtcb.plugins.nvidia.shape import PagedShape
from trtcb.plugins.schema import KV_FORMATS, attention_op, write_op
from trtcb.spec import KVDtype


class Dimension(trt.IDimensionExpr):
    """A dimension that knows its value. Made without a constructor, which the class does not have."""

    @staticmethod
    def of(value: int) -> "Dimension":
        dimension = Dimension.__new__(Dimension)
        dimension.value = value
        return dimension

    def is_constant(self) -> bool:
        return True

    def get_constant_value(self) -> int:
        return self.value


class Expressions:
    """TensorRT's expression builder."""

    def constant(self, value: int) -> Dimension:
        return Dimension.of(value)

    def operation(self, kind, a: Dimension, b: Dimension) -> Dimension:
        meaning = {"SUM": int.__add__, "SUB": int.__sub__, "PROD": int.__mul__, "CEIL_DIV": lambda x, y: -(-x // y)}
        return Dimension.of(meaning[kind.name](a.value, b.value))


def replace_native_containers() -> None:
    """C++ containers of expressions become Python's."""
    _plugin_class.trt = SimpleNamespace(**{name: getattr(trt, name) for name in dir(trt) if name[:2] != "__"})
    _plugin_class.trt.DimsExprs = lambda size: [None] * size
    _plugin_class.Shape = lambda described: _tensor.Shape(tuple(described.desc.dims))
    _tensor.SymInt32.__call__ = lambda symbol: symbol._expr


def lived(op, shape: PagedShape, dtype: str, attributes: dict, tactic: int) -> dict:
    """One plugin's life."""
    sizes = {"T": T, "S": S, "B": B, "B+1": B + 1, "MB": MB, "SLOTS": SLOTS}
    sizes |= {"H": shape.num_heads, "HK": shape.num_kv_heads, "D": shape.head_dim}
    kinds = {"compute": dtype, "pool": shape.kv_dtype.value, "scale": "fp16", "int32": "int32"}
    named = {"fp16": trt.float16, "bf16": trt.bfloat16, "int8": trt.int8, "fp8": trt.int8, "int32": trt.int32}
    dims = [[Dimension.of(sizes[letter]) for letter in tensor.shape] for tensor in op.inputs]
    inputs = [named[kinds[tensor.kind]] for tensor in op.inputs]

    definition = _lib.QDP_REGISTRY[f"trtcb::{op.name}"]
    instance = _plugin_class._TemplateAOTPlugin(op.name, "trtcb", definition.num_outputs)
    instance.init(
        definition.register_func,
        attributes,
        definition.aot_impl_attr_names,
        definition.aot_impl_func,
        definition.autotune_attr_names,
        definition.autotune_func,
    )
    outputs = instance.get_output_data_types(inputs, [len(d) for d in dims])
    out_dims = [
        list(map(expression.__getitem__, range(len(expression))))
        for expression in instance.get_output_shapes(dims, [], Expressions())
    ]
    described = [
        SimpleNamespace(
            desc=SimpleNamespace(type=kind, format=trt.TensorFormat.LINEAR, scale=1.0, dims=[d.value for d in shape_]),
            min=None,
            max=None,
            opt=None,
        )
        for kind, shape_ in zip([*inputs, *outputs], [*dims, *out_dims], strict=True)
    ]
    supported = instance.get_supported_format_combinations(described, len(inputs))
    instance.configure_plugin(described[: len(inputs)], described[len(inputs) :])
    tactics = list(instance.get_valid_tactics())
    instance.set_tactic(tactic)
    launch, scalars = SimpleNamespace(), type("Scalars", (dict,), {})()
    instance.get_launch_params(dims, described, len(inputs), launch, scalars, Expressions())
    name, code = instance.get_kernel(
        [d.desc for d in described[: len(inputs)]], [d.desc for d in described[len(inputs) :]]
    )
    text = code.decode() if isinstance(code, bytes) else code
    return {
        "outputs": [kind.name for kind in outputs],
        "out_shapes": [[d.value for d in shape_] for shape_ in out_dims],
        "aliases": [instance.get_aliased_input(i) for i in range(len(outputs))],
        "supported": [combination.type.name for combination in supported],
        "tactics": tactics,
        "grid": [value(launch.grid_x), value(launch.grid_y), value(launch.grid_z)],
        "block": value(launch.block_x),
        "scalars": [value(scalars[i]) for i in range(len(scalars))],
        "is_in_ptx": f".entry {name.decode() if isinstance(name, bytes) else name}(" in text,
    }


def value(expression) -> int:
    while not isinstance(expression, int):
        expression = getattr(expression, "value", None) if hasattr(expression, "value") else expression._expr
    return expression


def main() -> None:
    """Run the case of the JSON argument: ``[dtype, kv_dtype, H, HK, D, capability]``."""
    dtype, kv, heads, kv_heads, dim, capability = json.loads(sys.argv[1])
    replace_native_containers()
    shape = PagedShape(heads, kv_heads, dim, 32, KVDtype(kv), scale=dim**-0.5)
    plugin.register(shape, dtype, capability, lazy=True)
    write, attend = write_op(shape.kv_dtype), attention_op(shape.kv_dtype)
    formats = {"kv_format": KV_FORMATS[shape.kv_dtype]} if shape.kv_dtype.is_quantized else {}
    attributes = {"block_size": 32, "scale": float(np.float32(dim**-0.5)), **formats}  # ONNX keeps floats in fp32
    result = {"write": lived(write, shape, dtype, formats, 0)}
    result |= {f"attend{tactic}": lived(attend, shape, dtype, attributes, tactic) for tactic in plugin.TACTICS}
    for name, wrong in {"block_size": 16, "scale": 1.0}.items():
        try:
            lived(attend, shape, dtype, {**attributes, name: wrong}, 1)
        except Exception as error:
            result[f"wrong {name}"] = str(error)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
