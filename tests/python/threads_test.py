"""Threads of Python around one session: waiting lets the others run, and nothing is handed out twice."""

import gc
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import kvpool
from conftest import layout


def test_waiting_lets_others_run(daemon):
    """A thread waits for blocks that the main thread gives back meanwhile: with the GIL, or the session, it never could."""
    with kvpool.Session(layout(), "a model", socket=daemon.socket, magazine_blocks=0) as session:
        all_of_it = []
        while True:
            try:
                all_of_it.append(session.lease(1, timeout=2 if not all_of_it else 0.5))
            except kvpool.KvpoolError:
                break
        got = []
        waiting = threading.Event()

        def wait():
            waiting.set()
            with session.lease(3, timeout=60) as blocks:
                got.append(len(blocks))

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        for blocks in all_of_it[:8]:
            blocks.release()
        thread.join(60)
        assert got == [3]
        for blocks in all_of_it:
            blocks.release()


def stop_and(daemon, session, call):
    """Stops the daemon, and has a thread wait for it in a call. Returns when the call is on its way."""
    session.flush()
    daemon.stop()
    before = session.counters["batches"]
    thread = threading.Thread(target=call)
    thread.start()
    while session.counters["batches"] == before:
        time.sleep(0.001)
    return thread


def test_no_view_comes_while_a_session_is_closed(daemon):
    """The daemon frees the blocks as soon as it hears of it, and others write to them."""
    session = kvpool.Session(layout(), "a model", socket=daemon.socket, magazine_blocks=0)
    blocks = session.lease(1)
    closed = []
    thread = stop_and(daemon, session, lambda: closed.append(session.close(timeout=60)))
    try:
        with pytest.raises(kvpool.ReleasedError):
            blocks.k(0)
    finally:
        daemon.go_on()
        thread.join(60)
    assert closed == [True] and session.views == 0


def test_a_flush_that_waits_lets_others_work(daemon):
    with kvpool.Session(layout(), "a model", socket=daemon.socket, magazine_blocks=0) as session:
        flushing = stop_and(daemon, session, lambda: session.flush(timeout=60))
        try:
            steps = []
            working = threading.Thread(target=lambda: steps.append(session.begin_step()))
            working.start()
            working.join(10)  # As long as the daemon is stopped the flush waits.
            assert steps == [1]
        finally:
            daemon.go_on()
            flushing.join(60)
            working.join(60)
        session.complete_step()


def test_many_threads(session):
    """Each writes its own stamp, gives way, and finds it again. Views die on any thread."""
    failures, done = [], []

    def serve(stamp):
        try:
            for i in range(60):
                with session.lease(3, timeout=60) as blocks:
                    arrays = [np.asarray(blocks.data(j)) for j in range(3)]
                    for array in arrays:
                        array[:] = stamp
                    if i % 3 == 0:
                        keys = [bytes([stamp, i, j]) + b"-" * 29 for j in range(3)]
                        session.seal(blocks, keys).wait(60)
                        with session.match(keys).wait(60) as hit:
                            assert hit.tokens == 48
                            assert all((np.asarray(hit.blocks.data(j)) == stamp).all() for j in range(3))
                    elif i % 3 == 1:
                        sequence = kvpool.LiveSequence(session)
                        sequence.append(blocks.split(1))
                        sequence.extend(range(32))
                        sequence.prune(budget_tokens=16, scorer="recency", timeout=60)
                        arrays.append(np.asarray(sequence.k(0)))
                        del sequence
                assert all((array == stamp).all() for array in arrays[:3])
            done.append(stamp)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=serve, args=(stamp,)) for stamp in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and sorted(done) == [1, 2, 3, 4, 5, 6]
    gc.collect()
    assert session.views == 0 and session.counters["refused"] == 0


def test_control_c_ends_a_wait(daemon):
    code = """
import sys, kvpool
sys.path.insert(0, sys.argv[2])
from conftest import layout
with kvpool.Session(layout(), "a model", socket=sys.argv[1]) as session:
    while session.next_notice() is not None or session.next_notice(0.2) is not None: pass
    try:
        print("waiting", flush=True)
        session.next_notice(None)
    except KeyboardInterrupt:
        print("interrupted")
"""
    child = subprocess.Popen([sys.executable, "-c", code, daemon.socket, __file__.rsplit("/", 1)[0]],
                             stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "waiting\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[0] == "interrupted\n" and child.returncode == 0


def test_an_interpreter_that_ends_with_open_sessions(daemon):
    code = """
import sys, numpy as np, kvpool
sys.path.insert(0, sys.argv[2])
from conftest import layout
session = kvpool.Session(layout(), "a model", socket=sys.argv[1])
blocks = session.lease(4)
array = np.asarray(blocks.k(0))
pending = session.match(b"x" * 32)
sequence = kvpool.LiveSequence(session)
print("end")
"""
    done = subprocess.run([sys.executable, "-c", code, daemon.socket, __file__.rsplit("/", 1)[0]], capture_output=True,
                          text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_answers_may_be_dropped(session):
    for i in range(200):
        session.match(bytes([i]) * 32)
    session.flush()
    session.check()
