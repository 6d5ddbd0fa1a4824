import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from tests.unit.hf_folder import write_folder
from tests.unit.tiny_gguf import SPEC, random_tensors, write_tiny
from trtcb.builder.gguf_checkpoint import GgufCheckpoint
from trtcb.builder.hf import HfCheckpoint
from trtcb.builder.hub import cached_snapshot, is_hub_id
from trtcb.builder.preset_files import local_path, pull
from trtcb.builder.presets import load_preset, preset_names
from trtcb.builder.random_weights import RandomCheckpoint
from trtcb.builder.sources import resolve
from trtcb.errors import ModelNotFoundError, PlanError, UsageError


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_files_and_folders_are_told_apart(tmp_path):
    write_tiny(tmp_path / "a.gguf")
    write_tiny(tmp_path / "no-suffix")
    write_folder(tmp_path / "folder", random_tensors(SPEC))
    assert isinstance(resolve("a.gguf"), GgufCheckpoint)
    assert isinstance(resolve("no-suffix"), GgufCheckpoint)
    assert isinstance(resolve(str(tmp_path / "folder")), HfCheckpoint)
    assert resolve("folder/").spec.name == "folder"
    assert resolve("a.gguf").source == "a.gguf"


def test_a_stray_folder_does_not_hide_a_preset_but_a_model_does(tmp_path):
    (tmp_path / "tiny-random").mkdir()
    assert isinstance(resolve("tiny-random"), RandomCheckpoint)
    write_folder(tmp_path / "tiny-random", random_tensors(SPEC))
    assert isinstance(resolve("tiny-random"), HfCheckpoint)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_builds_with_random_weights(name):
    checkpoint = resolve(name, random_weights=True, seed=7)
    assert checkpoint.spec == load_preset(name).spec
    assert "seed 7" in checkpoint.source
    assert checkpoint.notes


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("llama-2-7", "Did you mean 'llama-2-7b'"),
        ("SmolLM2-135M", "Did you mean 'smollm2-135m'"),
        ("gpt2", "preset"),
        ("./models/a.gguf", "'./models/a.gguf'"),
        ("folder/b.gguf", "Did you mean 'c.gguf'"),
        ("fodler", "hub id"),
        ("/nowhere/at/all", "'/nowhere/at/all'"),
        ("folder", "no config.json: give the file itself, such as"),
        ("empty", "no config.json: give a Hugging Face model folder"),
        ("owner/name", "owner/name is not in the local cache"),
        ("owner/name/part", "'owner/name/part'"),
        ("a\0b", "check --model|no model"),
        ("x" * 5000, "check --model"),
        ("~no-such-user/x", "check --model"),
        ("", "empty"),
    ],
)
def test_what_is_not_there_is_named_with_a_fix(tmp_path, source, fix):
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "c.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=fix) as caught:
        resolve(source)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("name", "fix"), [("model.safetensors", "its folder"), ("x.plan", "trtcb serve")])
def test_other_files_say_what_to_give_instead(tmp_path, name, fix):
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(UsageError, match=fix):
        resolve(name)


def test_a_file_that_is_no_gguf_is_a_plan_error(tmp_path):
    (tmp_path / "a.gguf").write_text("hello")
    with pytest.raises(PlanError, match="magic number"):
        resolve("a.gguf")


def test_a_preset_whose_file_is_another_model_is_refused(tmp_path, monkeypatch):
    path = write_tiny(tmp_path / "a.gguf")
    monkeypatch.setattr("trtcb.builder.sources.pull", lambda *_, **__: path)
    with pytest.raises(PlanError, match="not the model that the preset smollm2-135m describes"):
        resolve("smollm2-135m")


def test_random_weights_take_presets_only():
    with pytest.raises(ModelNotFoundError, match="Did you mean 'tiny-random'"):
        resolve("tiny-randon", random_weights=True)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a/b", True),
        ("a.b-c/d_e", True),
        ("a", False),
        ("a/b/c", False),
        ("../b", False),
        ("-a/b", False),
        ("a/", False),
    ],
)
def test_hub_ids(source, expected):
    assert is_hub_id(source) == expected


def http_error(name):
    """One of the hub's own errors, as it raises them."""
    from huggingface_hub import errors
    from huggingface_hub.errors import HfHubHTTPError

    kind = getattr(errors, name)
    response = types.SimpleNamespace(headers={}, request=None, status_code=404)
    return kind("it says nothing of use", response=response) if issubclass(kind, HfHubHTTPError) else kind("x")


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("GatedRepoError", "accept them on its hub page"),
        ("RepositoryNotFoundError", "check the spelling"),
        ("RevisionNotFoundError", "no revision 'v9'"),
        ("LocalEntryNotFoundError", "connect to the network"),
        ("OfflineModeIsEnabled", "connect to the network"),
    ],
)
def test_the_hubs_errors_are_reworded(monkeypatch, error, fix):
    import huggingface_hub

    def fail(*_, **__):
        raise http_error(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match=fix) as caught:
        resolve("owner/name", revision="v9")
    assert "owner/name" in str(caught.value)


def test_a_hub_model_in_the_cache_needs_no_network(tmp_path):
    folder = tmp_path / "hub" / "models--owner--name"
    commit = "a" * 40
    (folder / "snapshots").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    snapshot = write_folder(folder / "snapshots" / commit, random_tensors(SPEC))
    assert cached_snapshot("owner/name") == snapshot
    assert cached_snapshot("owner/other") is None
    import huggingface_hub

    original = huggingface_hub.snapshot_download

    def from_cache(hub_id, **options):
        return original(hub_id, cache_dir=tmp_path / "hub", local_files_only=True, **options)

    huggingface_hub.snapshot_download = from_cache
    try:
        checkpoint = resolve("owner/name")
    finally:
        huggingface_hub.snapshot_download = original
    assert (checkpoint.spec.name, checkpoint.source) == ("name", "owner/name")
    np.testing.assert_array_equal(checkpoint.tensor("model.norm.weight"), random_tensors(SPEC)["model.norm.weight"])


def test_presets_without_files_say_so():
    with pytest.raises(UsageError, match="random weights"):
        pull(load_preset("tiny-random"))
    assert local_path(load_preset("tiny-random")) is None
    assert local_path(load_preset("smollm2-135m")) is None


def test_opening_a_source_imports_no_framework(tmp_path):
    path = write_tiny(tmp_path / "a.gguf")
    code = f"import sys; from trtcb.builder.sources import resolve; resolve('{path}').assets; print(*sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert not {"torch", "transformers", "onnx", "numba", "gguf"} & set(done.stdout.split())
