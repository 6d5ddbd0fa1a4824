"""Numpy arrays as torch tensors, bf16 ones too."""

import ml_dtypes
import numpy as np
import torch


def to_torch(array: np.ndarray) -> torch.Tensor:
    """Share memory with ``array``."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
