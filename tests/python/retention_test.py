"""How long cached blocks stay: hints at release, priorities, pins. A pool of 14 blocks, of which the least recently used leaves."""

import gc
import signal
import struct
import time

import numpy as np
import pytest

import kvpool
from conftest import Daemon

FLAGS = ("--policy=lru", "--pin-budget=1", "--low-watermark=0", "--high-watermark=0")


# 16 blocks a slab, of which one is the null block and one the sink.
OPAQUE = kvpool.Layout.opaque(block_bytes=256 * 1024)
SCORED = kvpool.Layout.paged(layers=2, kv_heads=8, head_dim=128, tokens_per_block=16, dtype="float32")


def opened(daemon, layout=OPAQUE):
    return kvpool.Session(layout, "small", socket=daemon.socket, magazine_blocks=0)


@pytest.fixture
def daemon():
    daemon = Daemon(capacity="4MiB", flags=FLAGS)
    yield daemon
    daemon.close()


@pytest.fixture
def session(daemon):
    with opened(daemon) as session:
        yield session


def key(name):
    return name.encode().ljust(32, b".")


def sealed(session, *names):
    """A block of its own for each name, sealed under it: holds of all."""
    blocks = session.lease(len(names))
    for i, name in enumerate(names):
        assert session.seal([blocks.refs[i]], [key(name)]).wait().canonical == [blocks.refs[i]]
    return blocks


def five(session, kind):
    return sealed(session, *(f"{kind}{i}" for i in range(5)))


def cached(session, kind):
    """How many of the five are still there."""
    return sum(hit.tokens > 0 for hit in (session.match([key(f"{kind}{i}")]).wait() for i in range(5)))


def reclaim(session, blocks=10):
    """Takes more than there is beside so many cached blocks: some leave, more than are missing, and fewer than five."""
    session.flush()
    session.lease(14 - blocks + 1).release()
    session.flush()


def test_a_block_that_is_never_asked_for_again_leaves_first(session):
    five(session, "old").release()
    five(session, "new").release(reuse="never")
    reclaim(session)
    assert cached(session, "old") == 5 > cached(session, "new")


def test_without_a_hint_the_older_leave_first(session):
    five(session, "old").release()
    five(session, "new").release()
    reclaim(session)
    assert cached(session, "old") < 5 == cached(session, "new")


def test_hints_for_bare_refs(session):
    session.release(five(session, "old").detach())
    session.release(five(session, "new").detach(), reuse="never")
    reclaim(session)
    assert cached(session, "old") == 5 > cached(session, "new")


def test_a_sequence_that_is_never_continued_leaves_first(session):
    five(session, "old").release()
    keys = session.hasher().chain(range(80), 16)
    with kvpool.LiveSequence(session) as sequence:
        sequence.append(session.lease(5))
        sequence.extend(range(80))
        sequence.seal().wait()
        sequence.release(reuse="never")
        assert sequence.released
    reclaim(session)
    assert cached(session, "old") == 5
    with session.match(keys).wait() as hit:
        assert hit.tokens < 80


def test_a_hint_waits_for_the_last_view(session):
    five(session, "old").release()
    new = five(session, "new")
    arrays = [np.asarray(new.data(i)) for i in range(5)]
    new.release(reuse="never")
    reclaim(session)
    left = cached(session, "old")
    assert left < 5  # The others can't leave yet.
    del arrays  # Used last of all.
    gc.collect()
    reclaim(session, blocks=5 + left)
    assert cached(session, "old") == left and cached(session, "new") < 5


def shared(session):
    """A sequence of five full blocks that are sealed, and the keys."""
    sequence = kvpool.LiveSequence(session)
    sequence.append(session.lease(5))
    sequence.extend(range(80))
    sequence.seal().wait()
    return sequence, session.hasher().chain(range(80), 16)


def test_a_hint_binds_views_that_saw_a_prune(daemon):
    with opened(daemon, SCORED) as session:
        assert session.layout.block_bytes == OPAQUE.block_bytes
        five(session, "old").release()
        sequence, keys = shared(session)
        views = [np.asarray(sequence.k(i)) for i in range(5)]
        sequence.prune(budget_tokens=48, scorer="streaming_llm", dry_run=True)  # The views hold what it might take.
        sequence.release(reuse="never")
        del views
        gc.collect()
        reclaim(session)
        assert cached(session, "old") == 5
        with session.match(keys).wait() as hit:
            assert hit.tokens < 80


def hints(path):
    """(reuse, category) of each release with a hint in an event log; see server/events/event_log_format.h."""
    log = path.read_bytes()
    found, at = [], 32
    while at < len(log):
        kind, _, reuse, category, words = struct.unpack_from("<BBBBI", log, at)
        at += 40 + 8 * words
        if kind == 4:
            found.append((reuse, category))
    return found


def test_the_daemon_is_told_category_and_reuse(tmp_path):
    daemon = Daemon(flags=(f"--event-log={tmp_path / 'events'}",))
    with opened(daemon) as session:
        blocks = sealed(session, *"abcd")
        others = blocks.split(1)
        last = others.split(2)
        blocks.release(category=3)
        session.release(others.detach(), reuse="expected", category=15)
        last.release(reuse="unlikely")
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.wait()
    assert hints(tmp_path / "events") == [(0, 3), (1, 15), (2, 0)]
    daemon.close()


def test_views_keep_no_hint_of_a_release_that_is_refused(tmp_path):
    daemon = Daemon(flags=(f"--event-log={tmp_path / 'events'}",))
    with opened(daemon, SCORED) as session:
        sequence, _ = shared(session)
        view = np.asarray(sequence.k(1))
        step = session.begin_step()
        with pytest.raises(kvpool.DeadlineExceededError):
            sequence.prune(budget_tokens=64, scorer="streaming_llm", timeout=0.05)
        with pytest.raises(kvpool.FailedPreconditionError, match="not finished"):
            sequence.release(reuse="never")
        session.complete_step(step)
        assert sequence.finish_prune().victims == [1]
        del view  # The last that held the victim.
        gc.collect()
        sequence.release(category=7)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.wait()
    assert hints(tmp_path / "events") == [(0, 7)]
    daemon.close()


def test_hints_that_are_none(session):
    blocks = sealed(session, "a")
    with pytest.raises(kvpool.InvalidArgumentError, match="'sometimes'; must be one of unspecified, expected, unlikely, never"):
        blocks.release(reuse="sometimes")
    with pytest.raises(kvpool.InvalidArgumentError, match="ReleaseHint.category is 16; must be 0 to 15"):
        session.release(blocks, category=16)
    with pytest.raises(TypeError):
        blocks.release(0, "never")  # By keyword alone.
    assert not blocks.released  # Nothing was given back.
    with kvpool.LiveSequence(session) as sequence:
        with pytest.raises(kvpool.InvalidArgumentError, match="category is 99"):
            sequence.release(category=99)
        assert not sequence.released
    blocks.release()


def test_of_lower_priority_leaves_first(session):
    with five(session, "high") as high, five(session, "low") as low:
        session.set_retention(high, priority=90, ttl=3600)
        session.set_retention(low, priority=10, ttl=3600)
        high.release()
    reclaim(session)  # The low ones were used last.
    assert cached(session, "high") == 5 > cached(session, "low")
    assert session.counters["refused"] == 0


def pinned(daemon):
    (space,) = daemon.ctl("spaces")["spaces"]
    return int(space.get("pinned_blocks", 0))


def await_pinned(daemon, count):
    """The daemon's clock goes by itself: asks until it has come so far."""
    deadline = time.monotonic() + 60
    while pinned(daemon) != count:
        assert time.monotonic() < deadline, f"{pinned(daemon)} blocks are pinned, not {count}"


@pytest.mark.parametrize("half_life", [0.001, 0.0001])  # No time is so short that it means none.
def test_a_priority_decays(daemon, session, half_life):
    with five(session, "fade") as fade, five(session, "stay") as stay:
        session.set_retention(fade, priority=100, ttl=3600, half_life=half_life)
        session.set_retention(stay, priority=60, ttl=3600)
        stay.release()
    session.flush()
    await_pinned(daemon, 5)  # The others are back at 50, where they count against no budget.
    reclaim(session)  # They were used last.
    assert cached(session, "stay") == 5 > cached(session, "fade")


def test_a_priority_ends(daemon, session):
    with sealed(session, "a") as blocks:
        session.set_retention(blocks, priority=90, ttl=3600)
        session.flush()
        assert pinned(daemon) == 1
        session.set_retention(blocks, priority=90, ttl=0.001)
        session.flush()
        await_pinned(daemon, 0)


def test_pins_hold_and_end(session):
    with five(session, "pinned") as blocks, five(session, "other"):
        session.pin(blocks, ttl=3600)
        refs = blocks.refs
        blocks.release()
    reclaim(session)  # The pinned ones were used first.
    assert cached(session, "pinned") == 5 > cached(session, "other")
    with pytest.raises(kvpool.DeadlineExceededError):
        session.lease(14, timeout=0.2)
    session.unpin(refs)
    session.lease(14).release()
    session.flush()
    assert cached(session, "pinned") == 0


@pytest.mark.parametrize("arguments, words", [
    (dict(priority=101, ttl=60), "SetRetention.priority is 101; must be 0 to 100"),
    (dict(priority=60, ttl=0), "SetRetention.ttl is 0 ms; must be 1 to 86400000"),
    (dict(priority=60, ttl=60, half_life=-1e-5), "SetRetention.half_life is -1 ms; must be 0 to 86400000"),
    (dict(priority=60, ttl=86401), "SetRetention.ttl is 86401000 ms; must be 1 to 86400000"),
    (dict(priority=60, ttl=60, half_life=-1), "SetRetention.half_life is -1000 ms; must be 0 to 86400000"),
    (dict(priority=60, ttl=float("nan")), "ttl is nan; must be 0 to 86400 seconds"),
    (dict(priority=60, ttl=60, half_life=1e300), "half_life is 1e[+]300; must be 0 to 86400 seconds"),
])
def test_retention_beyond_its_limits(session, arguments, words):
    with sealed(session, "a") as blocks:
        with pytest.raises(kvpool.InvalidArgumentError, match=words):
            session.set_retention(blocks, **arguments)


def test_pins_beyond_their_limits(session):
    with sealed(session, "a") as blocks:
        with pytest.raises(kvpool.InvalidArgumentError, match="Pin.ttl is -3000 ms; must be 1 to 86400000"):
            session.pin(blocks, ttl=-3)
        with pytest.raises(kvpool.InvalidArgumentError, match="Unpin.blocks: 0 blocks"):
            session.unpin([])
