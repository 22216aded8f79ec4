"""How many may ask at once, when some of those who do get no answer."""

from __future__ import annotations

from airflow_dynamo_lock.protocol.crowd import Crowd


def _ask(crowd: Crowd, *, names: str = "abcdefghijklmnopqrst") -> list[str]:
    """Those of twenty who may."""
    return [name for name in names if crowd.may_ask(name)]


def test_all_may_ask_as_long_as_they_are_answered() -> None:
    crowd = Crowd()

    for _ in range(3):
        asking = _ask(crowd)
        assert len(asking) == 20
        for each in asking:
            crowd.answered(each)


def test_half_as_many_may_ask_after_each_that_was_not_answered_and_at_last_one() -> None:
    crowd = Crowd()
    asking = _ask(crowd)

    rooms = []
    for each in asking[:5]:
        crowd.unanswered(each)
        rooms.append(crowd._room)
    assert rooms == [10, 5, 2, 1, 1]

    assert not _ask(crowd, names="uv")
    for each in asking:
        crowd.gone(each)
    assert _ask(crowd, names="uv") == ["u"]
    assert _ask(crowd, names="uv") == ["u"], "who is admitted stays so"


def test_with_each_answer_one_more_may_ask_until_nobody_is_counted() -> None:
    crowd = Crowd()
    _ask(crowd)
    for each in "abcdefghijklmnopqrst":
        crowd.unanswered(each)

    for already in range(1, 101):
        assert crowd._room == already
        crowd.may_ask("me")
        crowd.answered("me")
        crowd.answered("me")  # said already
    assert len(_ask(crowd)) == 20
