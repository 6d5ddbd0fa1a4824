"""Plans of the real model, built once per test session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trtcb.builder.build import build
from trtcb.config import BuildConfig

BuildPlan = Callable[[str, str], Path]


def skip_without_fast_bf16() -> None:
    """Skip a test that runs many bf16 steps where each takes several times as long."""
    import torch

    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("takes minutes on a processor without bf16 products in oneDNN (AVX-512)")


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
