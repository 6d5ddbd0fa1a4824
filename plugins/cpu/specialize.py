"""Compiles kernel sources for given constants, once per machine.

A kernel source (``kernel_*.py``) is an ordinary module with a block of constants. A specialisation is its text with
those constants replaced, written to the user's cache folder and imported from there, where numba keeps the machine code
beside it. The folder's name is a hash of everything the code depends on, so a stale entry is never read.

numba's cache files are pickles: whoever can write them can run code as the user. The folder must therefore belong to
the user alone, and it is never part of a plan.
"""

import hashlib
import importlib.util
import logging
import os
import platform
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite
import numba
from numba import cfunc, njit, types

from trtcb.cache import cache_root, make_cache_root
from trtcb.errors import TargetUnavailableError
from trtcb.plugins.cpu.isa import check_supported, isa_fingerprint
from trtcb.plugins.cpu.simd import JIT_OPTIONS

logger = logging.getLogger(__name__)

KERNEL_SIGNATURE = types.void(types.int64, types.int64, types.int64)
SOURCE_FOLDER = Path(__file__).parent

Progress = Callable[[str], None]


def cache_folder() -> Path:
    """Find or create the user's folder of compiled kernels, mode 0700.

    Raises ``TargetUnavailableError`` if it belongs to somebody else or others may write to it. Where it cannot be
    created or written to (a read-only home), a temporary folder serves this process alone.
    """
    folder = cache_root() / "kernels"
    try:
        make_cache_root()
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        logger.warning("Kernels are compiled anew at each start, because %s cannot be created: %s", folder, error)
        return Path(tempfile.mkdtemp(prefix="trtcb-kernels-"))
    for path in (folder.parent, folder):
        _check_private(path)
    if not os.access(folder, os.W_OK):
        logger.warning("Kernels are compiled anew at each start, because %s is read-only", folder)
        return Path(tempfile.mkdtemp(prefix="trtcb-kernels-"))
    return folder


def _check_private(path: Path) -> None:
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise TargetUnavailableError(
            f"The kernel cache {path} must be a folder of this user that nobody else can write to:"
            f" run `chmod go-w {path}`, or set XDG_CACHE_HOME to another folder."
        )


def specialize(source: str, constants: Mapping[str, object]) -> str:
    """Return the text of a kernel source with its constants replaced; ``KeyError`` for one the source does not have."""
    text = (SOURCE_FOLDER / f"{source}.py").read_text()
    for name, value in constants.items():
        text, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value!r}", text, count=1)
        if not count:
            raise KeyError(f"{source} has no constant {name}")
    return text


def _key(text: str) -> str:
    return hashlib.sha256(_surroundings() + text.encode()).hexdigest()[:20]


@cache  # an engine asks some hundred times
def _surroundings() -> bytes:
    """Digest of all that compiled code depends on beside its own source."""
    sources = [path.read_text() for path in sorted(SOURCE_FOLDER.glob("*.py"))]
    versions = [numba.__version__, llvmlite.__version__, platform.python_version()]
    return hashlib.sha256("\0".join([*sources, *versions, *isa_fingerprint().values()]).encode()).digest()


def load_module(source: str, constants: Mapping[str, object]) -> ModuleType:
    """Import a kernel source specialised for ``constants``; nothing is compiled yet."""
    check_supported()
    text = specialize(source, constants)
    name = f"trtcb_{source}_{_key(text)}"
    if name in sys.modules:
        return sys.modules[name]
    folder = cache_folder() / name
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_private(folder)
    path = folder / f"{source}.py"
    source_bytes = text.encode()
    if not path.is_file() or path.read_bytes() != source_bytes:  # numba discards its cache when this file changes
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(source_bytes)
        os.replace(file.name, path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetUnavailableError(f"The kernel source {path} cannot be imported; delete the folder {folder}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _cache_beside_source() -> Iterator[None]:
    """Keep numba's files in the folder that was checked, whatever NUMBA_CACHE_DIR says."""
    config: Any = numba.config
    saved, config.CACHE_DIR = config.CACHE_DIR, ""
    try:
        yield
    finally:
        config.CACHE_DIR = saved


def _compile(module: ModuleType, build: Callable[[], Any]) -> Any:
    """Compile or load from the cache; a damaged cache is deleted and rebuilt."""
    with _cache_beside_source():
        try:
            return build()
        except Exception as error:  # unpickling a damaged file can raise anything
            compiled = Path(str(module.__file__)).parent / "__pycache__"
            if not compiled.is_dir():
                raise
            logger.warning("Rebuilding the kernel cache %s: %s", compiled, error)
            for path in compiled.iterdir():  # the folder stays: other processes may be writing to it
                with suppress(OSError):
                    path.unlink()
            return build()


def compile_kernels(
    source: str, constants: Mapping[str, object], on_progress: Progress | None = None
) -> dict[str, Any]:
    """Return the kernels of a source by name: objects with an ``address``, to be kept as long as that is in use.

    ``on_progress`` gets each kernel's name before it is compiled (or loaded, in a few milliseconds). A process loads
    each once: a model has a product of the same shape in every layer, and numba never lets go of machine code.
    """
    module = load_module(source, constants)
    kernels = _loaded(module)
    for function in module.KERNELS:
        if on_progress is not None:
            on_progress(function.__name__)
        if function.__name__ not in kernels:
            decorate = cfunc(KERNEL_SIGNATURE, cache=True, **JIT_OPTIONS)
            kernels[function.__name__] = _compile(module, partial(decorate, function))
    return kernels


def compile_launcher() -> Callable[..., None]:
    """``launch(kernel_address, parts, *12 ints)``, see ``kernel_launch.py``."""
    module = load_module("kernel_launch", {})
    loaded = _loaded(module)
    if "launch" not in loaded:
        decorate: Any = njit(types.void(*[types.int64] * 14), cache=True, **JIT_OPTIONS)
        loaded["launch"] = _compile(module, partial(decorate, module.launch))
    launcher: Callable[..., None] = loaded["launch"]
    return launcher


def _loaded(module: ModuleType) -> dict[str, Any]:
    """Machine code of a specialisation by function, which lives as long as its module: to the end of the process."""
    loaded: dict[str, Any] = module.__dict__.setdefault("__loaded__", {})
    return loaded
