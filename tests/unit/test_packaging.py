"""Rules about the tree itself: what is packaged, who may import whom, and what the light commands must not load."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
HEAVY = ("torch", "onnx", "numba", "transformers", "onnxruntime", "triton", "tensorrt")

# Who may import whom; each may also import itself. "contract" is what lies directly in trtcb/.
MAY_IMPORT = {
    "contract": set(),
    "configs": set(),
    "plugins": {"contract"},
    "builder": {"contract", "plugins"},
    "executor": {"contract", "plugins"},
    "server": {"contract", "executor"},
    "bench": {"contract", "executor"},
    "evaluation": {"contract", "builder", "executor"},
    "cli": {"contract", "plugins", "builder", "executor", "server", "bench", "evaluation"},
}
# Entry points that hand over to a layer above, by imports inside functions.
EXCEPTIONS = {
    "trtcb": {"executor"},
    "trtcb.__main__": {"cli"},
    "trtcb.config": {"executor", "server"},
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package with its real path."""
    folders = {"trtcb": "trtcb", **SETUPTOOLS["package-dir"]}
    for package in SETUPTOOLS["packages"]:
        owner = max((p for p in folders if package == p or package.startswith(f"{p}.")), key=len)
        folder = ROOT / folders[owner] / package.removeprefix(owner).lstrip(".").replace(".", "/")
        for file in sorted(folder.glob("*.py")):
            yield (package if file.stem == "__init__" else f"{package}.{file.stem}"), file


def layer(module: str) -> str:
    part = module.split(".")[1] if "." in module else ""
    return part if part in MAY_IMPORT else "contract"


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            # `from trtcb import executor` names a package in its second part.
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "trtcb")


def violations(module: str, source: str) -> list[str]:
    allowed = MAY_IMPORT[layer(module)] | EXCEPTIONS.get(module, set()) | {layer(module)}
    found = []
    for name in imported(source):
        if name.startswith("."):
            found.append(f"{module} has a relative import of {name}")
        elif name.split(".")[0] == "trtcb" and layer(name) not in allowed:
            found.append(f"{module} imports {name}")
    return found


def test_every_package_folder_is_listed() -> None:
    folders = {"trtcb": "trtcb", **SETUPTOOLS["package-dir"]}
    found = set()
    for package, folder in folders.items():
        for current, _, files in os.walk(ROOT / folder):  # does not follow the symlinks
            if "__init__.py" in files:
                inner = Path(current).relative_to(ROOT / folder).as_posix().replace("/", ".")
                found.add(package if inner == "." else f"{package}.{inner}")
    assert found == set(SETUPTOOLS["packages"])


def test_every_top_folder_has_its_relative_link() -> None:
    for package, folder in SETUPTOOLS["package-dir"].items():
        if package != "trtcb":
            link = ROOT / "trtcb" / package.removeprefix("trtcb.")
            assert link.is_symlink(), link
            assert os.readlink(link) == f"../{folder}"


def test_every_file_with_code_is_in_a_package() -> None:
    listed = {path for _, path in modules()}
    folders = [ROOT / folder for folder in SETUPTOOLS["package-dir"].values()]
    there = {Path(c) / f for folder in folders for c, _, fs in os.walk(folder) for f in fs if f.endswith(".py")}
    assert there == listed


def test_presets_and_type_marker_are_found_as_package_data() -> None:
    for kind in ("models", "serve", "sim"):
        files = sorted(p.name for p in (ROOT / "configs" / kind).glob("*.yaml"))
        assert files
        assert sorted(p.name for p in (resources.files("trtcb.configs") / kind).iterdir()) == files
    assert (resources.files("trtcb") / "py.typed").is_file()


def test_every_data_file_is_declared_as_package_data() -> None:
    """What a wheel gets is what ``package-data`` matches."""
    patterns = SETUPTOOLS["package-data"]
    for package, folder in (("trtcb.configs", "configs"), ("trtcb.evaluation", "trtcb/evaluation")):
        root = ROOT / folder
        there = {path for path in root.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
        assert there
        assert there == {path for pattern in patterns[package] for path in root.glob(pattern) if path.is_file()}
    for name in ("eval.txt", "prompts.json"):
        assert (resources.files("trtcb.evaluation") / "data" / name).is_file()


@pytest.mark.slow
def test_a_wheel_holds_every_module_and_data_file(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(
        ".*", "*.egg-info", "__pycache__", "tests", "benchmarks", "docs", "engines", "build"
    )
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(tree)]
    subprocess.run(command, check=True, timeout=240)
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"trtcb/evaluation/data/eval.txt", "trtcb/evaluation/data/prompts.json", "trtcb/py.typed"} <= names
    assert {f"{module.replace('.', '/')}.py" for module, path in modules() if path.stem != "__init__"} <= names


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_follow_the_layers(module: str, path: Path) -> None:
    assert violations(module, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("trtcb.builder.x", "from trtcb.executor.engine import Engine"),
        ("trtcb.executor.x", "def f():\n    import trtcb.builder.build"),
        ("trtcb.plan", "from trtcb import plugins"),
        ("trtcb.plugins.x", "from trtcb.server.app import create_app"),
        ("trtcb.server.x", "from . import app"),
        ("trtcb.executor.x", "from trtcb.cli.main import main"),
    ],
)
def test_violations_are_seen(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


def test_every_command_exists() -> None:
    from trtcb.cli.main import COMMANDS

    for name, command in COMMANDS.items():
        module, _ = command.target.split(":")
        assert importlib.util.find_spec(module), name
        assert callable(command.load())


LIGHT = {
    "--help": ["--help"],
    "--version": ["--version"],
    "inspect": ["inspect", "PLAN"],
    "models": ["models"],
    **{
        f"{name} --help": [name, "--help"]
        for name in ("build", "serve", "generate", "chat", "export", "inspect", "eval", "bench")
    },
}


@pytest.mark.parametrize("name", LIGHT)
def test_light_commands_load_nothing_heavy(name: str, tmp_path: Path) -> None:
    plan = tmp_path / "x.plan"
    if "PLAN" in LIGHT[name]:
        _write_plan(plan)
    arguments = [str(plan) if a == "PLAN" else a for a in LIGHT[name]]
    code = (
        "import sys\nfrom trtcb.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    code = end.code\n"
        f"print('END', code, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1] == "END 0 []", result.stdout + result.stderr


def test_doctor_loads_no_more_than_what_knows_the_cpu() -> None:
    code = (
        "import sys\nfrom trtcb.cli.main import main\ntry:\n    main(['doctor'])\nexcept SystemExit:\n"
        f"    print('END', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "END ['numba']"


def _write_plan(path: Path) -> None:
    from trtcb.plan import PlanHeader, Section, write_plan
    from trtcb.program import Program
    from trtcb.spec import BuildLimits, KVDtype, ModelSpec

    model = ModelSpec("toy", 64, 128, 2, 4, 2, 16, 256, 512)
    header = PlanHeader("cpu", {}, model, "bf16", KVDtype.FP8, BuildLimits(), {}, {})
    write_plan(path, header, [Section.of_json("program", Program((), ()).to_json())], [])
