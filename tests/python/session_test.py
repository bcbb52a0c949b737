"""Sessions: leases, matches, seals, fences, notices; what is released, and when."""

import contextlib

import numpy as np
import pytest

import kvpool
from conftest import in_child, layout
from daemon import Daemon

TOKENS = np.arange(64)


def held(daemon):
    """Blocks of the daemon's one space that are not free and not cached: leased, sealed and quarantined."""
    (space,) = daemon.ctl("spaces")["spaces"]
    blocks = space["blocks"]
    return {state: int(blocks.get(state, 0)) for state in ("leased", "sealed", "quarantined", "cached", "free")}


def test_a_second_process_finds_what_the_first_one_sealed(daemon, session):
    keys = session.hasher().chain(TOKENS, 16)
    with session.lease(4) as blocks:
        for i in range(4):
            np.asarray(blocks.data(i))[:] = 40 + i
        outcome = session.seal(blocks, keys).wait()
        assert outcome.canonical == blocks.refs and not outcome.refused and len(outcome.duplicates) == 0
    printed = in_child("""
import sys, numpy as np, kvpool
sys.path.insert(0, sys.argv[2])
from conftest import layout
with kvpool.Session(layout(), "a model", socket=sys.argv[1]) as session:
    with session.match(session.hasher().chain(range(64), 16)).wait() as hit:
        print(hit.tokens, hit.miss, [int(np.asarray(hit.blocks.data(i))[17]) for i in range(len(hit.blocks))])
""", daemon, __file__.rsplit("/", 1)[0])
    assert printed == "64 none [40, 41, 42, 43]\n"


def test_a_shorter_match_says_why(session):
    keys = session.hasher().chain(TOKENS, 16)
    with session.lease(2) as blocks:
        session.seal(blocks, keys[:2]).wait()
    with session.match(keys).wait() as hit:
        assert (hit.tokens, hit.miss, len(hit.blocks)) == (32, "never_seen", 2)
    # Another salt: nothing in common.
    with session.match(session.hasher(b"salt").chain(TOKENS, 16)).wait() as hit:
        assert hit.tokens == 0


def test_what_has_left_the_pool_is_waited_for(tmp_path):
    daemon = Daemon(flags=[f"--tier=file:{tmp_path}/tier,capacity=64MiB"])
    try:
        with kvpool.Session(layout(), "a model", socket=daemon.socket) as session:
            keys = session.hasher().chain(TOKENS, 16)
            with session.lease(4) as blocks:
                for i in range(4):
                    np.asarray(blocks.data(i))[:] = 40 + i
                session.seal(blocks, keys).wait()
            session.flush()
        daemon.process.terminate()  # An orderly end: what is cached goes below.
        assert daemon.process.wait(60) == 0
        daemon.start()
        with kvpool.Session(layout(), "a model", socket=daemon.socket) as session:
            assert session.hasher().chain(TOKENS, 16) == keys
            with session.match(keys).wait() as hit:
                assert (hit.tokens, hit.below_tokens, hit.may_be_below) == (0, 64, False)
            with session.match_groups([(0, keys)], wait_ms=60000).wait(60) as hit:
                assert (hit.tokens, hit.below_tokens) == (64, 0)
                assert [int(np.asarray(hit.blocks.data(i))[17]) for i in range(4)] == [40, 41, 42, 43]
            with pytest.raises(kvpool.InvalidArgumentError, match="wait_ms: 60001, where at most 60000 are allowed"):
                session.match(keys, wait_ms=60001)
            session.report_prefill(512, 1024, 8400)
            with pytest.raises(kvpool.InvalidArgumentError, match="prefill.tokens is 0; must be 1 to 16777216"):
                session.report_prefill(0, 1024, 8400)
    finally:
        daemon.close()


def test_a_duplicate_stays_private(session):
    keys = session.hasher().chain(TOKENS[:16], 16)
    with session.lease(1) as first, session.lease(1) as second:
        session.seal(first, keys).wait()
        outcome = session.seal(second, keys).wait()
        assert outcome.canonical == first.refs != second.refs
        assert outcome.duplicates.refs == first.refs
        outcome = session.seal(second, keys, leave_duplicates=True).wait()
        assert outcome.canonical == [0] and not outcome.refused and len(outcome.duplicates) == 0


def test_leases_come_back(daemon):
    with kvpool.Session(layout(), "a model", socket=daemon.socket, magazine_blocks=0) as session:
        with session.lease(10):
            assert held(daemon)["leased"] == 1 + 10  # One is the sink.
        session.flush()
        assert held(daemon)["leased"] == 1
        blocks = session.lease(10)
        assert held(daemon)["leased"] == 1 + 10
        del blocks  # A handle that nobody has gives back what it held.
        session.flush()
        assert held(daemon)["leased"] == 1


def test_a_lease_that_cannot_be(session):
    with pytest.raises(kvpool.ResourceExhaustedError, match="100000"):
        session.lease(100_000, timeout=0)
    with session.lease(1), pytest.raises(kvpool.DeadlineExceededError) as refused:
        session.lease(session.max_blocks - 2, timeout=0.2)
    assert isinstance(refused.value, TimeoutError)


def test_memory_goes_back_as_the_engine_says(daemon):
    for give_back in ("never", "by_call", "any_time"):
        with kvpool.Session(layout(), "a model", socket=daemon.socket, give_back=give_back) as session:
            assert session.slabs_asked_back == 0 and session.give_back_slabs() == 0
            assert session.asked_back_within is None
    with pytest.raises(kvpool.ReleasedError):
        session.give_back_slabs()
    with pytest.raises(kvpool.InvalidArgumentError, match='give_back is "sometimes"'):
        kvpool.Session(layout(), "a model", socket=daemon.socket, give_back="sometimes")


def test_verbs_wait_for_their_step(session):
    keys = session.hasher().chain(TOKENS[:16], 16)
    step = session.begin_step()
    with session.lease(1) as blocks:
        pending = session.seal(blocks, keys)
        session.flush()
        assert not pending.ready and session.passed_step < step
        with session.match(keys).wait() as hit:
            assert hit.tokens == 0  # Parked: it has changed nothing.
        session.complete_step()
        assert pending.wait().canonical == blocks.refs and session.passed_step == step


def test_bare_refs(daemon):
    with kvpool.Session(layout(), "a model", socket=daemon.socket, magazine_blocks=0) as session:
        before = held(daemon)
        refs = session.lease(3).detach()
        assert [kvpool.block_id(ref) for ref in refs] == [ref % 2**32 for ref in refs]
        session.seal(refs, session.hasher().chain(TOKENS[:48], 16)).wait()
        assert held(daemon)["sealed"] == before["sealed"] + 3
        session.touch(refs)
        session.pin(refs, ttl=60)
        session.unpin(refs)
        session.set_retention(refs, priority=80, ttl=60)
        again = session.ref(refs)
        session.release(refs)
        session.flush()
        assert held(daemon)["sealed"] == before["sealed"] + 3
        again.release()
        session.flush()
        assert held(daemon)["sealed"] == before["sealed"] and held(daemon)["cached"] == before["cached"] + 3
        assert session.counters["refused"] == 0


def test_refusals_without_a_call_that_waits(session):
    stale = 7 << 32 | 9
    session.pin([stale], ttl=1)
    session.flush()
    ((verb, blocks, why),) = session.take_refusals()
    assert (verb, blocks) == ("pin", 1) and why.startswith("block 9 generation 7 is stale")
    assert session.take_refusals() == []


def test_split_and_extend(session):
    blocks = session.lease(5)
    refs = blocks.refs
    tail = blocks.split(2)
    assert blocks.refs == refs[:2] and tail.refs == refs[2:]
    blocks.extend(tail)
    assert blocks.refs == refs and tail.released
    with pytest.raises(kvpool.InvalidArgumentError):
        blocks.split(6)
    blocks.release()


def test_several_groups(daemon):
    plane = dict(layer_stride=1024, token_stride=64, head_stride=64, dim_stride=4)
    groups = [kvpool.LayerGroup(name=name, layers=layers, tokens_per_block=16, window_tokens=window, kv_heads=1,
                                k_head_dim=16, v_head_dim=16, dtype="float32", k=kvpool.Plane(offset=0, **plane),
                                v=kvpool.Plane(offset=1024 * len(layers), **plane))
              for name, layers, window in (("full", [0, 2], 0), ("sliding", [1, 3], 32))]
    two = kvpool.Layout(groups, block_bytes=4096)
    with kvpool.Session(two, "a hybrid", socket=daemon.socket) as session:
        keys = session.hasher().chain(TOKENS, 16)
        with session.lease(4) as full, session.lease(4) as sliding:
            np.asarray(full.k(0, layer=1))[:] = 5
            assert np.asarray(full.k(0)).shape == (2, 16, 1, 16) and np.asarray(full.k(0))[1].min() == 5
            session.seal(full, keys, group=0).wait()
            session.seal(sliding, keys, group=1).wait()
        with session.match_groups([(0, keys), (1, keys)]).wait() as hit:
            assert hit.tokens == 64 and [len(group) for group in hit.groups] == [4, 4]
            # Before the window nobody reads: no block.
            assert hit.groups[1].refs[0] == 0 and hit.groups[1].refs[3] != 0
            with pytest.raises(kvpool.InvalidArgumentError):
                hit.groups[1].k(0, group=1)
            # A branch that forks off holds what there is.
            with session.ref(hit.groups[1]) as again, session.ref([0]):
                session.flush()
                session.check()
                assert again.refs == hit.groups[1].refs


def test_members_of_one_session(daemon):
    with kvpool.Session(layout(), "a model", socket=daemon.socket, device_uuids=["host"]) as session:
        with pytest.raises(kvpool.KvpoolError):  # Its only rank is taken.
            kvpool.Session(layout(), "a model", socket=daemon.socket, invitation=session.invitation())
        scheduler = kvpool.Session(layout(), "a model", socket=daemon.socket, scheduler=True,
                                   invitation=session.invitation())
        assert scheduler.id == session.id


def test_warmup_writes_go_nowhere(daemon):
    with kvpool.Session(layout(), "a model", socket=daemon.socket, warmup=True) as session:
        np.asarray(session.data(4))[:] = 255
        session.finish_warmup()
        assert np.asarray(session.data(4)).max() == 0
        with session.lease(1, timeout=30) as blocks:
            assert blocks.ids[0] > 0


def test_notices(daemon, session):
    assert session.next_notice(timeout=30).kind == "capacity"
    daemon.ctl("drain")
    notice = session.next_notice(timeout=30)
    while notice.kind == "capacity":
        notice = session.next_notice(timeout=30)
    assert notice.kind == "drain" and notice.on and session.draining
    assert session.next_notice() is None


def test_tokens_and_keys(session):
    hasher = session.hasher()
    keys = hasher.chain(list(range(32)), 16)
    assert keys == hasher.chain(np.arange(32, dtype=np.int32), 16) == hasher.chain(np.arange(32), 16)
    assert keys[0] == hasher.next(hasher.root, range(16)) and keys[1] == hasher.next(keys[0], range(16, 32))
    assert keys[0] != hasher.next(hasher.root, range(16), [b"adapter"])
    assert kvpool.PrefixHasher(session.hash_seed).root == hasher.root
    soft = kvpool.PrefixHasher(session.hash_seed, b"salt", salt_from=20)
    salted = soft.chain(range(48), 16)
    assert salted == session.hasher(b"salt", salt_from=np.int64(31)).chain(range(48), 16) and soft.root == hasher.root
    assert salted[0] == keys[0] and salted[1] != keys[1]
    assert salted[2] == soft.next(salted[1], range(32, 48), position=32) == hasher.next(salted[1], range(32, 48))
    with pytest.raises(kvpool.InvalidArgumentError, match="position is None; must be that of the first token"):
        soft.next(soft.root, range(16))
    with pytest.raises(kvpool.InvalidArgumentError, match="position is -1; must be 0 to 18446744073709551615"):
        soft.next(soft.root, range(16), position=-1)
    for wrong in (-1, 2**64):
        with pytest.raises(kvpool.InvalidArgumentError, match=f"salt_from is {wrong}; must be 0 to 18446744073709551615"):
            session.hasher(b"salt", salt_from=wrong)
    for wrong in (True, 1.0, "1"):
        for make in (session.hasher, lambda **more: kvpool.PrefixHasher(b"seed", **more), lambda **more: kvpool.LiveSequence(session, **more)):
            with pytest.raises(TypeError, match=f"salt_from is {wrong!r}; must be an int"):
                make(salt=b"salt", salt_from=wrong)
    with pytest.raises(kvpool.InvalidArgumentError, match=r"tokens\[1\]: -7"):
        hasher.chain(np.array([1, -7]), 1)
    with pytest.raises(kvpool.InvalidArgumentError, match="4294967296"):
        hasher.chain([2**32], 1)
    with pytest.raises(TypeError):
        hasher.chain(["a"], 1)
    with pytest.raises(kvpool.InvalidArgumentError, match=r"keys\[1\] has 7 bytes; keys\[0\] has 8"):
        session.match([b"12345678", b"1234567"])
    with pytest.raises(TypeError, match=r"keys\[1\] is 'abc'; must be bytes"):
        session.match([b"abc", "abc"])
    with pytest.raises(TypeError, match="keys is 7; must be bytes, or a list of bytes"):
        session.match(7)


def test_ranks_that_name_one_device_have_a_part_of_it_each():
    with contextlib.closing(Daemon(device="host,host,host", capacity="16MiB")) as daemon:
        named, others = (kvpool.Session(layout(), model, socket=daemon.socket, ranks=3, scheduler=True, device_uuids=devices)
                         for model, devices in (("named", ["host"] * 3), ("others", [])))
        with named, others:
            assert named.max_blocks == others.max_blocks
