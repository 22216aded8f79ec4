"""``python scripts/facades.py``: generate the modules of `client/_sync` from those of `client/_async`.

The clients differ only in `await`, and in whether tasks or threads run an operation. With ``--check``, the script
writes nothing, and fails if the generated modules are out of date.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from unasync import Rule, unasync_files

CLIENT = Path(__file__).parents[1] / "airflow_dynamo_lock" / "client"
#: Names that the generator replaces, in addition to those that unasync replaces by default.
NAMES = {
    "AsyncLeases": "Leases",
    "AsyncTable": "Table",
    "AsyncRuntime": "ThreadRuntime",
    "tasks": "threads",
    "AbstractAsyncContextManager": "AbstractContextManager",
    "asynccontextmanager": "contextmanager",
    "cancel": "stop",
}
HEADER = "# Generated from client/_async by scripts/facades.py: change that file, and run the script.\n"


def generate(folder: Path) -> None:
    """Generate the modules of `client/_sync`, and write them into a folder."""
    sources = [str(path) for path in sorted((CLIENT / "_async").glob("*.py")) if path.stem != "__init__"]
    rule = Rule(f"{CLIENT}/_async/", f"{folder}/", additional_replacements=NAMES)
    unasync_files(sources, [rule])
    for path in folder.glob("*.py"):
        path.write_text(HEADER + path.read_text().replace("  # noqa: ASYNC109", ""))
    config = ["--config", str(Path(__file__).parents[1] / "pyproject.toml"), str(folder)]
    for command in (["check", "--quiet", "--fix", "--select", "I"], ["format", "--quiet"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, *config], check=True)  # noqa: S603


def main() -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Generate the methods of LockClient from those of AsyncLockClient."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and fail if a module is out of date"
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = []
        for path in sorted(Path(folder).glob("*.py")):
            target = CLIENT / "_sync" / path.name
            if not target.exists() or target.read_text() != path.read_text():
                stale.append(target.name)
                if not chosen.check:
                    target.write_text(path.read_text())
    if chosen.check and stale:
        print(
            f"Out of date in client/_sync: {', '.join(stale)}. Run python scripts/facades.py to generate them."
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
