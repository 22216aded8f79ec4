"""Fetch the scripts of the documentation site into ``.cache/site-scripts``, so that its pages load none from elsewhere.

Each script is a file of an npm package, whose digest is compared with the one below before the file is unpacked. A
script that exists already is not fetched again, and scripts that are no longer listed are deleted.
"""

from __future__ import annotations

from pathlib import Path

from npm_package import unpacked

#: File of the site → package, its SHA-256, and the file in it.
SCRIPTS = {
    # Draws the pages' diagrams. 11 is the major version that mkdocs-material works with.
    "mermaid-11.17.2.min.js": (
        "mermaid@11.17.2",
        "6ad2f42c3fc26bbf9e45cbb6d11898972573ea52b33a5f4ff51952899f950ffd",
        "dist/mermaid.min.js",
    ),
    # Runs the search on pages that are opened as files, where browsers start no workers.
    "iframe-worker-1.0.4.js": (
        "iframe-worker@1.0.4",
        "e8c5d12d87829c503afba01d67772ea9f4aba5b7ae57a0c98e1917711030efbb",
        "shim/index.js",
    ),
}
TARGET = Path(__file__).parents[1] / ".cache" / "site-scripts"

if __name__ == "__main__":
    TARGET.mkdir(parents=True, exist_ok=True)
    for other in TARGET.iterdir():
        if other.name not in SCRIPTS:
            other.unlink()  # an earlier version
    for name, (package, sha256, member) in SCRIPTS.items():
        if not (TARGET / name).exists():
            with unpacked(package, sha256, TARGET.parent) as folder:
                (folder / member).rename(TARGET / name)
