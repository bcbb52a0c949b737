"""How the engines' packages find a kvpoold again (kvpool_engines.sessions), by a clock of the test's own."""

import importlib
import logging
import pathlib
import types

import pytest

SHARED = pathlib.Path(__file__).parents[2] / "client/integrations/shared"


class Thread:
    """Is done at once."""

    def __init__(self, target, daemon):
        self.start = target


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.syspath_prepend(str(SHARED))
    sessions = importlib.import_module("kvpool_engines.sessions")
    clock = types.SimpleNamespace(now=1000.0, sessions=sessions)
    monkeypatch.setattr(sessions, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(sessions, "threading", types.SimpleNamespace(Thread=Thread))
    return clock


def takes(clock, opener, seconds, life):
    """When sessions were taken, of a daemon that lives for so many seconds, and is there again at once."""
    taken, using = [], False
    end = clock.now + seconds
    while clock.now < end:
        if using and clock.now >= taken[-1] + life:
            using = False
            opener.lost()
        elif not using and opener.take() is not None:
            taken.append(clock.now)
            using = True
        clock.now += 0.25
    return taken


def test_a_daemon_that_dies_again_and_again_is_joined_ever_more_rarely(clock, caplog):
    """Each time all requests that run are computed anew, twice."""
    opener = clock.sessions.Opener(lambda: "a session", logging.getLogger("opener"))
    opener.lost()
    taken = takes(clock, opener, 600, life=1)
    pauses = [after - before for before, after in zip(taken, taken[1:])]
    assert pauses == sorted(pauses) and 8 < len(taken) < 20
    assert pauses[0] < 4 and 60 <= pauses[-1] < 65  # It tries again for ever.
    assert len(caplog.messages) == 1 and "again and again" in caplog.messages[0]


def test_one_that_has_lived_is_joined_again_at_once(clock, caplog):
    opener = clock.sessions.Opener(lambda: "a session", logging.getLogger("opener"))
    takes(clock, opener, 200, life=1)
    for life in (100, 200):
        before, after = takes(clock, opener, 60 + 1.5 * life, life=life)
        assert after - before < life + 2
        clock.now += life
        opener.lost()
    # Only a new series of losses is told of.
    assert len(caplog.messages) == 1
    takes(clock, opener, 30, life=1)
    assert len(caplog.messages) == 2
