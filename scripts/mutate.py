"""``python scripts/mutate.py``: change the core in one place, and see whether histories or unit tests notice.

python scripts/mutate.py --list                       # all mutants, one a line
python scripts/mutate.py --sample 40 --seed 1         # forty of them, chosen by that seed
python scripts/mutate.py --module native --histories 400
python scripts/mutate.py --again before.txt           # those that survive in that output of an earlier run
python scripts/mutate.py --again before.txt --explain # their names, for scripts/survivors.txt

A mutant is a comparison, a boolean operator, a number, or a clause of a DynamoDB condition that was changed. It is
killed by the first simulated history, or by the first test of `tests/core`, that fails. A survivor fails the run
unless `scripts/survivors.txt` says why it does no harm. Each mutant runs on a copy of the package.
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
#: Survivors below the reason why each may survive, which is a comment.
SURVIVORS = ROOT / "scripts" / "survivors.txt"
#: What the simulation and the tests of the protocol do not use, and other tests cover.
LEFT_OUT = {"__init__", "codec", "errors", "limits", "arguments", "text", "schema"}
FOREIGN = CORE / "foreign"

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
# In a DynamoDB condition: a clause that another one follows, or precedes.
_CLAUSE = re.compile(r"\(?(?:attribute_\w+\([^()]*\)|size\([^()]*\) \S+ \S+|#[\w.#]+ [<>=]+ [:#][\w.#]+)\)?")


@dataclass(frozen=True)
class Mutant:
    """One change of a module: of which node of its syntax tree, in which way, where, and what that comes to.

    :ivar place: the function or the constant.
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
        """As `SURVIVORS` names it: without the line, which changes all the time."""
        return f"{self.path.stem}{self.place}: {self.what}"

    @property
    def is_explained(self) -> bool:
        """Whether `SURVIVORS` says why it does no harm."""
        return self.name in SURVIVORS.read_text().splitlines()

    def source(self) -> str:
        """The module with the change."""
        tree = ast.parse(self.path.read_text())
        _change(list(ast.walk(tree))[self.node], self.variant)
        return ast.unparse(tree)


def mutants(path: Path) -> Iterator[Mutant]:
    """All mutants of a module."""
    tree = ast.parse(path.read_text())
    places = {id(node): place for place, node in _places(tree)}
    for number, node in enumerate(ast.walk(tree)):
        for variant in range(8):
            changed = copy.deepcopy(node) if isinstance(node, _CHANGED) else node
            what = _change(changed, variant)
            if what is None:
                break
            yield Mutant(path, number, variant, getattr(node, "lineno", 0), places[id(node)], what)


def _places(node: ast.AST, place: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Each node below this one, with the function, the class or the constant that it belongs to."""
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
    """Change that node in the way of that number; None if there is no such way."""
    match node:
        case ast.Compare(ops=[operator]) if variant == 0 and type(operator) in _COMPARISONS:
            before = ast.unparse(node)
            node.ops = [_COMPARISONS[type(operator)]()]
        case ast.BoolOp() if variant == 0:
            before = ast.unparse(node)
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()) if variant == 0:
            before = ast.unparse(node)
            node.op = ast.UAdd()  # of a truth value, the same truth
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
    """What notices the mutant; None if nothing does. Without a mutant, what fails anyway."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        # The tests too: whatever Python is started in the repository finds the repository's package first.
        # Compiled as they are: the times of the files are copied, so only the mutant's module is compiled anew.
        for copied in (PACKAGE, "deployments", "docs", "proof", "tests"):
            shutil.copytree(ROOT / copied, Path(folder, copied))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if mutant is not None:
            Path(folder, mutant.path.relative_to(ROOT)).write_text(mutant.source())
        play = (
            "from proof.simulator.many import play_some\n"
            f"print(next((s for s in range({histories}) if play_some([s])[0].violations), ''))"
        )
        pytest = ["-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-m", "not proof", *tests]
        for what, arguments in (("history", ["-c", play]), ("test", pytest)):
            try:
                run = subprocess.run(  # noqa: S603
                    [sys.executable, *arguments],
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
            except subprocess.TimeoutExpired:
                return f"{what}: no end"
            if what == "history" and (run.returncode or run.stdout.strip()):
                return f"history {run.stdout.strip() or 'fails'}"
            if what == "test" and run.returncode:
                failed = re.search(r"FAILED (\S+)", run.stdout)
                return f"test {failed[1] if failed else 'fails'}"
    return None


def main() -> int:
    """0 if no mutant has survived without an explanation."""
    parser = argparse.ArgumentParser(description="Change the core in one place, and see what notices.")
    parser.add_argument("--list", action="store_true", help="list all mutants")
    parser.add_argument(
        "--explain", action="store_true", help="list them as scripts/survivors.txt names them"
    )
    parser.add_argument("--module", action="append", help="a module of the core; may be given several times")
    parser.add_argument("--again", type=Path, help="only those that survive in this output")
    parser.add_argument("--sample", type=int, help="number of mutants to try, all by default")
    parser.add_argument("--seed", type=int, default=1, help="chooses the sample")
    parser.add_argument("--histories", type=int, default=200, help="histories for each mutant")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="mutants at a time, one for each core"
    )
    parser.add_argument("tests", nargs="*", default=["tests/core"], help="tests for each mutant")
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
        parser.error(f"without any change, this fails: {failure}")
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
