"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

from trtcb.builder.preset_files import pull
from trtcb.builder.presets import load_preset

# Triton kernels run in its interpreter, without a GPU; it is asked for where a kernel is defined, so before any import
os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["tests.e2e.smollm2_plans"]


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct, fetched once into the user's cache; offline, deselect ``-m 'not model'``."""
    return pull(load_preset("smollm2-135m"))
