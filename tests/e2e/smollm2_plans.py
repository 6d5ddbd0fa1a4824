"""Plans of the real model, built once per test session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trtcb.builder.build import build
from trtcb.config import BuildConfig

BuildPlan = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def smollm2_plan(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildPlan:
    """``smollm2_plan(weight_dtype, kv_dtype)`` -> path of the plan; wide enough to read every logit of a prefill."""
    folder = tmp_path_factory.mktemp("plans")

    def plan(weight_dtype: str, kv_dtype: str) -> Path:
        path = folder / f"{weight_dtype}-{kv_dtype}.plan"
        if not path.exists():
            build(
                BuildConfig(
                    model=str(smollm2_gguf),
                    weight_dtype=weight_dtype,
                    kv_dtype=kv_dtype,
                    output=path,
                    max_batch_size=512,
                    max_num_tokens=512,
                )
            )
        return path

    return plan
