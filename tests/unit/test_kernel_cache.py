"""Specialised kernel sources and the folder they are compiled in."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trtcb.cache import make_cache_root
from trtcb.errors import TargetUnavailableError, UsageError
from trtcb.plugins.cpu import isa
from trtcb.plugins.cpu import specialize as specialize_module
from trtcb.plugins.cpu.kernels import KernelConfig
from trtcb.plugins.cpu.simd import jit
from trtcb.plugins.cpu.specialize import cache_folder, compile_kernels, compile_launcher, load_module, specialize
from trtcb.spec import KVDtype

PLAN = {"TOKENS_PER_ITEM": 48}  # the smallest kernel source


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in sys.modules if name.startswith("trtcb_kernel_plan")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "cache"


def test_specialising_replaces_constants_and_nothing_else():
    text = specialize("kernel_plan", PLAN)
    assert "TOKENS_PER_ITEM = 48\n" in text
    assert text.count("\n") == specialize("kernel_plan", {}).count("\n")
    with pytest.raises(KeyError, match="NO_SUCH"):
        specialize("kernel_plan", {"NO_SUCH": 1})


def test_the_folder_is_private(private_cache):
    folder = cache_folder()
    assert folder == private_cache / "trtcb" / "kernels"
    for path in (folder, folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_whoever_makes_the_cache_first_under_a_common_umask_makes_it_private(private_cache):
    before = os.umask(0o002)
    try:
        make_cache_root()
        (private_cache / "trtcb").chmod(0o775)  # as an earlier version left it
        folder = cache_folder()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.parent.stat().st_mode) & 0o022 == 0


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_others_can_write_to_is_refused(mode):
    cache_folder().chmod(mode)
    with pytest.raises(TargetUnavailableError, match="chmod go-w"):
        load_module("kernel_plan", PLAN)


def test_a_link_in_place_of_the_folder_is_refused(private_cache, tmp_path):
    (private_cache / "trtcb").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (private_cache / "trtcb" / "kernels").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TargetUnavailableError):
        cache_folder()


def test_a_folder_of_somebody_else_is_refused(monkeypatch):
    cache_folder()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(TargetUnavailableError):
        cache_folder()


def test_where_no_folder_can_be_made_a_temporary_one_serves(private_cache, caplog):
    private_cache.write_text("a file is in the way")
    folder = cache_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "compiled anew" in caplog.text
    folder.rmdir()


def test_a_folder_that_cannot_be_written_to_is_left_alone(private_cache, caplog, monkeypatch):
    kept = cache_folder() / "kept"
    kept.write_text("compiled elsewhere")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    folder = cache_folder()
    assert folder != kept.parent
    assert kept.exists()
    assert "read-only" in caplog.text
    folder.rmdir()


def cache_files(module) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path(module.__file__).parent.rglob("*.nb?")}


def test_machine_code_is_kept_beside_the_source_and_used_again(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "ignored"))
    seen = []
    compile_kernels("kernel_plan", PLAN, seen.append)
    assert seen == ["plan_attention"]
    module = load_module("kernel_plan", PLAN)
    files = cache_files(module)
    assert len(files) == 2
    del sys.modules[module.__name__]
    compile_kernels("kernel_plan", PLAN)
    assert cache_files(module) == files
    assert not (tmp_path / "ignored").exists()


def test_a_process_loads_a_kernel_once():
    [first], [again] = (list(compile_kernels("kernel_plan", PLAN).values()) for _ in range(2))
    assert first is again
    [other] = compile_kernels("kernel_plan", {"TOKENS_PER_ITEM": 8}).values()
    assert other is not first
    assert compile_launcher() is compile_launcher()


def test_progress_names_a_kernel_that_is_loaded_already():
    seen = []
    for _ in range(2):
        compile_kernels("kernel_plan", PLAN, seen.append)
    assert seen == ["plan_attention"] * 2


def test_a_damaged_cache_is_rebuilt(caplog):
    compile_kernels("kernel_plan", PLAN)
    module = load_module("kernel_plan", PLAN)
    for path in cache_files(module):
        path.write_bytes(b"damage")
    del sys.modules[module.__name__]
    kernels = compile_kernels("kernel_plan", PLAN)
    assert kernels["plan_attention"].address
    assert "Rebuilding" in caplog.text


def test_a_damaged_source_is_written_anew():
    path = Path(load_module("kernel_plan", PLAN).__file__)
    source = path.read_bytes()
    path.write_bytes(b"\xff\x00 no text")
    del sys.modules[load_module("kernel_plan", PLAN).__name__]
    load_module("kernel_plan", PLAN)
    assert path.read_bytes() == source


def test_rebuilding_leaves_the_folder_to_processes_that_write_to_it():
    module = load_module("kernel_plan", PLAN)
    folder = Path(module.__file__).parent / "__pycache__"
    folder.mkdir(exist_ok=True)
    damaged = folder / "damaged.nbi"
    damaged.write_bytes(b"damage")

    def build():
        if damaged.exists():
            raise EOFError
        return folder.is_dir()

    assert specialize_module._compile(module, build)


def test_a_changed_source_in_the_cache_is_written_again():
    module = load_module("kernel_plan", PLAN)
    path = Path(module.__file__)
    text = path.read_text()
    path.write_text("raise SystemExit")
    del sys.modules[module.__name__]
    load_module("kernel_plan", PLAN)
    assert path.read_text() == text


def test_constants_have_folders_of_their_own():
    names = {load_module("kernel_plan", {"TOKENS_PER_ITEM": n}).__name__ for n in (8, 48)}
    assert len(names) == 2
    assert len(list(cache_folder().iterdir())) == 2


def test_the_fingerprint_names_this_cpu():
    fingerprint = isa.isa_fingerprint()
    assert set(fingerprint) == {"arch", "cpu", "features"}
    assert all(fingerprint.values())
    assert fingerprint == isa.isa_fingerprint()


def test_an_old_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(isa, "_target", lambda: ("x86_64-linux", "nehalem", "+sse4.2"))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(TargetUnavailableError, match="F16C"):
        isa.check_supported()


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 40},
        {"head_dim": 16},
        {"block_size": 16},
        {"num_heads": 8},
        {"hidden_size": 100},
        {"num_kv_heads": 0},
        {"activation": "fp16"},
    ],
    ids=str,
)
def test_shapes_that_cannot_be_compiled_are_refused(change):
    shape = {
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "block_size": 32,
        "kv_dtype": KVDtype.FP8,
        "activation": "bf16",
    }
    KernelConfig(**shape)
    with pytest.raises(UsageError):
        KernelConfig(**{**shape, **change})


SOURCES = sorted(path.stem for path in Path(isa.__file__).parent.glob("kernel_*.py"))


def test_importing_the_sources_compiles_nothing(private_cache):
    code = """
import importlib, sys
from numba.core.dispatcher import Dispatcher
for name in sys.argv[1:]:
    for value in vars(importlib.import_module(f"trtcb.plugins.cpu.{name}")).values():
        assert not (isinstance(value, Dispatcher) and value.signatures), value
"""
    done = subprocess.run([sys.executable, "-c", code, *SOURCES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kernel_attention" in SOURCES
    assert not private_cache.exists()


def test_a_shared_module_must_name_the_owner_of_what_it_makes():
    def made(x):
        return x

    for module, allowed in [("tile", False), ("kernel_attention", True)]:
        made.__module__ = f"trtcb.plugins.cpu.{module}"
        if allowed:
            jit(made)
        else:
            with pytest.raises(TypeError, match="jit_for"):
                jit(made)
