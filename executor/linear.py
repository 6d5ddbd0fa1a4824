"""Prepacked linear layers on the CPU: torch's oneDNN GEMMs.

Unpacked bf16 weights stream at a third of the memory bandwidth in single-row products, hence the packing. The two
operators are the ones ``torch.compile`` itself uses; they are semi-private, so torch is pinned and they are probed
once.

oneDNN is kept from the matrix unit (AMX): it takes that for some row counts only, and cuts the depth differently from
count to count, so a bf16 row's sums would depend on how many others there are (measured).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

_WIDEST_ISA = "AVX512_CORE_FP16"  # of those without the matrix unit, in oneDNN's order

Linear = Callable[["torch.Tensor"], "torch.Tensor"]
"""``x [M, K] -> x @ weight.T [M, N]`` in the dtype of ``x``."""


def padded_rows(num_rows: int) -> int:
    """Rows a GEMM really runs for ``num_rows`` wanted ones.

    oneDNN compiles a kernel for each new row count (0.5 ms each), so the counts are rounded up to a few dozen. One row
    becomes two: oneDNN sums a single fp32 row in another order than all others (measured; two and more agree to the
    bit, in bf16 every count does), and a row's result must not depend on how many others there are.
    """
    if num_rows <= 8:
        return max(2, num_rows)
    step = 8 if num_rows <= 64 else 16 if num_rows <= 256 else 32
    return -(-num_rows // step) * step


def as_tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
    """View ``array`` as a tensor without a copy, bfloat16 as bfloat16. The array may be read-only."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def pack_linear(weight: torch.Tensor) -> Linear:
    """Reorder ``weight [N, K]`` for this processor and return its product; ``weight`` may be dropped afterwards.

    A process that had torch multiply before keeps the instructions that oneDNN chose then.
    """
    import torch

    if not _has_packed_ops(weight.dtype):
        kept = weight.clone()
        return lambda x: torch.ops.aten.linear.default(x, kept)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, None, "none", [], "")  # type: ignore[no-any-return, unused-ignore]


@cache  # one answer, and one warning, for all matrices
def _has_packed_ops(dtype: torch.dtype) -> bool:
    import torch

    from trtcb.plugins.cpu.isa import has_feature

    if has_feature("amx-bf16"):
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _WIDEST_ISA)  # it is read when oneDNN is first used
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        warnings.warn(
            "oneDNN multiplies bf16 only with AVX-512 or AVX-NE-CONVERT, which this processor has not, so products of "
            "many rows take several times as long: use --cpu-engine auto, or build with --weight-dtype fp32",
            stacklevel=2,
        )
        return False
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return True
    warnings.warn(
        "this torch has no prepacked oneDNN linears, products may take three times as long: pip install torch==2.13.0",
        stacklevel=2,
    )
    return False
