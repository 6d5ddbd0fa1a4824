"""Checks the tests: breaks the scheduler and the block pool in one place at a time, and lists what no test notices.

    python tests/mutation/mutants.py --list          # the mutants, one a line
    python tests/mutation/mutants.py --jobs 2        # run the tests on each; prints those that survive
    python tests/mutation/mutants.py --quick         # unit tests alone
    python tests/mutation/mutants.py --only policies.py:120

A mutant flips one comparison or drops one term: of a sum, a difference, a conjunction or disjunction, a ``not``, an
augmented assignment or a call whose result is not used. Works on copies; the checkout is not touched.
"""

import argparse
import ast
import copy
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "executor/active_list.py",
    "executor/block_pool.py",
    "executor/chunking.py",
    "executor/policies.py",
    "executor/prefix_cache.py",
    "executor/scheduler.py",
    "executor/siblings.py",
    "executor/victims.py",
    "executor/waiting_list.py",
)
# Those that notice most, fastest first.
TESTS = (
    "tests/unit/test_scheduling_numbers.py",
    "tests/unit/test_capacity_policies.py",
    "tests/unit/test_block_pool.py",
    "tests/unit/test_active_list.py",
    "tests/unit/test_scheduler.py",
    "tests/unit/test_prefix_cache.py",
    "tests/unit/test_chunking.py",
    "tests/unit/test_policy_options.py",
    "tests/unit/test_siblings.py",
    "tests/unit/test_engine_core.py",
    "tests/unit/test_overlap.py",
    "tests/property/test_scheduler_machine.py",
    "tests/property/test_token_law.py",
)
TIMEOUT_S = 300  # a mutant may loop for ever, which counts as noticed
_FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken version of one file."""

    file: str
    line: int
    change: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"


def mutants(file: str) -> Iterator[Mutant]:
    """Make every mutant of a file, in order of lines."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    for index, node in enumerate(ast.walk(tree)):
        for number, change in enumerate(_changes(node)):
            broken = copy.deepcopy(tree)
            twin = next(node for at, node in enumerate(ast.walk(broken)) if at == index)
            replacement = list(_changes(twin))[number][1]
            source = ast.unparse(ast.fix_missing_locations(_Replace(twin, replacement).visit(broken)))
            yield Mutant(file, node.lineno, change[0], source)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what can be broken at a node: in words, and the node that stands in for it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _FLIPS:
        flipped = ast.Compare(node.left, [_FLIPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
        yield f"{ast.unparse(node)}  ->  {ast.unparse(flipped)}", flipped
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        yield _dropped(node, node.left)
        if isinstance(node.op, ast.Add):
            yield _dropped(node, node.right)
    elif isinstance(node, ast.BoolOp):
        for term in node.values:
            rest = [value for value in node.values if value is not term]
            yield _dropped(node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _dropped(node, node.operand)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield f"{ast.unparse(node)}  ->  pass", ast.Pass()


def _dropped(node: ast.expr, rest: ast.expr) -> tuple[str, ast.AST]:
    return f"{ast.unparse(node)}  ->  {ast.unparse(rest)}", rest


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old = old
        self._new = new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else super().generic_visit(node)


def is_noticed(mutant: Mutant, checkout: Path, tests: list[str]) -> bool:
    """Run the tests on a mutant in ``checkout``, a copy that is left as it was."""
    path = checkout / mutant.file
    original = path.read_bytes()
    path.write_text(mutant.source, "utf-8")
    try:
        return not passes(checkout, tests)
    finally:
        path.write_bytes(original)


def passes(checkout: Path, tests: list[str]) -> bool:
    """Whether the tests pass on a checkout."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "-p",
        "pytest_timeout",
        "-m",
        "not slow",
        *tests,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins and fixtures that these tests do not use take most of a run
    }
    try:
        run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def main() -> None:
    """List or run the mutants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--only", default="", help="those whose name contains this")
    parser.add_argument(
        "--quick", action="store_true", help="unit tests alone: seconds for each that they do not notice"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many to run at a time")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for file in FILES
        if (ROOT / file).exists()
        for mutant in sorted(mutants(file), key=lambda mutant: mutant.line)
        if arguments.only in str(mutant)
    ]
    if arguments.list:
        print(*chosen, sep="\n")
        return
    tests = [test for test in TESTS if not arguments.quick or test.startswith("tests/unit")]
    survivors = run_all(chosen, tests, arguments.jobs)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants are noticed; these are not:")
    print(*survivors, sep="\n")


def run_all(chosen: list[Mutant], tests: list[str], jobs: int) -> list[Mutant]:
    """Run the tests on every mutant; returns those that pass them."""
    with tempfile.TemporaryDirectory() as folder:
        checkouts: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            checkouts.put(shutil.copytree(ROOT, Path(folder) / str(job), symlinks=True, ignore=_left_behind))
        first = checkouts.get()
        if not passes(first, tests):
            sys.exit("The tests do not pass as they are: mend them first.")
        checkouts.put(first)

        def run(mutant: Mutant) -> bool:
            checkout = checkouts.get()
            try:
                noticed = is_noticed(mutant, checkout, tests)
            finally:
                checkouts.put(checkout)
            print("noticed " if noticed else "SURVIVED", mutant, flush=True)
            return noticed

        with ThreadPoolExecutor(jobs) as pool:
            return [mutant for mutant, noticed in zip(chosen, pool.map(run, chosen), strict=True) if not noticed]


_left_behind = shutil.ignore_patterns(".git", ".venv", ".hypothesis", "__pycache__", "*.plan", ".*_cache")


if __name__ == "__main__":
    main()
