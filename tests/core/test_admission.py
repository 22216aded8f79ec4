"""The admission window: how many newcomers may send requests while some get no answer, and how long they pause."""

from __future__ import annotations

import pytest

from airflow_dynamo_lock.core.wait.admission import Admission, AdmissionWindow


def _newcomers(window: AdmissionWindow, number: int = 20) -> list[Admission]:
    return [Admission(window) for _ in range(number)]


def _admitted(newcomers: list[Admission]) -> list[Admission]:
    """Return the newcomers that the window admits."""
    return [each for each in newcomers if each.admit()]


def test_all_newcomers_are_admitted_while_they_get_answers() -> None:
    newcomers = _newcomers(AdmissionWindow())

    for _ in range(3):
        assert _admitted(newcomers) == newcomers
        for each in newcomers:
            each.answered()


def test_each_failure_halves_the_window_to_one_at_least() -> None:
    window = AdmissionWindow()
    newcomers = _admitted(_newcomers(window))

    sizes = []
    for each in newcomers[:5]:
        each.failed()
        sizes.append(window._size)
    assert sizes == [10, 5, 2, 1, 1]

    others = _newcomers(window, 2)
    assert not _admitted(others)
    for each in newcomers:
        each.close()
    assert _admitted(others) == others[:1]
    assert _admitted(others) == others[:1], "an admitted newcomer stays admitted"


def test_each_answer_widens_the_window_until_it_is_unlimited() -> None:
    window = AdmissionWindow()
    for each in _admitted(_newcomers(window)):
        each.failed()

    newcomer = Admission(window)
    for size in range(1, 101):
        assert window._size == size
        newcomer.admit()
        newcomer.answered()
        newcomer.answered()  # already reported
    assert len(_admitted(_newcomers(window))) == 20


def test_pauses_double_with_each_failure_and_start_again_after_an_answer() -> None:
    newcomer = Admission(AdmissionWindow())

    def pause() -> float:
        return newcomer.pause(0.5, 0.0, None)

    assert pause() == 0.5, "before its first request"
    pauses = []
    for _ in range(20):
        newcomer.failed()
        pauses.append(pause())
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, 5.0]
    assert set(pauses[5:]) == {5.0}
    newcomer.answered()
    assert pause() == 0.5
    assert newcomer.pause(60.0, 0.0, None) == 5.0


def test_jitter_at_most_doubles_a_pause_within_the_remaining_time() -> None:
    newcomer = Admission(AdmissionWindow())

    assert newcomer.pause(1.0, 0.5, None) == 1.5
    assert newcomer.pause(1.0, 0.5, 1.2) == 1.2
    assert newcomer.pause(60.0, 0.0, None) == 5.0, "it has not failed, but the window is full"
    newcomer.failed()
    assert newcomer.pause(30.0, 0.5, None) == pytest.approx(45.0), "a long poll interval is not shortened"
