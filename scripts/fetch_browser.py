"""Fetch a browser, and axe-core, which checks pages for accessibility, into ``.cache/browser``.

The tests of the Locks page use them. Both are npm packages. The browser is a Chromium for servers, which needs no
system packages, because its libraries and fonts are in the package. It runs on Linux on x86-64 only. On other machines
the tests use the browser that the variable CHROMIUM names. If the folder exists already, the script does nothing.
"""

from __future__ import annotations

import io
import platform
import tarfile
import tempfile
from pathlib import Path

import brotli
from npm_package import unpack, unpacked

CHROMIUM = "@sparticuz/chromium@153.0.0", "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
AXE = "axe-core@4.14.1", "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745"
TARGET = Path(__file__).parents[1] / ".cache" / "browser"


#: The package's own configuration looks for its fonts where a cloud's function has them.
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
"""


def fetch_chromium(target: Path) -> None:
    """Unpack the browser, and the libraries and fonts that it needs."""
    with unpacked(*CHROMIUM, TARGET.parent) as folder:
        for archive in sorted((folder / "bin").iterdir()):
            content = brotli.decompress(archive.read_bytes())
            if archive.name == "chromium.br":
                (target / "chromium").write_bytes(content)
                (target / "chromium").chmod(0o755)
            else:
                with tarfile.open(fileobj=io.BytesIO(content)) as files:
                    unpack(files, target)
    (target / "fonts.conf").write_text(FONTS)


if __name__ == "__main__":
    if not TARGET.exists():
        TARGET.parent.mkdir(exist_ok=True)
        # Renamed at the end, so that a folder that exists is complete.
        with tempfile.TemporaryDirectory(dir=TARGET.parent) as temporary:
            new = Path(temporary) / "browser"
            new.mkdir()
            if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
                fetch_chromium(new)
            with unpacked(*AXE, TARGET.parent) as folder:
                (folder / "axe.min.js").rename(new / "axe.min.js")
            new.rename(TARGET)
