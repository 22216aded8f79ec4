"""Mutation tests: change one place of the core at a time, and check that a simulated history or a unit test fails.

python scripts/mutate.py --list                       # list all mutants
python scripts/mutate.py --sample 40 --seed 1         # try 40 mutants, chosen at random
python scripts/mutate.py --module native --histories 400
python scripts/mutate.py --again before.txt           # try the mutants that survived in the output of an earlier run
python scripts/mutate.py --again before.txt --explain # list their names, for scripts/survivors.txt

A mutant is a module of the core in which one comparison, boolean operator, number, or clause of a DynamoDB condition is
changed. It is killed if a simulated history or a test of `tests/core` fails, and survives otherwise. The comparison of
the code with docs/protocol.md does not count: there a mutant fails because the page says otherwise.
The run fails if a mutant survives, unless `scripts/survivors.txt` explains why it does no harm. Each mutant runs in a
copy of the package.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "airflow_dynamo_lock"
CORE = ROOT / PACKAGE / "core"
SURVIVES, EXPLAINED = "SURVIVES", "survives, as scripts/survivors.txt explains"
#: Names of mutants that may survive, one per line, below a comment with the reason.
SURVIVORS = ROOT / "scripts" / "survivors.txt"
#: Modules that the simulation and the tests of the protocol do not use. Other tests cover them.
LEFT_OUT = {"__init__", "codec", "errors", "limits", "arguments", "text", "schema"}
FOREIGN = CORE / "foreign"
TESTS = ("tests/core", "--ignore", "tests/core/test_specification.py")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
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
_CHANGED = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)
# A clause of a DynamoDB condition.
_CLAUSE = re.compile(r"\(?(?:attribute_\w+\([^()]*\)|size\([^()]*\) \S+ \S+|#[\w.#]+ [<>=]+ [:#][\w.#]+)\)?")


@dataclass(frozen=True)
class Mutant:
    """One change in one module.

    :ivar path: the module.
    :ivar node: index of the changed node in `ast.walk` of the module.
    :ivar variant: number of the change, if the node can be changed in several ways.
    :ivar line: line of the node.
    :ivar place: the function, class or constant that contains the node, such as ``.Stamp.age``.
    :ivar what: description of the change.
    """

    path: Path
    node: int
    variant: int
    line: int
    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.path.stem}:{self.line}: {self.what}"

    @property
    def name(self) -> str:
        """The mutant's name in `SURVIVORS`. It has no line number, because line numbers change often."""
        return f"{self.path.stem}{self.place}: {self.what}"

    @property
    def is_explained(self) -> bool:
        """Whether `SURVIVORS` lists the mutant."""
        return self.name in SURVIVORS.read_text().splitlines()

    def source(self) -> str:
        """Return the source of the module with the change."""
        tree = ast.parse(self.path.read_text())
        _change(list(ast.walk(tree))[self.node], self.variant)
        return ast.unparse(tree)


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    tree = ast.parse(path.read_text())
    places = {id(node): place for place, node in _places(tree)}
    for index, node in enumerate(ast.walk(tree)):
        for variant in range(8):
            changed = copy.deepcopy(node) if isinstance(node, _CHANGED) else node
            what = _change(changed, variant)
            if what is None:
                break
            yield Mutant(path, index, variant, getattr(node, "lineno", 0), places[id(node)], what)


def _places(node: ast.AST, place: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield all nodes below this one, each after the function, class or constant that contains it."""
    for child in ast.iter_child_nodes(node):
        match node, child:
            case _, ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                inner = f"{place}.{name}"
            case ast.Module() | ast.ClassDef(), ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                inner = f"{place}.{ast.unparse(target).strip('()')}"
            case _:
                inner = place
        yield inner, child
        yield from _places(child, inner)


def _change(node: ast.AST, variant: int) -> str | None:
    """Change a node in place, and return a description of the change; None if it has no such variant."""
    match node:
        case ast.Compare(ops=[operator]) if variant == 0 and type(operator) in _COMPARISONS:
            before = ast.unparse(node)
            node.ops = [_COMPARISONS[type(operator)]()]
        case ast.BoolOp() if variant == 0:
            before = ast.unparse(node)
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()) if variant == 0:
            before = ast.unparse(node)
            node.op = ast.UAdd()  # removes the `not`: the truth value of +x is that of x
        case ast.Constant(value=int() | float() as value) if variant == 0 and not isinstance(value, bool):
            before = ast.unparse(node)
            node.value = value + 1 if value < 10 else value * 2
        case ast.Constant(value=str() as value):
            clauses = list(_CLAUSE.finditer(value)) if "#" in value and ":ivar" not in value else []
            if variant >= len(clauses):
                return None
            before = repr(value)
            clause = clauses[variant]
            node.value = value[: clause.start()] + "attribute_not_exists(#data.#data)" + value[clause.end() :]
            return f"{clause[0]!r} of {before[:60]} is always true"
        case _:
            return None
    return f"{before} -> {ast.unparse(node)}"


def killed_by(mutant: Mutant | None, histories: int, tests: Sequence[str]) -> str | None:
    """Return the history or the test that fails with a mutant, or None if none does.

    Without a mutant, it returns what fails with the unchanged package.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        # The tests are copied too: in the repository, Python would import the repository's package instead of the copy.
        # The compiled files are copied with their times, so that only the mutant's module is compiled again.
        for copied in (PACKAGE, "deployments", "docs", "proof", "tests"):
            # Without files that Python is writing: they are renamed before they are copied.
            shutil.copytree(ROOT / copied, Path(folder, copied), ignore=shutil.ignore_patterns("*.pyc.*"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if mutant is not None:
            Path(folder, mutant.path.relative_to(ROOT)).write_text(mutant.source())
        play_histories = (
            "from proof.simulator.many import play_some\n"
            f"print(next((s for s in range({histories}) if play_some([s])[0].violations), ''))"
        )
        pytest = ["-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-m", "not proof", *tests]
        for what, arguments in (("history", ["-c", play_histories]), ("test", pytest)):
            try:
                run = subprocess.run(  # noqa: S603
                    [sys.executable, *arguments],
                    cwd=folder,
                    # Tests that are killed after their time leave their temporary folders in this one.
                    env=os.environ | {"TMPDIR": folder},
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
            except subprocess.TimeoutExpired:
                return f"{what}: did not end within 120 s"
            if what == "history" and (run.returncode or run.stdout.strip()):
                return f"history {run.stdout.strip() or 'fails'}"
            if what == "test" and run.returncode:
                failed = re.search(r"FAILED (\S+)", run.stdout)
                return f"test {failed[1] if failed else 'fails'}"
    return None


def main() -> int:
    """Run the command line. Returns 1 if a mutant survives without an explanation."""
    parser = argparse.ArgumentParser(
        description="Change one place of the core at a time, and check that a history or a test fails."
    )
    parser.add_argument("--list", action="store_true", help="list the mutants, and try none")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="list the names of the mutants, as in scripts/survivors.txt, and try none",
    )
    parser.add_argument(
        "--module", action="append", help="module of the core to change (repeatable; default: all)"
    )
    parser.add_argument(
        "--again", type=Path, help="output of an earlier run: try only the mutants that survived in it"
    )
    parser.add_argument(
        "--sample", type=int, help="number of mutants to try, chosen at random (default: all)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the random sample (default: %(default)s)"
    )
    parser.add_argument(
        "--histories",
        type=int,
        default=200,
        help="number of histories for each mutant (default: %(default)s)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        help="number of mutants to try at the same time (default: number of cores)",
    )
    parser.add_argument(
        "tests", nargs="*", default=TESTS, help=f"tests for each mutant (default: {' '.join(TESTS)})"
    )
    chosen = parser.parse_args()
    modules = [
        path for path in sorted(CORE.rglob("*.py")) if path.stem not in LEFT_OUT and path.parent != FOREIGN
    ]
    found = [each for path in modules if path.stem in (chosen.module or path.stem) for each in mutants(path)]
    if chosen.again is not None:
        before = chosen.again.read_text().splitlines()
        found = [each for each in found if f"{each}: {SURVIVES}" in before]
    if chosen.list or chosen.explain:
        for each in found:
            print(each.name if chosen.explain else each)
        return 0
    if chosen.sample is not None:
        found = random.Random(chosen.seed).sample(found, min(chosen.sample, len(found)))  # noqa: S311
    if failure := killed_by(None, chosen.histories, chosen.tests):
        parser.error(f"this fails with the unchanged package, so mutants cannot be judged: {failure}")
    survivors = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        killers = pool.map(lambda each: killed_by(each, chosen.histories, chosen.tests), found)
        for each, killer in zip(found, killers, strict=True):
            verdict = killer or (EXPLAINED if each.is_explained else SURVIVES)
            print(f"{each}: {verdict}", flush=True)
            if verdict == SURVIVES:
                survivors.append(each)
    print(f"{len(survivors)} of {len(found)} survive without an explanation")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
