"""Fixtures of the conformance suite."""

from collections.abc import Callable

import pytest

from trtcb.plugins.cpu import threads
from trtcb.plugins.cpu.kernels import CpuKernels, KernelConfig, load_kernels


@pytest.fixture(scope="session")
def kernels() -> Callable[[KernelConfig], CpuKernels]:
    """Compiled kernels by configuration, each loaded once per session."""
    layer = threads.configure()
    loaded: dict[KernelConfig, CpuKernels] = {}

    def load(config: KernelConfig) -> CpuKernels:
        if config not in loaded:
            loaded[config] = load_kernels(config, num_threads=layer.num_threads)
        return loaded[config]

    return load
