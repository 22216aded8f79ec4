"""Every option of an acquire is known in every place that lists options.

`AcquireOptions` is the authoritative list. Add an option that is added there to each of the places below, or to
the exceptions, with the reason. The tests check the options of the clients and the fields of the connection, too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG

from airflow_dynamo_lock import (
    AsyncLockClient,
    DynamoLock,
    DynamoLockAcquireOperator,
    DynamoLockHeartbeatOperator,
    DynamoLockOperator,
    DynamoLockReleaseOperator,
    DynamoLockSensor,
    LockClient,
    LockError,
    LockValueError,
)
from airflow_dynamo_lock.airflow import lock_options
from airflow_dynamo_lock.airflow.decorators import dynamo_lock_task
from airflow_dynamo_lock.airflow.operators import Acquires
from airflow_dynamo_lock.airflow.provider_info import FIELDS
from airflow_dynamo_lock.airflow.settings import LockSettings
from airflow_dynamo_lock.airflow.triggers import DynamoLockAcquireTrigger, DynamoLockSensorTrigger
from airflow_dynamo_lock.cli.main import run_command
from airflow_dynamo_lock.cli.options import Settings
from airflow_dynamo_lock.client import async_client, session, sync_client, tasks, threads
from airflow_dynamo_lock.client.options import AcquireOptions, ClaimOptions, HoldOptions
from airflow_dynamo_lock.client.session import ClientCore
from airflow_dynamo_lock.core.foreign.registry import FORMATS, NATIVE
from airflow_dynamo_lock.core.lock.acquire import Acquiring
from airflow_dynamo_lock.core.model.claim import LockOptions, LockSpec
from airflow_dynamo_lock.core.model.record import LockRecord
from proof.simulator.sdk import SimulatedClient
from proof.simulator.stepped import a_lease
from tests.pages import code, table

DOCS = Path(__file__).parents[2] / "docs"
CLAIM, ACQUIRE, HOLD = (set(each.__annotations__) for each in (ClaimOptions, AcquireOptions, HoldOptions))

HELD = a_lease("held")

#: Arguments that give an option another value than its default, by option.
VALUES: Mapping[str, Mapping[str, Any]] = {
    "lease_id": {"lease_id": "mine"},
    "slots": {"slots": 2, "capacity": 3},
    "capacity": {"capacity": 3},
    "data": {"data": {"a": 1}},
    "lease": {"lease": 61.0},
    "release_grace": {"release_grace": 7.0},
    "owner": {"owner": "ada"},
    "about": {"about": {"dag": "etl"}},
    "attempt_of": {"attempt_of": "etl/run"},
    "mode": {"mode": "shared"},
    "min_hold": {"min_hold": 9.0},
    "fair": {"fair": False},
    "priority": {"priority": 5},
    "reentrant": {"reentrant": True},
    "only_existing": {"only_existing": True},
    "timeout": {"timeout": 11.0},
    "poll_interval": {"poll_interval": 3.0},
    "on_busy": {"on_busy": print},
    "on_position": {"on_position": print},
    "holding": {"holding": [HELD]},
}

# -- deliberate exceptions, each with its reason ----------------------------------------------------------------------

#: Options that a task does not pass to its client.
NOT_IN_AIRFLOW = {
    "data": "tasks pass data by XCom",
    "reentrant": "each task instance is an owner of its own",
    "only_existing": "a DAG creates the locks that it uses",
    "poll_interval": "the tasks of a triggerer share one poller",
}
#: Options that a task passes to its client, but its author does not choose.
NOT_IN_DAGS = {
    "lease_id": "the task instance's id (rule R7)",
    "owner": "the deployment's and the task's name",
    "about": "the task instance's attributes",
    "attempt_of": "the task of the run",
    "on_busy": "goes to the task's log",
    "on_position": "goes to the task's log",
    "holding": "the leases of the groups around the task",
}
#: Parameters of the group and of the operators that are not options of an acquire.
ONLY_IN_DAGS = {"key", "on_timeout", "on_wait", "dynamo_lock_conn_id"}
ONLY_IN_GROUP = {"heartbeat", "on_held", "group_id"}
ONLY_IN_OPERATOR = {"deferrable"}

#: Options that the sensor does not have. It acquires no lock.
NOT_IN_SENSOR = {
    "capacity": "the lock has one",
    **dict.fromkeys(
        (
            "lease_id",
            "owner",
            "about",
            "attempt_of",
            "lease",
            "release_grace",
            "min_hold",
            "data",
            "reentrant",
        ),
        "describes a lease",
    ),
    **dict.fromkeys(("fair", "priority", "on_position"), "describes a position in the queue"),
    "holding": "a sensor takes no part in the search for deadlocks",
    "only_existing": "a lock without a record is free",
    "on_busy": "each poke logs the holders",
}
#: Other names of options in the sensor: every sensor of Airflow has a `mode` and a `poke_interval`.
IN_SENSOR = {"mode": "lock_mode", "poll_interval": "poke_interval"}

#: Options that the commands `acquire` and `run` do not have.
NOT_IN_CLI = {
    "lease_id": "each call is an attempt of its own",
    "about": "`--owner` is enough for people",
    "attempt_of": "each call is an attempt of its own",
    "release_grace": "no other process enters the lease",
    "min_hold": "left out on purpose: no command needs a rate limit yet",
    "reentrant": "each call is a client of its own",
    "only_existing": "for programs that replace another library",
    "poll_interval": "one waiter polls at the usual interval",
    "on_busy": "the error names the holders",
}
NOT_IN_RUN = {"data": "the command can describe itself"}

#: Options that all formats support.
IN_ALL_FORMATS = {"lease_id", "lease", "release_grace", "owner", "about", "attempt_of", "only_existing"}
#: Options that foreign formats accept, but ignore.
IGNORED_IN_OTHER_FORMATS = {
    "fair": "without a queue, all waiters are unfair",
    "reentrant": "counted in the client",
}

#: Options of a claim that are not in the claim itself.
NOT_IN_CLAIM = {"reentrant": "counted in the client"}

#: Options of the clients that do not come from a connection.
NOT_IN_CONNECTION = {
    "client": "created from other fields of the connection",
    "owner": "each task has its own",
    "heartbeat": "each heartbeat task has its own",
    "release_grace": "each task has its own",
    "max_clock_skew": "the clocks of AWS are the same for all clients",
    "streams": "only triggerers read the stream",
}


# -- the places -------------------------------------------------------------------------------------------------------


def test_the_lists_here_name_existing_options() -> None:
    assert VALUES.keys() == ACQUIRE
    exceptions = (NOT_IN_AIRFLOW, NOT_IN_DAGS, NOT_IN_SENSOR, NOT_IN_CLI, NOT_IN_RUN, IN_SENSOR)
    for each in (
        *exceptions,
        IN_ALL_FORMATS,
        IGNORED_IN_OTHER_FORMATS,
        NOT_IN_CLAIM,
        NOT_IN_RECORD,
        NOT_IN_JSON,
        NOT_IN_TEXT,
    ):
        assert set(each) <= ACQUIRE
    assert NOT_IN_CONNECTION.keys() <= parameters(LockClient)


def parameters(called: Callable[..., Any]) -> set[str]:
    """Return the names of the parameters, except `self`, `*args` and `**kwargs`."""
    return {
        name
        for name, each in inspect.signature(called).parameters.items()
        if name != "self" and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }


def described(documented: Any) -> set[str]:
    """Return the parameters that a docstring describes."""
    return set(re.findall(r"^ *:param (\w+):", documented.__doc__, re.MULTILINE))


def a_core() -> ClientCore:
    return ClientCore("locks", "me", 30.0, None, 15.0, 10.0)


@pytest.mark.parametrize("name", sorted(CLAIM - NOT_IN_CLAIM.keys()))
def test_an_option_reaches_the_claim(name: str) -> None:
    (usual,) = a_core().claims.of("k", {"lease_id": "usual"})
    (claim,) = a_core().claims.of("k", {"lease_id": "usual", **VALUES[name]})  # type: ignore[typeddict-item]
    assert claim != usual


#: Options that are not in the record.
NOT_IN_RECORD = {
    "lease_id": "the key of the holder",
    "fair": "only for the wait",
    "priority": "in the waiter's item",
    "reentrant": "counted in the client",
    "only_existing": "a condition of the first write",
}
#: Options that are not in the JSON of the record.
NOT_IN_JSON = {
    "release_grace": "shown as the lease of a draining holder",
    "min_hold": "shown as draining while it cools down",
}
#: Options that are not in the sentence that describes the holders.
NOT_IN_TEXT = {
    **NOT_IN_JSON,
    **dict.fromkeys(("slots", "capacity", "mode"), "in the lock's state"),
    **dict.fromkeys(("lease", "about", "attempt_of"), "only in the JSON"),
    "data": "may be a secret (rule R12)",
}


def stored(**options: Any) -> LockRecord:
    """Return the record of a lock acquired with these options, without values that differ between grants."""
    locks = LockClient(SimulatedClient(), table="locks", owner="me")
    locks.try_acquire("k", **({"lease_id": "mine"} | options))
    record = locks.get("k")
    assert record is not None
    always = {"acquired_at_ms": 0, "renewed_at_ms": 0, "version": ""}
    holders = {name: replace(holder, **always) for name, holder in record.holders.items()}  # type: ignore[arg-type]
    return replace(record, holders=holders, token=0, expires_at=None)


@pytest.mark.parametrize("name", sorted(CLAIM - NOT_IN_RECORD.keys()))
def test_an_option_reaches_the_record(name: str) -> None:
    usual, record = stored(), stored(**VALUES[name])
    assert record != usual
    assert (record.as_dict() != usual.as_dict()) is (name not in NOT_IN_JSON)
    assert (record.describe() != usual.describe()) is (name not in NOT_IN_TEXT)


class Captured(LockError):
    """The options that reached the client or the protocol, raised as an error."""

    def __init__(self, **options: Any) -> None:
        super().__init__("captured")
        self.options = options


@pytest.mark.parametrize("kind", [LockClient, AsyncLockClient])
@pytest.mark.parametrize("name", sorted(ACQUIRE - CLAIM))
async def test_both_clients_pass_an_option_on(name: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire_all(self: Acquiring, claims: Any, **options: Any) -> Iterator[Any]:
        raise Captured(**options)
        yield

    monkeypatch.setattr(Acquiring, "acquire_all", acquire_all)
    monkeypatch.setattr(session, "monotonic", lambda: 0.0)  # otherwise some of the timeout has passed

    async def acquire() -> None:
        found = kind(None, table="locks").acquire("k", **VALUES[name])
        if inspect.isawaitable(found):
            await found

    with pytest.raises(Captured) as captured:
        await acquire()
    assert VALUES[name].items() <= captured.value.options.items()


def test_the_methods_of_both_clients_have_all_options() -> None:
    for kind in (LockClient, AsyncLockClient):
        assert parameters(kind.acquire) == {"key"} | ACQUIRE - CLAIM
        assert parameters(kind._lock) == {"key"} | HOLD - ACQUIRE
        assert parameters(kind.keep_alive) >= HOLD - ACQUIRE
    assert described(LockClient.acquire) == parameters(LockClient.acquire)
    assert described(LockClient.keep_alive) >= HOLD - ACQUIRE


@pytest.mark.parametrize("options", [ClaimOptions, AcquireOptions, HoldOptions])
def test_each_option_has_a_comment_that_describes_it(options: type) -> None:
    lines = [line.strip() for line in inspect.getsource(options).splitlines()]
    for before, line in pairwise(lines):
        if re.match(r"\w+: ", line):
            assert before.startswith("#: "), line


@pytest.mark.parametrize("format", [each for each in FORMATS if each != NATIVE])
@pytest.mark.parametrize("name", sorted(CLAIM - IN_ALL_FORMATS - IGNORED_IN_OTHER_FORMATS.keys()))
def test_a_foreign_format_refuses_options_that_it_does_not_support(name: str, format: str) -> None:
    of_format = ClientCore("locks", "me", 30.0, None, 15.0, 10.0, format)
    with pytest.raises(LockValueError, match=r"cannot|keeps bytes"):
        of_format.claims.of("k", VALUES[name])  # type: ignore[arg-type]


# -- in DAGs


def grouped(**arguments: Any) -> Any:
    with (lock := DynamoLock(**arguments)):
        EmptyOperator(task_id="guarded")
    return lock.acquire


def decorated(**arguments: Any) -> Any:
    def work() -> None: ...

    made: Any = dynamo_lock_task(work, **arguments)
    return made().operator


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "DynamoLock": grouped,
    "DynamoLockAcquireOperator": lambda **given: DynamoLockAcquireOperator(task_id="a", **given),
    "DynamoLockOperator": lambda **given: DynamoLockOperator(task_id="a", python_callable=print, **given),
    "@task.dynamo_lock": decorated,
}
IN_DAGS = ACQUIRE - NOT_IN_AIRFLOW.keys() - NOT_IN_DAGS.keys()


@pytest.fixture(params=OPERATORS)
def create(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a function that creates an operator that acquires a lock."""

    def make(**arguments: Any) -> Any:
        with DAG("dag"):
            return OPERATORS[request.param](key="k", **arguments)

    return make


def recreated(trigger: Any) -> Any:
    """Return a trigger as Airflow recreates it in the triggerer."""
    _, arguments = trigger.serialize()
    return type(trigger)(**arguments)


class Client:
    """A client that raises the options of each call."""

    def acquire(self, keys: Any, **options: Any) -> Any:
        raise Captured(**options)

    def look(self, key: str, **options: Any) -> Any:
        raise Captured(**options)

    wait = look


TI: Any = SimpleNamespace(
    id="mine", dag_id="dag", run_id="run", task_id="a", map_index=-1, try_number=1, dag_version_id="v"
)


async def options_on_worker(operator: Any) -> Mapping[str, Any]:
    """Return the options that an operator on a worker passes to the client."""
    wanted = lock_options.Wanted.of(operator)
    with pytest.raises(Captured) as captured:
        operator._wait_here(Client(), wanted, lock_options.claim_options(TI, LockSettings(), wanted))
    return captured.value.options


async def options_in_triggerer(operator: Any) -> Mapping[str, Any]:
    """Return the options that the trigger of an operator passes to the client."""
    trigger = recreated(DynamoLockAcquireTrigger(**operator._trigger_arguments()))
    wanted = lock_options.Wanted.of(trigger)
    with pytest.raises(Captured) as captured:
        await trigger._acquire(Client(), wanted, lock_options.claim_options(TI, LockSettings(), wanted))
    return captured.value.options


@pytest.mark.parametrize("options_of", [options_on_worker, options_in_triggerer])
@pytest.mark.parametrize("name", sorted(IN_DAGS))
async def test_an_option_in_a_dag_reaches_the_client(
    create: Callable[..., Any], name: str, options_of: Callable[..., Any]
) -> None:
    captured = await options_of(create(**VALUES[name]))
    assert captured.keys() == ACQUIRE - NOT_IN_AIRFLOW.keys()
    assert VALUES[name].items() <= captured.items()


def test_an_option_in_a_dag_may_be_a_template_and_reaches_the_trigger(create: Callable[..., Any]) -> None:
    operator = create()
    assert set(operator.template_fields) >= {"key", "dynamo_lock_conn_id"} | IN_DAGS
    # `on_wait` is not a template, and is passed on only if it is set (test_alerts.py).
    assert set(operator._trigger_arguments()) - {"resume"} == (ONLY_IN_DAGS | IN_DAGS) - {"on_wait"}
    assert set(DynamoLockAcquireTrigger.arguments) >= ONLY_IN_DAGS | IN_DAGS
    assert lock_options.PARAMETERS.keys() == {"key"} | IN_DAGS
    assert LockSpec.__annotations__.keys() == LockOptions.__annotations__.keys() == IN_DAGS - {"timeout"}


def test_an_option_in_a_dag_is_a_documented_parameter() -> None:
    group, operator = parameters(DynamoLock), parameters(Acquires)
    assert group == ONLY_IN_DAGS | ONLY_IN_GROUP | IN_DAGS == described(DynamoLock) - {"kwargs"}
    assert operator == ONLY_IN_DAGS | ONLY_IN_OPERATOR | IN_DAGS == described(DynamoLockAcquireOperator)
    page = (DOCS / "airflow.md").read_text()
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \|", page.partition("\n| parameter |")[2].partition("\n\n")[0], re.M
    )
    assert {name for row in rows for name in code(row)} == group


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"rendered to 'None', which names no resource: correct the template"),
        (" \n", r"rendered to ' \\n', which names no resource: correct the template"),
        (["a", "b"], r"""rendered to the text "\['a', 'b'\]", not to a list: {several}"""),
        (("a", "b"), r"""rendered to the text "\('a', 'b'\)", not to a list: {several}"""),
        ([], r"rendered to the text '\[\]', not to a list: {several}"),
    ],
)
async def test_a_template_that_renders_to_no_key_is_refused(
    value: Any, message: str, sensor_client: None
) -> None:
    template = "{{ params.tables }}"
    with DAG("dag"):
        one = DynamoLockAcquireOperator(task_id="one", key=template)
        several = DynamoLockAcquireOperator(task_id="several", key=["k", template])
        sensor = DynamoLockSensor(task_id="sensor", key=template)
    context: Any = {"params": {"tables": value}}
    for operator in (one, several, sensor):
        operator.render_template_fields(context)
    for operator in (one, several):
        trigger = recreated(DynamoLockAcquireTrigger(**operator._trigger_arguments()))
        for task in (operator, trigger):
            with pytest.raises(LockValueError, match=message.format(several="use a list of templates, or ")):
                lock_options.Wanted.of(task)
    one_key = message.format(several="use a sensor for each key")
    with pytest.raises(LockValueError, match=one_key):
        sensor.poke({})
    with pytest.raises(LockValueError, match=one_key):
        await recreated(DynamoLockSensorTrigger(**sensor._trigger_arguments())).work()


async def test_a_mode_of_a_sensor_that_renders_to_no_mode_is_named_by_its_parameter(
    sensor_client: None,
) -> None:
    with DAG("dag"):
        sensor = DynamoLockSensor(task_id="sensor", key="k", lock_mode="{{ params.mode }}")
    sensor.render_template_fields({"params": {"mode": "both"}})
    message = "^lock_mode must be 'shared' or 'exclusive', not 'both'"
    with pytest.raises(LockValueError, match=message):
        sensor.poke({})
    with pytest.raises(LockValueError, match=message):
        await recreated(DynamoLockSensorTrigger(**sensor._trigger_arguments())).work()


def test_a_key_may_have_brackets() -> None:
    for key in ("[orders]", "(a", "[1", "[" * 2048, "{ds}", "1, 2", "None of these", " k "):
        assert lock_options.checked_keys(key) == (key,)


# -- the sensor


@pytest.fixture
def sensor_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sensors and their triggers call a `Client`."""

    @asynccontextmanager
    async def async_client(_: Any) -> AsyncIterator[tuple[Any, LockSettings]]:
        yield Client(), LockSettings()

    monkeypatch.setattr("airflow_dynamo_lock.airflow.hooks.DynamoLockHook.async_client", async_client)
    monkeypatch.setattr("airflow_dynamo_lock.airflow.hooks.DynamoLockHook.get_conn", lambda _: Client())


@pytest.mark.parametrize("name", sorted(ACQUIRE - NOT_IN_SENSOR.keys()))
async def test_an_option_of_a_sensor_reaches_the_client(name: str, sensor_client: None) -> None:
    wants = {option: value for option, value in VALUES[name].items() if option not in NOT_IN_SENSOR}
    with DAG("dag"):
        sensor = DynamoLockSensor(
            task_id="a", key="k", **{IN_SENSOR.get(option, option): value for option, value in wants.items()}
        )

    with pytest.raises(Captured) as waits:
        await recreated(DynamoLockSensorTrigger(**sensor._trigger_arguments())).work()
    assert (
        waits.value.options.keys() == ACQUIRE - NOT_IN_SENSOR.keys() == parameters(LockClient.wait) - {"key"}
    )
    assert wants.items() <= waits.value.options.items()
    with pytest.raises(Captured) as looks:
        sensor.poke({})
    assert looks.value.options.keys() == parameters(LockClient.look) - {"key"}
    assert all(looks.value.options.get(option, value) == value for option, value in wants.items())
    templated = {IN_SENSOR.get(option, option) for option in looks.value.options}
    assert set(sensor.template_fields) == {"key", "dynamo_lock_conn_id"} | templated
    assert described(DynamoLockSensor) == parameters(DynamoLockSensor)


def test_the_docstring_of_the_sensor_names_the_parameters_of_airflow_that_users_need() -> None:
    # Not as `:param`: they are not in the signature, and `make docs` refuses that.
    for name in ("timeout", "soft_fail", "mode"):
        assert re.search(rf"^ *- `{name}`", DynamoLockSensor.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("operator", [DynamoLockHeartbeatOperator, DynamoLockReleaseOperator])
def test_the_docstring_of_an_operator_that_uses_a_lease_describes_its_errors(operator: type) -> None:
    assert set(re.findall(r"^ *:raises (\w+):", operator.__doc__ or "", re.MULTILINE)) == {
        "LockValueError",
        "LockNotHeldError",
    }


# -- the command line

COMMANDS = {"acquire": ACQUIRE - NOT_IN_CLI.keys(), "run": ACQUIRE - NOT_IN_CLI.keys() - NOT_IN_RUN.keys()}
ARGUMENTS = {
    "slots": ["--slots", "2", "--capacity", "3"],
    "capacity": ["--capacity", "3"],
    "data": ["--data", '{"a": 1}'],
    "lease": ["--lease-duration", "61s"],
    "owner": ["--owner", "ada"],
    "mode": ["--mode", "shared"],
    "fair": ["--unfair"],
    "priority": ["--priority", "5"],
    "timeout": ["--wait-time", "11"],
    "on_position": [],
    "holding": [],
}


@pytest.mark.parametrize(
    ("command", "name"), [(each, name) for each, names in COMMANDS.items() for name in sorted(names)]
)
def test_an_option_of_a_command_reaches_the_client(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Mapping[str, Any]] = []

    class Locks:
        def __init__(self, **options: Any) -> None:
            self.options = options

        def acquire(self, key: str, **options: Any) -> Any:
            captured.append(self.options | options)
            raise Captured

    monkeypatch.setattr(Settings, "locks", lambda self, **options: Locks(**options))
    after = ["--", "true"] if command == "run" else []
    assert run_command([command, "k", *ARGUMENTS[name], *after]) == 1
    (options,) = captured
    assert options.keys() == COMMANDS[command]
    assert name in ("on_position", "holding") or VALUES[name].items() <= options.items()


# -- the clients and the connection


@pytest.mark.parametrize("kind", [sync_client.LockClient, async_client.AsyncLockClient])
def test_a_client_passes_all_options_to_its_core(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters(kind) == {"client"} | parameters(ClientCore)
    assert described(LockClient) == parameters(LockClient)
    bound: list[Mapping[str, Any]] = []
    signature = inspect.signature(ClientCore)

    def given(*arguments: Any, **named: Any) -> ClientCore:
        bound.append(signature.bind(*arguments, **named).arguments)
        return a_core()

    for module in (tasks, threads):
        monkeypatch.setattr(module, "ClientCore", given)
    values = {name: f"the {name}" for name in parameters(ClientCore)}
    kind(None, **values)
    assert bound == [{**values, "streams": True}]
    assert session.ClientCore is ClientCore


def test_a_connection_has_a_field_for_each_setting() -> None:
    assert FIELDS.keys() == LockSettings.__dataclass_fields__.keys()
    given = {"lease": 61.0, "botocore_config": {"read_timeout": 5}, "streams": True, "format": "awsflock"}
    for name in FIELDS:
        value = given.get(name, f"the {name}")
        assert getattr(LockSettings.of({name: value}, source="a test"), name) == value
    assert {code(row[0])[0] for row in table(DOCS / "configuration.md", "The connection")} == FIELDS.keys()


def test_a_connection_has_all_client_options_that_tasks_do_not_set() -> None:
    assert LockSettings().client_options.keys() == parameters(LockClient) - NOT_IN_CONNECTION.keys()
    for name, value in LockSettings(**{n: f"the {n}" for n in ("table", "format")}).client_options.items():  # type: ignore[arg-type]
        assert value == getattr(
            LockSettings(table="the table", format="the format"), name.removeprefix("table_")
        )
