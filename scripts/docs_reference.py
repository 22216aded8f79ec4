"""An extension of Griffe, which reads the docstrings for the API reference (`mkdocs.yml`).

The docstrings are written for readers of the code: names in single backquotes, as in Sphinx, and sometimes a paragraph
after the list of parameters. The extension turns them into what Griffe and Markdown expect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import griffe  # type: ignore[import-not-found]

NAME = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")


class Docstrings(griffe.Extension):  # type: ignore[misc]
    """Edit all docstrings of the package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        for each in objects(pkg):
            if each.docstring:
                each.docstring.value = linked(fields_last(each.docstring.value), each, pkg)


def objects(module: griffe.Object) -> Iterator[griffe.Object]:
    """An object, and all objects that are defined in it."""
    yield module
    for member in module.members.values():
        if not member.is_alias:
            yield from objects(member)


def fields_last(docstring: str) -> str:
    """Move the paragraphs after the fields (``:param x: …``) before them: Griffe would add them to the last field."""
    paragraphs = docstring.split("\n\n")
    fields = [each for each in paragraphs if each.startswith(":")]
    return "\n\n".join([each for each in paragraphs if each not in fields] + fields)


def linked(docstring: str, owner: griffe.Object, package: griffe.Module) -> str:
    """Link the names in single backquotes: to a public name of the package, or to what the name means in its scope.

    Names that the reference does not describe stay code.
    """

    def link(match: re.Match[str]) -> str:
        name = match[1]
        first, _, rest = name.partition(".")
        if first in package.members and package.members[first].is_alias:
            path = f"{package.path}.{name}"
        else:
            try:
                path = f"{owner.resolve(first)}.{rest}".rstrip(".")
            except griffe.NameResolutionError:
                return match[0]
        return f'<autoref optional identifier="{path}"><code>{name}</code></autoref>'

    return NAME.sub(link, docstring)
