"""Hooks of `mkdocs.yml`: what the site needs besides the files in ``docs/``.

The pages are written for a reader of the repository, whose links lead from file to file. The site has fewer files:
`README.md` and its neighbours become pages, the example DAGs become one page, and links to other files of the
repository become text that names the file.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[1]
#: Pages that are not in ``docs/``. mkdocs takes a README for the home page.
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
EXAMPLES = "examples.md"
SCRIPTS = ROOT / ".cache" / "site-scripts"  # scripts/fetch_site_scripts.py

FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
#: A link, but not an image: its text, its file, its anchor.
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are not in ``docs/``, and the scripts."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, EXAMPLES, content=examples()))
    for script in sorted(SCRIPTS.iterdir()):
        files.append(File.generated(config, f"scripts/{script.name}", abs_src_path=str(script)))
    return files


def examples() -> str:
    """The page of the example DAGs: for each, its docstring and the rest of its code."""
    sections = ["# Example DAGs\n\nThe files of `dags/`.\n"]
    for path in sorted((ROOT / "dags").glob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        docstring = tree.body[0]
        code = "\n".join(source.splitlines()[docstring.end_lineno :]).strip()
        sections.append(
            f"## {path.name} {{#{path.stem}}}\n\n{ast.get_docstring(tree)}\n\n```python\n{code}\n```\n"
        )
    return "\n".join(sections)


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Turn the links between files of the repository into links between pages of the site."""
    name = page.file.src_uri
    folder = posixpath.dirname(name if name in OUTSIDE else f"docs/{name}")
    parts = FENCE.split(markdown)
    parts[::2] = [
        LINK.sub(lambda link: _link(link, folder, posixpath.dirname(name)), part) for part in parts[::2]
    ]
    return "".join(parts)


def _link(link: re.Match[str], folder: str, site_folder: str) -> str:
    """The link on the site, which is not a link if its file is not there.

    :param folder: the page's folder in the repository.
    :param site_folder: the page's folder on the site.
    """
    text, file, anchor = link[1], link[2], link[3] or ""
    path = posixpath.normpath(posixpath.join(folder, file))
    if ":" in file or not (ROOT / path).exists():
        return link[0]  # mkdocs reports those that lead nowhere
    if path in OUTSIDE:
        target = path
    elif path.startswith("docs/"):
        target = path.removeprefix("docs/")
    elif path == "dags" or path.startswith("dags/"):
        target, anchor = EXAMPLES, f"#{Path(path).stem}" if path.endswith(".py") else ""
    else:
        name = text.strip("`/")
        return f"`{path}`" if path.endswith(name) else f"{text} (`{path}`)"
    return f"[{text}]({posixpath.relpath(target, site_folder or '.')}{anchor})"


def on_post_page(output: str, *, page: Page, config: Any) -> str:
    """Load Mermaid, which is large, on pages with a drawing only."""
    if '<pre class="mermaid">' not in output:
        return output
    (script,) = SCRIPTS.glob("mermaid-*.js")
    here = posixpath.dirname(page.file.dest_uri) or "."
    source = posixpath.relpath(f"scripts/{script.name}", here)
    return output.replace("</body>", f'<script src="{source}"></script></body>')
