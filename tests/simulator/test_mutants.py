"""`scripts/mutate.py` tests mutants of the core, and `scripts/survivors.txt` explains only mutants that exist."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.pages import ROOT

MUTATE = ROOT / "scripts" / "mutate.py"


def mutate(*arguments: str) -> str:
    """Run `scripts/mutate.py`, which must succeed, and return its output."""
    command = [sys.executable, str(MUTATE), *arguments]
    run = subprocess.run(command, capture_output=True, check=False, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_each_explained_survivor_is_an_existing_mutant() -> None:
    lines = (ROOT / "scripts" / "survivors.txt").read_text().splitlines()
    explained = {line for line in lines if line and not line.startswith("#")}
    assert explained - set(mutate("--explain").splitlines()) == set()


@pytest.mark.proof
def test_a_sample_of_mutants_is_killed_or_explained() -> None:
    assert "0 of 4 survive without an explanation" in mutate("--sample", "4")
