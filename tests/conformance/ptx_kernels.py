"""Compiles kernels to PTX in a process of its own, as Triton either interprets or compiles. Prints JSON lines."""

import dataclasses
import json
import sys

from trtcb.plugins.nvidia.aot import compile_attention, compile_write
from trtcb.plugins.nvidia.shape import DECODE, MIXED, PagedShape
from trtcb.spec import KVDtype


def main() -> None:
    """Compile what the JSON argument asks for: ``[[capability, dtype, kv_dtype, H, HK, D], ...]``."""
    for capability, dtype, kv, heads, kv_heads, dim in json.loads(sys.argv[1]):
        shape = PagedShape(heads, kv_heads, dim, 32, KVDtype(kv), scale=dim**-0.5)
        kernels = {
            "write": compile_write(shape, dtype, capability),
            "decode": compile_attention(shape, dtype, capability, DECODE),
            "mixed": compile_attention(shape, dtype, capability, MIXED),
        }
        print(json.dumps({name: dataclasses.asdict(kernel) for name, kernel in kernels.items()}), flush=True)


if __name__ == "__main__":
    main()
