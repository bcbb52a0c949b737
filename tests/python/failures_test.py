"""What goes wrong, as the exception that it is, with the daemon's words."""

import os
import subprocess
import sys

import numpy as np
import pytest

import kvpool
from conftest import Daemon, kill_9, layout
from session_test import held


def test_no_daemon(tmp_path):
    with pytest.raises(kvpool.UnavailableError, match=str(tmp_path)) as raised:
        kvpool.Session(layout(), "a model", socket=str(tmp_path / "kvpoold.sock"), open_timeout=1)
    assert isinstance(raised.value, ConnectionError)


def test_a_layout_that_differs(daemon, session):
    with pytest.raises(kvpool.FailedPreconditionError, match="16.*32|32.*16"):
        kvpool.Session(layout(tokens_per_block=32), "a model", socket=daemon.socket)
    with pytest.raises(kvpool.FailedPreconditionError, match="revision"):
        kvpool.Session(layout(), "a model", socket=daemon.socket, facts={"revision": "2"})


def test_arguments(daemon):
    with pytest.raises(kvpool.InvalidArgumentError, match="float31"):
        layout("float31")
    with pytest.raises(kvpool.InvalidArgumentError, match="kind"):
        kvpool.Session(layout(), "a model", socket=daemon.socket, kind="boxes")
    with pytest.raises(kvpool.InvalidArgumentError):
        kvpool.Session(layout(), "", socket=daemon.socket)
    with pytest.raises(kvpool.ResourceExhaustedError, match="guarantee"):
        kvpool.Session(layout(), "a model", socket=daemon.socket, guaranteed_blocks=1_000_000)
    with pytest.raises(TypeError):
        kvpool.Session(layout())
    with pytest.raises(TypeError):
        kvpool.Blocks()


def test_a_daemon_that_dies():
    daemon = Daemon()
    session = kvpool.Session(layout(), "a model", socket=daemon.socket)
    blocks = session.lease(1)
    array = np.asarray(blocks.data(0))
    array[:] = 8
    daemon.kill()
    # It is seen as soon as the attach socket hangs up; what is mapped stays.
    with pytest.raises(kvpool.UnavailableError):
        while True:
            session.lease(64, timeout=1).release()
    with pytest.raises(kvpool.UnavailableError):
        session.check()
    assert (array == 8).all()
    blocks.release()
    session.close()
    daemon.close()


def test_a_close_that_is_late(daemon):
    """The daemon will free the blocks when it hears of it: until then nothing may be leased, or looked at."""
    session = kvpool.Session(layout(), "a model", socket=daemon.socket)
    blocks = session.lease(1)
    session.flush()
    daemon.stop()
    try:
        for _ in range(2):
            with pytest.raises(kvpool.DeadlineExceededError):
                session.close(timeout=0.05)
        for use in (lambda: session.lease(1, timeout=0), lambda: blocks.k(0), lambda: session.match([bytes(32)]), session.check):
            with pytest.raises(kvpool.ReleasedError):
                use()
    finally:
        daemon.go_on()
    assert session.close(timeout=60) and session.base == 0
    assert daemon.ctl("sessions").get("sessions", []) == []


def test_a_lease_of_more_than_there_can_be(daemon):
    with kvpool.Session(layout(), "a model", socket=daemon.socket, max_blocks=10) as session:
        for count in (11, session.max_blocks - 1, 2**32 - 1):
            with pytest.raises(kvpool.ResourceExhaustedError, match=f"{count} blocks asked; this session can never have more than 10"):
                session.lease(count, timeout=60)
        session.lease(10).release()


def test_a_session_that_an_operator_ends(daemon, session):
    daemon.ctl("end", f"--session={session.id}")
    with pytest.raises(kvpool.KvpoolError) as raised:
        while True:
            session.lease(64, timeout=1).release()
    assert isinstance(raised.value, kvpool.SessionEndedError)


ENGINE = """
import sys, numpy as np, kvpool
sys.path.insert(0, sys.argv[2])
from conftest import layout
session = kvpool.Session(layout(), "a model", socket=sys.argv[1])
blocks = session.lease(8)
for i in range(8): np.asarray(blocks.data(i))[:] = i
sealed = blocks.split(4)
session.seal(sealed, session.hasher().chain(range(64), 16)).wait()
print("ready", flush=True)
sys.stdin.read()
"""


def test_kill_9_of_another_engine(daemon, session):
    """What it sealed stays, and is right; what it leased comes back."""
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, daemon.socket, os.path.dirname(__file__)],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdout.readline() == "ready\n"
    kill_9(engine)
    with session.match(session.hasher().chain(range(64), 16)).wait() as hit:
        assert hit.tokens == 64
        assert [int(np.asarray(hit.blocks.data(i)).max()) for i in range(4)] == [4, 5, 6, 7]
    engine.stdin.close(), engine.stdout.close()
    while held(daemon)["quarantined"] > 0:  # Until its pidfd has fired.
        session.flush()
    assert held(daemon)["leased"] <= 1 + 16


def test_a_fork_has_nothing(session):
    with session.lease(1) as blocks:
        child = os.fork()
        if child == 0:
            try:
                blocks.k(0)
            except kvpool.FailedPreconditionError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        np.asarray(blocks.k(0))[:] = 1  # The parent's are its own still.


def test_exceptions_are_what_python_calls_them():
    assert issubclass(kvpool.InvalidArgumentError, ValueError)
    assert issubclass(kvpool.NotFoundError, LookupError)
    assert issubclass(kvpool.UnavailableError, OSError)
    assert issubclass(kvpool.DeadlineExceededError, TimeoutError)
    assert issubclass(kvpool.ReleasedError, kvpool.FailedPreconditionError)
    assert all(issubclass(getattr(kvpool, name), kvpool.KvpoolError) for name in kvpool.errors.__all__)
