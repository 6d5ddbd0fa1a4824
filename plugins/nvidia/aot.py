"""The operators' kernels as PTX, compiled ahead of time: what a TensorRT plugin embeds into an engine.

Needs Triton, but neither a GPU nor the CUDA toolkit. TensorRT calls a plugin's kernel with its input pointers, int32
scalars and output pointers, and nothing else, so the two scratch pointers that Triton appends are taken off once it is
sure that nothing reads them. The PTX version is pinned, for older drivers to load the result.
"""

import re
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trtcb.errors import TargetUnavailableError
from trtcb.plugins.nvidia import attention, kv_write
from trtcb.plugins.nvidia.shape import PagedShape, Tile
from trtcb.plugins.ports import GraphDtype
from trtcb.plugins.schema import OpSchema, attention_op, write_op

SHARED_LIMIT = 48 << 10
"""Bytes of shared memory that a kernel may use without asking for more, which a plugin cannot."""

SCALARS = {"KVCacheWrite": (), "QuantKVCacheWrite": (), "PagedAttention": ("max_blocks",)}
SCALARS["QuantPagedAttention"] = SCALARS["PagedAttention"]
"""int32 arguments of each operator's kernel, between inputs and outputs."""

_POINTERS = {"fp32": "*fp32", "bf16": "*bf16", "fp16": "*fp16", "int8": "*i8", "fp8": "*i8"}
_KERNELS: dict[str, Any] = {
    "KVCacheWrite": kv_write.kv_cache_write,
    "QuantKVCacheWrite": kv_write.quant_kv_cache_write,
    "PagedAttention": attention.paged_attention,
    "QuantPagedAttention": attention.quant_paged_attention,
}
_STAGES = (3, 2, 1)  # the deepest pipeline that fits is taken


@dataclass(frozen=True, slots=True)
class PtxKernel:
    """A kernel's text and how to launch it. ``parameters`` has a letter each: ``p``, a pointer, or ``i``, an int32."""

    name: str
    ptx: str
    threads: int
    shared_bytes: int
    parameters: str


def compile_write(shape: PagedShape, dtype: GraphDtype, capability: int) -> PtxKernel:
    """Compile the write kernel for a compute capability (times ten): grid ``(T, HK)``."""
    return _compile(write_op(shape.kv_dtype), shape, dtype, shape.write_constants(), capability, num_warps=1, stages=1)


def compile_attention(shape: PagedShape, dtype: GraphDtype, capability: int, tile: Tile) -> PtxKernel:
    """Compile the attention kernel: grid ``(ceil(S * G / tile.rows), HK, B)``."""
    constants = shape.attend_constants(tile, capability)
    for stages in _STAGES:
        kernel = _compile(attention_op(shape.kv_dtype), shape, dtype, constants, capability, num_warps=4, stages=stages)
        if kernel.shared_bytes <= SHARED_LIMIT:
            return kernel
    raise TargetUnavailableError(
        f"attention over heads of {shape.head_dim} elements takes {kernel.shared_bytes} bytes of shared memory, and a "
        f"plugin's kernel may use {SHARED_LIMIT}: use --target cuda"
    )


def _compile(
    op: OpSchema,
    shape: PagedShape,
    dtype: GraphDtype,
    constants: dict[str, Any],
    capability: int,
    *,
    num_warps: int,
    stages: int,
) -> PtxKernel:
    function = _KERNELS[op.name]
    pointers = {"compute": _POINTERS[dtype], "pool": _POINTERS[shape.kv_dtype], "scale": "*fp16", "int32": "*i32"}
    signature = {tensor.name: pointers[tensor.kind] for tensor in op.inputs}
    signature |= dict.fromkeys(SCALARS[op.name], "i32")
    signature |= {tensor.name: pointers[tensor.kind] for tensor in op.outputs}
    names = [*signature, *constants]
    if names != [parameter.name for parameter in function.params]:
        raise TargetUnavailableError(
            f"the kernel of {op.name} does not take the operator's arguments: this is a fault of trtcb"
        )
    source = ASTSource(
        function,
        signature | dict.fromkeys(constants, "constexpr"),
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")},
    )
    options = {
        "num_warps": num_warps,
        "num_stages": stages,
        "ptx_version": _ptx_version(capability),
        "enable_fp_fusion": True,  # Triton's default changes in 3.10
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx, parameters = _without_scratch(compiled.asm["ptx"], len(signature))
    threads = re.search(r"\.(?:reqntid|maxntid) (\d+)", ptx)
    if threads is None:
        raise TargetUnavailableError(
            f"Triton {triton.__version__} does not say with how many threads {op.name} is launched"
        )
    return PtxKernel(compiled.metadata.name, ptx, int(threads[1]), compiled.metadata.shared, parameters)


def _ptx_version(capability: int) -> int:
    """The oldest PTX version (times ten) that has the processor, and conversions from e4m3."""
    return 81 if capability <= 90 else 87


def _without_scratch(ptx: str, num_parameters: int) -> tuple[str, str]:
    """PTX whose entry takes the first parameters only, and their letters."""
    entry = re.search(r"(\.visible \.entry [^(]+\()(.*?)(\)\s*\n)", ptx, re.S)
    if entry is None:
        raise TargetUnavailableError(f"Triton {triton.__version__} wrote PTX without an entry")
    parameters = [parameter.strip() for parameter in entry[2].split(",")]
    body = ptx[entry.end() :]
    for hidden in parameters[num_parameters:]:
        if re.search(rf"\b{re.escape(hidden.split()[-1])}\b", body):
            raise TargetUnavailableError("the kernel needs scratch memory, which a plugin cannot give it")
    kept = parameters[:num_parameters]
    letters = "".join("p" if ".u64" in parameter else "i" if ".u32" in parameter else "?" for parameter in kept)
    return f"{ptx[: entry.start()]}{entry[1]}\n\t{(',' + chr(10) + chr(9)).join(kept)}\n{entry[3]}{body}", letters
