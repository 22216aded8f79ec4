"""The documentation agrees with the code: its Python runs, its links lead somewhere, and its lists are complete."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

import airflow_dynamo_lock
from airflow_dynamo_lock import LockClient, sdk_config
from airflow_dynamo_lock.airflow.provider_info import get_provider_info
from deployments.engines import MotoServer
from proof.figures import broken_rules
from tests.forked import run_forked
from tests.pages import PAGES, ROOT, blocks, code, table

SOURCES = sorted((ROOT / "airflow_dynamo_lock").rglob("*.py"))
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.fixture(scope="module")
def endpoint_url() -> Iterator[str]:
    """A DynamoDB with a lock table."""
    with MotoServer() as engine:
        client(engine.endpoint_url).create_table()
        yield engine.endpoint_url


def client(endpoint_url: str) -> LockClient:
    """Return a client of the DynamoDB at this URL."""
    aws = boto3.client("dynamodb", endpoint_url=endpoint_url, config=sdk_config())
    return LockClient(aws, table="airflow_locks")


def test_the_python_of_all_pages_runs(endpoint_url: str, tmp_path: Path) -> None:
    # The code of runbook.md breaks a lock that is held.
    client(endpoint_url).try_acquire("warehouse/orders")
    pages = sorted(WITH_PYTHON, key=lambda page: page.name != "runbook.md")
    done = run_forked(
        ["\n".join(blocks(page, "python")) for page in pages],
        preload="import airflow.sdk, boto3",
        environment={
            **os.environ,
            "AIRFLOW_HOME": str(tmp_path),
            "AWS_ENDPOINT_URL_DYNAMODB": endpoint_url,
        },
    )
    failed = {page.name: each.stderr for page, each in zip(pages, done, strict=True) if each.returncode}
    assert failed == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings]
            assert anchor in anchors, link


def test_permissions_are_those_that_the_code_uses() -> None:
    page = ROOT / "docs" / "permissions.md"
    roles = [json.loads(block) for block in blocks(page, "json")]
    holder = roles[0]
    # The README may quote a policy of the page.
    quoted = [json.loads(block) for block in blocks(ROOT / "README.md", "json")]
    assert all(policy in roles for policy in quoted if "Statement" in policy)
    listed = {action.removeprefix("dynamodb:") for action in holder["Statement"][0]["Action"]}
    for _, actions, _ in table(page, "Actions"):
        listed.update(code(actions))
    requested = {
        call.args[0].value
        for source in SOURCES
        for call in ast.walk(ast.parse(source.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "Request"
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }
    requested.remove("TransactWriteItems")  # AWS requires the actions of its parts
    (bucket,) = (json.loads(block) for block in blocks(ROOT / "docs" / "formats.md", "json"))
    in_s3 = {action for statement in bucket["Statement"] for action in statement["Action"]}
    assert in_s3 == {"s3:GetObject", "s3:PutObject", "s3:ListBucket"}
    requested -= {"GetObject", "PutObject", "ListObjectsV2"}  # S3 allows the last one by ListBucket
    assert listed == requested
    allowed = {
        action.removeprefix("dynamodb:")
        for role in roles
        for statement in role["Statement"]
        for action in statement["Action"]
    }
    assert allowed == requested  # role by role: tests/security


def test_connection_fields_are_all_described() -> None:
    (connection,) = get_provider_info()["connection-types"]
    described = [code(row[0])[0] for row in table(ROOT / "docs" / "configuration.md", "The connection")]
    assert described == list(connection["conn-fields"])


def test_errors_are_all_described() -> None:
    described = {code(row[0])[0] for row in table(ROOT / "docs" / "runbook.md", "What the errors say")}
    assert described == {
        name for name in airflow_dynamo_lock.__all__ if name.endswith("Error") and name != "LockError"
    }


def test_broken_rules_are_all_listed() -> None:
    assert broken_rules() in (ROOT / "docs" / "reliability.md").read_text(), "run python -m proof.figures"


def test_log_lines_are_those_that_the_code_writes() -> None:
    written = {
        re.sub(r"%[sdg]", "…", node.value.replace("%r", "'…'"))
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for row in table(ROOT / "docs" / "runbook.md", "What the log says"):
        (line,) = code(row[0])
        assert any(text.startswith(line.removesuffix("…").rstrip()) for text in written), line
