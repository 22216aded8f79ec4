"""The templates in ``deploy/``: a parser or linter of each tool accepts them, and they agree with the code.

The table templates are evaluated, and the tables are created on moto. Nothing is deployed. The section "What was
checked" of ``docs/installing.md`` lists what these tests cover.
"""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hcl2
import helm_python as helm
import pytest
import yaml
from hcl2.utils import SerializationOptions
from packaging.specifiers import SpecifierSet

from airflow_dynamo_lock import LockClient
from airflow_dynamo_lock.airflow.provider_info import FIELDS
from airflow_dynamo_lock.airflow.settings import LockSettings
from airflow_dynamo_lock.core.model.errors import LockTableError
from airflow_dynamo_lock.defaults import DEFAULT_TABLE
from deployments.engines import Engine
from tests.commands import output_of

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "installing.md"
DOCKERFILES = sorted(DEPLOY.rglob("Dockerfile"))
REQUIREMENTS = DEPLOY / "mwaa" / "requirements.txt"


def program(name: str) -> Path:
    """Return the path of a program of a package in ``requirements/dev.txt``."""
    return Path(sysconfig.get_path("scripts")) / name


# --- The lock table and its policies: CloudFormation and Terraform ---

#: The table's ARN in the documented policies.
TABLE_ARN = "arn:aws:dynamodb:eu-central-1:111122223333:table/airflow_locks"


@dataclass(frozen=True)
class Declared:
    """What a template creates with the default values of its parameters, with or without the stream.

    :ivar table: arguments of `CreateTable`.
    :ivar time_to_live: argument of `UpdateTimeToLive`.
    :ivar policies: IAM policies in the order of the template, as `statements`.
    """

    table: dict[str, Any]
    time_to_live: dict[str, Any]
    policies: list[Any]


def statements(policy: Mapping[str, Any]) -> list[Any]:
    """Return an IAM policy in a form that can be compared: lists, sorted actions."""
    assert policy["Version"] == "2012-10-17"
    return [
        {name: [value] if isinstance(value, str) else sorted(value) for name, value in statement.items()}
        for statement in policy["Statement"]
    ]


def cloudformation(streams: bool) -> Declared:
    """Evaluate the CloudFormation template: the YAML loader replaces each function by its value."""
    parameters = {
        "TableName": DEFAULT_TABLE,
        "Streams": str(streams).lower(),
        "PointInTimeRecovery": "false",
        "AWS::NoValue": None,
    }

    class Loader(yaml.SafeLoader):
        pass

    def equals(loader: Loader, node: Any) -> bool:
        left, right = loader.construct_sequence(node)
        return bool(left == right)

    def choose(loader: Loader, node: Any) -> Any:
        condition, if_true, if_false = loader.construct_sequence(node, deep=True)
        assert condition == "HasStream"
        return if_true if streams else if_false

    Loader.add_constructor("!Ref", lambda _, node: parameters.get(node.value, node.value))
    Loader.add_constructor("!GetAtt", lambda _, node: {"LockTable.Arn": TABLE_ARN}[node.value])
    Loader.add_constructor("!Sub", lambda _, node: node.value.replace("${LockTable.Arn}", TABLE_ARN))
    Loader.add_constructor("!Equals", equals)
    Loader.add_constructor("!If", choose)
    template = yaml.load((DEPLOY / "cloudformation" / "lock-table.yaml").read_text(), Loader)

    defaults = {name: each["Default"] for name, each in template["Parameters"].items()}
    assert defaults == {"TableName": DEFAULT_TABLE, "Streams": "false", "PointInTimeRecovery": "false"}
    assert template["Conditions"] == {"HasStream": streams}
    resources = template["Resources"]
    assert resources["LockTable"]["DeletionPolicy"] == "Retain"
    table = resources["LockTable"]["Properties"]
    assert table.pop("PointInTimeRecoverySpecification") == {"PointInTimeRecoveryEnabled": "false"}
    time_to_live = table.pop("TimeToLiveSpecification")
    if stream := table.pop("StreamSpecification"):
        table["StreamSpecification"] = stream | {"StreamEnabled": True}  # CloudFormation implies it
    return Declared(
        table,
        time_to_live,
        [
            statements(each["Properties"]["PolicyDocument"])
            for each in resources.values()
            if each["Type"] == "AWS::IAM::ManagedPolicy" and (streams or "Condition" not in each)
        ],
    )


def terraform(streams: bool) -> Declared:
    """Evaluate the Terraform module: expressions are replaced by their values in the parsed module."""
    options = SerializationOptions(strip_string_quotes=True, explicit_blocks=False, with_comments=False)
    module = hcl2.loads((DEPLOY / "terraform" / "main.tf").read_text(), serialization_options=options)
    defaults = {name: each["default"] for block in module["variable"] for name, each in block.items()}
    assert defaults == {"table_name": DEFAULT_TABLE, "streams": False, "point_in_time_recovery": False}
    values = {
        "${var.streams}": streams,
        '${var.streams ? "KEYS_ONLY" : null}': "KEYS_ONLY" if streams else None,
        "${var.streams ? 1 : 0}": int(streams),
        "${var.point_in_time_recovery}": False,
    }

    def value(node: Any) -> Any:
        match node:
            case dict():
                return {name: value(each) for name, each in node.items()}
            case list():
                return [value(each) for each in node]
            case str() if node in values:
                return values[node]
            case str():
                text = node.replace("${var.table_name}", DEFAULT_TABLE)
                return text.replace("${aws_dynamodb_table.locks.arn}", TABLE_ARN)
        return node

    def blocks(kind: str, type_: str) -> dict[str, Any]:
        return {name: value(each) for block in module[kind] for name, each in block.get(type_, {}).items()}

    table = blocks("resource", "aws_dynamodb_table")["locks"]
    assert table.pop("point_in_time_recovery") == [{"enabled": False}]
    (time_to_live,) = table.pop("ttl")
    stream = {"StreamEnabled": table.pop("stream_enabled"), "StreamViewType": table.pop("stream_view_type")}
    arguments = {
        "TableName": table.pop("name"),
        "BillingMode": table.pop("billing_mode"),
        "AttributeDefinitions": [
            {"AttributeName": each["name"], "AttributeType": each["type"]} for each in table.pop("attribute")
        ],
        "KeySchema": [
            {"AttributeName": table.pop("hash_key"), "KeyType": "HASH"},
            {"AttributeName": table.pop("range_key"), "KeyType": "RANGE"},
        ],
        "DeletionProtectionEnabled": table.pop("deletion_protection_enabled"),
    }
    assert not table  # no other arguments
    documents = blocks("data", "aws_iam_policy_document")
    policies = []
    for name, policy in blocks("resource", "aws_iam_policy").items():
        assert policy["policy"] == f"${{data.aws_iam_policy_document.{name}.json}}"
        if policy.get("count", 1):
            written = [
                {"Effect": "Allow", "Action": each.pop("actions"), "Resource": each.pop("resources")} | each
                for each in documents[name]["statement"]
            ]
            policies.append(statements({"Version": "2012-10-17", "Statement": written}))
    return Declared(
        arguments | ({"StreamSpecification": stream} if stream["StreamEnabled"] else {}),
        {"AttributeName": time_to_live["attribute_name"], "Enabled": time_to_live["enabled"]},
        policies,
    )


table_templates = pytest.mark.parametrize("template", [cloudformation, terraform])
with_and_without_stream = pytest.mark.parametrize("streams", [False, True], ids=["polling", "streams"])


def test_cfn_lint_accepts_the_cloudformation_template() -> None:
    output_of(
        program("cfn-lint"),
        "--non-zero-exit-code",
        "informational",
        DEPLOY / "cloudformation" / "lock-table.yaml",
    )


@table_templates
@with_and_without_stream
def test_table_equals_the_one_of_create_table(
    template: Callable[[bool], Declared], streams: bool, moto: Engine
) -> None:
    declared = template(streams)
    assert declared.table["TableName"] == DEFAULT_TABLE
    assert declared.table["DeletionProtectionEnabled"] is True
    aws = moto.client()
    expected, created = (f"{template.__name__}-{streams}-{name}" for name in ("expected", "created"))
    LockClient(aws, table=expected).create_table(streams=streams)
    aws.create_table(**declared.table | {"TableName": created})
    aws.update_time_to_live(TableName=created, TimeToLiveSpecification=declared.time_to_live)

    def described(table: str) -> list[Any]:
        found = aws.describe_table(TableName=table)["Table"]
        attributes = {each["AttributeName"]: each["AttributeType"] for each in found["AttributeDefinitions"]}
        return [
            found["KeySchema"],
            attributes,
            found["BillingModeSummary"]["BillingMode"],
            found.get("StreamSpecification"),
            aws.describe_time_to_live(TableName=table)["TimeToLiveDescription"],
        ]

    assert described(created) == described(expected)
    locks = LockClient(aws, table=created)
    locks.check_table()
    with locks.lock("warehouse/orders", timeout=10) as lease:
        lease.check()


@table_templates
@with_and_without_stream
def test_policies_equal_the_documented_ones(template: Callable[[bool], Declared], streams: bool) -> None:
    text = (ROOT / "docs" / "permissions.md").read_text()
    documented = [
        statements(json.loads(block)) for block in re.findall(r"^```json\n(.*?)^```$", text, re.M | re.S)
    ]

    def policy_for(action: str) -> Any:
        """The documented policy that allows an action and has no condition."""
        action = f"dynamodb:{action}"
        (found,) = (
            policy
            for policy in documented
            if any(action in each["Action"] for each in policy)
            and not any("Condition" in each for each in policy)
        )
        return found

    expected = (
        ["PutItem", "GetRecords"] if streams else ["PutItem"]
    )  # the holder's policy, the stream reader's
    assert template(streams).policies == [policy_for(action) for action in expected]


def test_a_restored_table_repeats_tokens_until_it_is_emptied(moto: Engine) -> None:
    aws = moto.client()
    original = LockClient(aws, table="restore-original", lease=3)
    original.create_table()

    def token(locks: LockClient) -> int:
        with locks.lock("warehouse/orders", timeout=10) as lease:
            return lease.token

    token(original)
    # A backup is older than any difference between two estimates of the server's time, from which tokens begin.
    aws.update_item(
        TableName="restore-original",
        Key={"key": {"S": "warehouse/orders"}, "entry": {"S": "lock"}},
        UpdateExpression="ADD #token :minus",
        ExpressionAttributeNames={"#token": "token"},
        ExpressionAttributeValues={":minus": {"N": "-60000"}},
    )
    backup = aws.scan(TableName="restore-original", ConsistentRead=True)["Items"]
    granted_later = [token(original) for _ in range(3)]

    # A restore brings back keys and items, but not time to live.
    aws.create_table(**cloudformation(streams=False).table | {"TableName": "restore-restored"})
    for item in backup:
        aws.put_item(TableName="restore-restored", Item=item)
    restored = LockClient(aws, table="restore-restored", lease=3)
    with pytest.raises(LockTableError, match="time to live"):
        restored.check_table()
    assert token(restored) in granted_later
    for item in backup:
        aws.delete_item(TableName="restore-restored", Key={name: item[name] for name in ("key", "entry")})
    assert token(restored) > max(granted_later)


# --- Images and requirements with the package's wheels ---


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the package's wheels, as `python -m build --wheel` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    for project in (ROOT / "packages" / "client", ROOT):
        output_of(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=project)
    return folder


def is_supported(airflow: str, python: str) -> bool:
    """Whether the package supports these versions, according to ``pyproject.toml``."""
    text = (ROOT / "pyproject.toml").read_text()
    (pythons,) = re.findall(r'^requires-python = "(.*)"$', text, re.M)
    (airflows,) = re.findall(r'^ +"apache-airflow(>=.*)",$', text, re.M)
    return python in SpecifierSet(pythons) and airflow in SpecifierSet(airflows)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.parent.name)
def test_hadolint_accepts_the_dockerfile(dockerfile: Path) -> None:
    output_of(program("hadolint"), "--no-color", dockerfile)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.parent.name)
def test_base_image_has_a_supported_airflow_and_python(dockerfile: Path) -> None:
    # apache/airflow:3.3.2-python3.13; on Astro, runtime 3.3-2 contains an Airflow 3.3: runtime:3.3-2-python-3.13
    (tag,) = re.findall(r"^FROM \S+:(\S+)$", dockerfile.read_text(), re.M)
    versions = re.fullmatch(r"([\d.]+)(?:-\d+)?-python-?([\d.]+)", tag)
    assert versions
    assert is_supported(*versions.groups())


@pytest.mark.parametrize(
    "file", [*DOCKERFILES, REQUIREMENTS, PAGE], ids=lambda file: str(file.relative_to(ROOT))
)
def test_file_names_the_wheels_that_are_built(file: Path, wheels: Path) -> None:
    named = set(re.findall(r"[\w.]+-[\w.]+-py3-none-any\.whl", file.read_text()))
    assert named == {wheel.name for wheel in wheels.iterdir()}


def test_pip_installs_the_mwaa_requirements(wheels: Path, tmp_path: Path) -> None:
    text = REQUIREMENTS.read_text()
    (constraint,) = re.findall(r'^--constraint "(.*)"$', text, re.M)
    versions = re.fullmatch(
        r"https://raw\.githubusercontent\.com/apache/airflow/constraints-([\d.]+)/constraints-([\d.]+)\.txt",
        constraint,
    )
    assert versions
    assert is_supported(*versions.groups())
    # Without a network: an empty file in the place of the constraint, and no dependencies.
    (tmp_path / "constraints.txt").touch()
    text = text.replace(constraint, str(tmp_path / "constraints.txt"))
    (tmp_path / "requirements.txt").write_text(text.replace("/usr/local/airflow/plugins", str(wheels)))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    output_of(*pip, "--target", tmp_path / "installed", "-r", tmp_path / "requirements.txt")
    for part in ("client", "airflow"):
        assert (tmp_path / "installed" / "airflow_dynamo_lock" / part).is_dir()


def test_page_quotes_the_templates_as_they_are() -> None:
    templates = [file.read_text() for file in DEPLOY.rglob("*") if file.is_file()]
    quotes = re.findall(r"^```(?:dockerfile|text|yaml)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert quotes
    for quote in quotes:
        assert any(quote in template for template in templates), quote


# --- Deployments with docker compose and Helm ---


def lock_table(environment: Mapping[str, Any]) -> str:
    """Return the lock table of a deployment with these environment variables. Misspelled ones are an error."""
    prefix = "AIRFLOW__DYNAMO_LOCK__"
    given = {
        name.removeprefix(prefix).lower(): value
        for name, value in environment.items()
        if name.startswith("AIRFLOW__")
    }
    assert set(given) <= set(FIELDS)
    assert {"table", "region_name", "deployment"} <= set(given)
    return LockSettings.of(given, source="the template").table


#: Services that run Airflow in Airflow's docker-compose.yaml, without flower.
AIRFLOW_SERVICES = {
    "airflow-apiserver",
    "airflow-cli",
    "airflow-dag-processor",
    "airflow-init",
    "airflow-scheduler",
    "airflow-triggerer",
    "airflow-worker",
}


def test_compose_merges_the_override_with_airflows_file(tmp_path: Path) -> None:
    original = {
        name: {"image": "apache/airflow", "environment": {"ORIGINAL": "1"}} for name in AIRFLOW_SERVICES
    }
    original["postgres"] = {"image": "postgres"}
    (tmp_path / "docker-compose.yaml").write_text(yaml.safe_dump({"services": original}))
    for file in (DEPLOY / "compose").iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    shell = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "AWS_ACCESS_KEY_ID": "from the shell"}
    merged = output_of(program("docker-compose"), "config", "--format", "json", cwd=tmp_path, env=shell)

    services = json.loads(merged)["services"]
    assert set(services) == set(original)
    assert services.pop("postgres")["image"] == "postgres"
    for service in services.values():
        assert service["build"]["context"] == str(tmp_path)
        assert service["image"] != "apache/airflow"
        assert service["environment"].pop("ORIGINAL") == "1"
        assert service["environment"]["AWS_ACCESS_KEY_ID"] == "from the shell"
        assert lock_table(service["environment"]) == DEFAULT_TABLE


def only(**properties: Any) -> dict[str, Any]:
    """A JSON schema of an object with no other properties."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


TEXT = {"type": "string"}
SERVICE_ACCOUNT = only(annotations={"type": "object", "additionalProperties": TEXT})
#: The part of the chart's values that the template may set. No package index has the official chart; names and types
#: were compared with its documentation for version 1.22.0.
CHART_VALUES = only(
    airflowVersion=TEXT,
    images=only(airflow=only(repository=TEXT, tag=TEXT)),
    env={"type": "array", "items": only(name=TEXT, value=TEXT)},
    triggerer=only(replicas={"type": "integer"}, serviceAccount=SERVICE_ACCOUNT),
    workers=only(serviceAccount=SERVICE_ACCOUNT),
)


def test_helm_accepts_the_values(tmp_path: Path) -> None:
    values = helm.values_from_yaml((DEPLOY / "helm" / "values.yaml").read_text())
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: airflow, version: 1.22.0}")
    (tmp_path / "values.schema.json").write_text(json.dumps(CHART_VALUES))
    with helm.Chart.load(tmp_path) as chart:
        chart.validate_schema(values)
    compose = (DEPLOY / "compose" / "Dockerfile").read_text()  # the page builds the image from this file
    assert f"FROM apache/airflow:{values['airflowVersion']}-" in compose
    assert values["images"]["airflow"]["tag"] == values["airflowVersion"]
    assert lock_table({each["name"]: each["value"] for each in values["env"]}) == DEFAULT_TABLE
    assert values["triggerer"]["serviceAccount"] == values["workers"]["serviceAccount"]
