"""Episodes: block sets under names, found again by what they are about."""

import gc

import numpy as np
import pytest

import kvpool
from conftest import layout
from session_test import held


def filled(session, count, value):
    blocks = session.lease(count)
    for i in range(count):
        np.asarray(blocks.data(i))[:] = value
    return blocks


def put(session, name, centroid, value, **table):
    """A set of two blocks that nobody else holds."""
    with filled(session, 2, value) as blocks:
        return session.put_episode(name, centroid, [kvpool.BlockTable(blocks, **table)]).wait()


@pytest.fixture
def session(daemon):
    with kvpool.Session(layout(), "a model", socket=daemon.socket, magazine_blocks=0) as session:
        yield session


def test_a_question_is_answered_from_the_nearest_set(session):
    assert put(session, "travel", [0, 1, 0], 11).episodes == 1
    assert put(session, "money", np.array([1, 0, 0.5]), 22).episodes == 2
    with session.choose_episode([0.1, 1, 0.2]).wait() as hit:
        assert hit.name == "travel" and hit.similarity == pytest.approx(1 / np.sqrt(1.05))
        (table,) = hit.tables
        assert (table.group, table.last_block_tokens, len(table.blocks)) == (0, 0, 2)
        assert {int(np.asarray(table.blocks.data(i))[5]) for i in range(2)} == {11}
        assert not np.asarray(table.blocks.k(0)).flags.writeable
    assert table.blocks.released
    with session.choose_episode(np.array([1, 0.1, 0.5], np.float32)).wait() as hit:
        assert hit.name == "money" and np.asarray(hit.tables[0].blocks.data(1))[5] == 22
    with session.choose_episode(name="travel").wait() as hit:
        assert (hit.name, hit.similarity) == ("travel", 0)


def test_a_set_holds_its_blocks_and_so_does_a_choice(daemon, session):
    put(session, "a", [1, 0], 1)
    session.flush()
    assert held(daemon)["leased"] == 1 + 2  # One is the sink.
    hit = session.choose_episode([1, 0]).wait()
    removed = session.remove_episode("a").wait()
    assert (removed.episodes, removed.released) == (0, 2)
    array = np.asarray(hit.tables[0].blocks.data(0))
    assert held(daemon)["leased"] == 1 + 2 and array[0] == 1
    hit.release()
    session.flush()
    assert held(daemon)["leased"] == 1 + 1  # What is looked at.
    del array
    gc.collect()
    session.flush()
    assert held(daemon)["leased"] == 1
    assert session.remove_episode("a").wait().released == 0  # There is none: nothing.


def test_what_nobody_waits_for_goes_back(daemon, session):
    put(session, "a", [1, 0], 1)
    for _ in range(3):
        session.choose_episode([1, 0])
    session.flush()
    assert session.remove_episode("a").wait().released == 2
    session.flush()
    assert held(daemon)["leased"] == 1


def test_a_name_that_is_put_again(session):
    put(session, "a", [1, 0], 1)
    again = put(session, "a", [0, 1], 2, last_block_tokens=7)
    assert (again.episodes, again.released) == (1, 2)
    with session.choose_episode([1, 1]).wait() as hit:
        assert hit.tables[0].last_block_tokens == 7 and np.asarray(hit.tables[0].blocks.data(0))[0] == 2


def test_a_sequence_is_kept(session):
    with kvpool.LiveSequence(session) as sequence:
        sequence.append(filled(session, 3, 9))
        sequence.extend(range(40))
        sequence.compact(keep=range(0, 40, 2))
        refs = sequence.refs
        session.put_episode("even", [1], [sequence]).wait()
    with session.choose_episode([1]).wait() as hit:
        assert hit.tables[0].blocks.refs == refs and hit.tables[0].last_block_tokens == 4
        # And goes on from there, as the engine's own table.
        table = hit.tables[0]
        pruned = session.prune(table.blocks.detach(), last_block_tokens=table.last_block_tokens, budget_tokens=16,
                               scorer="streaming_llm", dry_run=True).wait()
        assert pruned.kept_tokens == 20  # A last block that is not full is not counted.
        session.release(refs)


def test_it_waits_for_its_step(session):
    step = session.begin_step()
    with filled(session, 1, 3) as blocks:
        pending = session.put_episode("late", [1], [kvpool.BlockTable(blocks)])
        with pytest.raises(kvpool.DeadlineExceededError):
            pending.wait(timeout=0.05)
        with pytest.raises(kvpool.NotFoundError, match="has no episodes"):
            session.choose_episode([1]).wait()
        with filled(session, 1, 4) as others:
            assert session.put_episode("now", [1], [kvpool.BlockTable(others)], after=0).wait().episodes == 1
            gone = session.remove_episode("now", after=0).wait()
            assert (gone.episodes, gone.released) == (0, 1)
        session.complete_step(step)
        assert pending.wait().episodes == 1
    with session.choose_episode(name="late").wait() as hit:
        assert hit.name == "late"


def test_a_table_in_each_group(daemon):
    plane = dict(layer_stride=1024, token_stride=64, head_stride=64, dim_stride=4)
    groups = [kvpool.LayerGroup(name=name, layers=[layer], tokens_per_block=16, kv_heads=1, k_head_dim=16, v_head_dim=16,
                                dtype="float32", k=kvpool.Plane(offset=0, **plane), v=kvpool.Plane(offset=1024, **plane))
              for layer, name in enumerate(("first", "second"))]
    two = kvpool.Layout(groups, block_bytes=2048)
    with kvpool.Session(two, "two tables", socket=daemon.socket) as session:
        with session.lease(1) as first, session.lease(2) as second:
            tables = [kvpool.BlockTable(first), kvpool.BlockTable(second, group=1, last_block_tokens=5)]
            with pytest.raises(kvpool.InvalidArgumentError, match="ascending|behind"):
                session.put_episode("both", [1], tables[::-1]).wait()
            session.put_episode("both", [1], tables).wait()
            expected = [(0, first.refs, 0), (1, second.refs, 5)]
        with session.choose_episode([2]).wait() as hit:
            assert [(table.group, table.blocks.refs, table.last_block_tokens) for table in hit.tables] == expected


def test_bad_sets(daemon, session):
    with session.lease(2) as blocks, kvpool.Session(layout(), "another", socket=daemon.socket) as other:
        table = kvpool.BlockTable(blocks)
        for name, centroid, tables, words in (
                ("a", [1], [], "tables: none"),
                ("", [1], [table], "put_episode.name has 0 bytes; must have 1 to 128"),
                ("a" * 129, [1], [table], "put_episode.name has 129 bytes; must have 1 to 128"),
                ("a", [], [table], "put_episode.centroid has 0|put_episode.centroid is 0"),
                ("a", [1, float("nan")], [table], "put_episode.centroid"),
                ("a", [1], [kvpool.BlockTable(blocks, last_block_tokens=17)], "last_block_tokens is 17; must be 0 to 16"),
                ("a", [1], [kvpool.BlockTable(blocks, group=1)], "group")):
            with pytest.raises(kvpool.InvalidArgumentError, match=words):
                session.put_episode(name, centroid, tables).wait()
        with pytest.raises(kvpool.InvalidArgumentError, match=r"tables\[0\]: blocks of another session"):
            other.put_episode("a", [1], [table])
        for wrong in (blocks, blocks.refs, None):
            with pytest.raises(TypeError, match=r"tables\[0\] is .*; must be a LiveSequence or a BlockTable"):
                session.put_episode("a", [1], [wrong])
        with pytest.raises(TypeError, match="ref makes them of bare refs"):
            kvpool.BlockTable(blocks.refs)
        session.put_episode("a", [1, 0], [table]).wait()
        with pytest.raises(kvpool.InvalidArgumentError, match="centroid has 3 numbers; the session's others have 2"):
            session.put_episode("b", [1, 0, 0], [table]).wait()
    with pytest.raises(kvpool.ReleasedError):
        session.put_episode("a", [1, 0], [table])


def test_bad_questions(session):
    with pytest.raises(kvpool.NotFoundError, match="has no episodes"):
        session.choose_episode([1]).wait()
    put(session, "a", [1, 0], 1)
    with pytest.raises(kvpool.NotFoundError, match="1 episodes, none of this name"):
        session.choose_episode(name="b").wait()
    with pytest.raises(kvpool.InvalidArgumentError, match="embedding has 3 numbers; the session's centroids have 2"):
        session.choose_episode([1, 2, 3]).wait()
    for neither_or_both in (dict(), dict(embedding=[1, 0], name="a")):
        with pytest.raises(kvpool.InvalidArgumentError, match="must have one of the two"):
            session.choose_episode(**neither_or_both).wait()
    for no_numbers, words in ((["a"], r"embedding\[0\] is 'a'; must be a number"),
                              ([1, None], r"embedding\[1\] is None; must be a number"),
                              (3, "embedding is 3; must be a list of numbers, or an array"),
                              ("ab", r"embedding\[0\] is 'a'; must be a number")):
        with pytest.raises(TypeError, match=words):
            session.choose_episode(no_numbers)
    with pytest.raises(TypeError, match=r"centroid\[1\] is \[\]; must be a number"):
        put(session, "b", [1, []], 1)


def test_of_a_session_that_is_closed(daemon):
    session = kvpool.Session(layout(), "a model", socket=daemon.socket)
    blocks = session.lease(1)
    table = kvpool.BlockTable(blocks)
    session.close()
    for use in (lambda: session.put_episode("a", [1], [table]), lambda: session.choose_episode([1]),
                lambda: session.remove_episode("a")):
        with pytest.raises(kvpool.ReleasedError):
            use()
