import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from trtcb.builder.presets import preset_names
from trtcb.cli.models import app
from trtcb.errors import ModelNotFoundError, UsageError

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def _empty_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_the_table_has_every_preset():
    result = RUNNER.invoke(app, [], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["name", "params", "hub", "id", "local"]
    assert [line.split()[0] for line in lines[1:]] == list(preset_names())
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert rows["llama-2-7b"] == ["6.7B", "meta-llama/Llama-2-7b-hf", "not", "fetched"]
    assert rows["smollm2-135m"] == ["134.5M", "HuggingFaceTB/SmolLM2-135M-Instruct", "not", "fetched"]
    assert rows["tiny-random"][1:] == ["-", "generated"]


@pytest.mark.parametrize(
    ("arguments", "error", "fix"),
    [
        (["path", "smollm2-135m"], ModelNotFoundError, "trtcb models pull smollm2-135m"),
        (["path", "tiny-random"], UsageError, "random weights"),
        (["pull", "tiny-random"], UsageError, "random weights"),
        (["path", "smollm2"], ModelNotFoundError, "Did you mean 'smollm2-135m'"),
        (["pull", "llama2-7b"], ModelNotFoundError, "Did you mean 'llama-2-7b'"),
    ],
)
def test_what_cannot_be_done_is_an_error_with_a_fix(arguments, error, fix):
    result = RUNNER.invoke(app, arguments)
    assert isinstance(result.exception, error)
    assert fix in str(result.exception)
    assert result.stdout == ""


@pytest.mark.model
def test_pull_and_path_print_just_the_path(smollm2_gguf, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(smollm2_gguf.parents[3]))
    for command in ("pull", "path"):
        result = RUNNER.invoke(app, [command, "smollm2-135m"])
        assert result.stdout == f"{smollm2_gguf}\n"


def test_listing_models_imports_nothing_heavy_and_is_quick(tmp_path):
    code = (
        "import sys; from trtcb.cli.models import app; app([], standalone_mode=False); print('loaded:', *sys.modules)"
    )
    runs = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        runs.append(time.perf_counter() - start)
    loaded = set(done.stdout.split("loaded:")[1].split())
    assert not {"torch", "onnx", "numba", "transformers", "gguf", "tokenizers", "jinja2", "ml_dtypes"} & loaded
    assert min(runs) < 2.0  # 0.3 s on an idle core
