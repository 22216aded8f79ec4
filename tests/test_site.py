"""The documentation as a site: it builds without warnings, such as those about broken links, its pages load nothing
from another host, and the reference lists all public names.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import airflow_dynamo_lock

ROOT = Path(__file__).parent.parent
#: What a browser would fetch from another host.
FOREIGN = re.compile(
    r"""<(?:script|img|iframe)[^>]* src=["']?(?:https?:)?//|<link[^>]* href=["']?(?:https?:)?//"""
)


@pytest.mark.proof
def test_the_site_builds() -> None:
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted((ROOT / ".cache" / "site").rglob("*.html"))
    assert len(pages) > 10
    assert [page.name for page in pages if FOREIGN.search(page.read_text())] == []


def test_the_reference_lists_all_public_names() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    listed = re.findall(r"^::: airflow_dynamo_lock\.(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == airflow_dynamo_lock.__all__
