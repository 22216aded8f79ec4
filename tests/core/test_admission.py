"""How many may ask at once, when some of those who do get no answer, and how long they wait to ask again."""

from __future__ import annotations

import pytest

from airflow_dynamo_lock.core.wait.admission import Admission, AdmissionWindow


def _some(window: AdmissionWindow, number: int = 20) -> list[Admission]:
    return [Admission(window) for _ in range(number)]


def _asking(askers: list[Admission]) -> list[Admission]:
    """Those of them who may."""
    return [each for each in askers if each.admit()]


def test_all_is_admitted_as_long_as_they_are_answered() -> None:
    askers = _some(AdmissionWindow())

    for _ in range(3):
        assert _asking(askers) == askers
        for each in askers:
            each.answered()


def test_half_as_many_is_admitted_after_each_that_was_not_answered_and_at_last_one() -> None:
    window = AdmissionWindow()
    askers = _asking(_some(window))

    sizes = []
    for each in askers[:5]:
        each.failed()
        sizes.append(window._size)
    assert sizes == [10, 5, 2, 1, 1]

    others = _some(window, 2)
    assert not _asking(others)
    for each in askers:
        each.close()
    assert _asking(others) == others[:1]
    assert _asking(others) == others[:1], "who is admitted stays so"


def test_with_each_answer_one_more_is_admitted_until_nobody_is_counted() -> None:
    window = AdmissionWindow()
    for each in _asking(_some(window)):
        each.failed()

    me = Admission(window)
    for already in range(1, 101):
        assert window._size == already
        me.admit()
        me.answered()
        me.answered()  # said already
    assert len(_asking(_some(window))) == 20


def test_pauses_grow_with_each_failure_to_some_seconds_and_begin_anew_with_an_answer() -> None:
    asker = Admission(AdmissionWindow())

    def pause() -> float:
        return asker.pause(0.5, 0.0, None)

    assert pause() == 0.5, "before it has asked"
    pauses = []
    for _ in range(20):
        asker.failed()
        pauses.append(pause())
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, 5.0]
    assert set(pauses[5:]) == {5.0}
    asker.answered()
    assert pause() == 0.5
    assert asker.pause(60.0, 0.0, None) == 5.0


def test_a_pause_is_up_to_twice_as_long_but_no_longer_than_there_is_time() -> None:
    asker = Admission(AdmissionWindow())

    assert asker.pause(1.0, 0.5, None) == 1.5
    assert asker.pause(1.0, 0.5, 1.2) == 1.2
    assert asker.pause(60.0, 0.0, None) == 5.0, "it is only not its turn yet"
    asker.failed()
    assert asker.pause(30.0, 0.5, None) == pytest.approx(45.0), "it is not shortened either"
