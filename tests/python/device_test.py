"""Verbs that run on the device, for engines that keep their own tables: scores, prunes, compacts, plans of budgets."""

import collections.abc
import concurrent.futures
import gc
import time

import numpy as np
import pytest

import kvpool
from conftest import layout
from session_test import held


@pytest.fixture
def session(daemon):
    with kvpool.Session(layout(), "a model", socket=daemon.socket, magazine_blocks=0) as session:
        yield session


def pool(session):
    """K and V of all blocks."""
    return (np.asarray(session.k(blocks=session.max_blocks)), np.asarray(session.v(blocks=session.max_blocks)))


def test_scores_of_blocks_without_a_sequence(session):
    with session.lease(3) as blocks:
        np.asarray(session.k(blocks=session.max_blocks))[blocks.ids] = 1
        np.asarray(session.v(blocks=session.max_blocks))[blocks.ids] = np.arange(3).reshape(3, 1, 1, 1, 1)
        pending = session.score(blocks, scope="layer", last_block_tokens=4)
        scores = pending.wait()
        assert (scores.rows, scores.tokens, scores.blocks) == (2, 36, 3) and scores.token_scores is None
        assert np.allclose(scores.block_scores, [[0, 1, 2]] * 2)


def test_budget_plans(session):
    plan = session.plan_budgets("pyramid", 100, layers=4, params={"beta": 5, "sequence_tokens": 400})
    assert len(plan.budget_tokens) == 4 and plan.budget_tokens == sorted(plan.budget_tokens, reverse=True)
    assert abs(sum(plan.budget_tokens) - 400) <= 4


def leased(session, values):
    """A block for each value: V is that, and K is 1, so that PagedEviction keeps the large ones."""
    blocks = session.lease(len(values))
    k, v = pool(session)
    k[blocks.ids], v[blocks.ids] = 1, np.array(values).reshape(-1, 1, 1, 1, 1)
    return blocks


def test_a_prune_of_bare_refs(daemon, session):
    blocks = leased(session, [9, 1, 5, 2, 8, 7])
    refs = blocks.refs
    would = session.prune(blocks, budget_tokens=64, dry_run=True).wait()
    assert would.victims == [1, 3] and would.released == 0 and not blocks.released
    pruned = session.prune(blocks.detach(), budget_blocks=4).wait()
    assert pruned.victims == [1, 3] and pruned.victim_blocks == [refs[1], refs[3]] and pruned.released == 2
    assert pruned.table == [refs[0], refs[2], refs[4], refs[5]] and pruned.kept_tokens == 64
    assert held(daemon)["leased"] == 1 + 4  # One is the sink.
    session.release(pruned.table)
    session.flush()
    assert held(daemon)["leased"] == 1 and session.counters["refused"] == 0


def test_what_a_prune_of_bare_refs_is_told(session):
    refs = leased(session, [9, 1, 5, 2, 8, 7]).detach()
    keep = dict(budget_tokens=64, dry_run=True)
    assert session.prune(refs, protect=[(16, 17)], **keep).wait().victims == [2, 3]
    assert session.prune(refs, discard=[(64, 80)], **keep).wait().victims == [1, 4]
    assert session.prune(refs, scorer="streaming_llm", **keep).wait().victims == [1, 2]
    assert session.prune(refs, protection=kvpool.Protection(first_blocks=2), **keep).wait().victims == [2, 3]
    # The last block is not full, and not counted.
    assert session.prune(refs, last_block_tokens=3, **keep).wait().kept_tokens == 67
    session.release(refs)


def test_a_view_of_a_victim_outlives_it(daemon, session):
    blocks = leased(session, [9, 1, 8, 7])
    array = np.asarray(blocks.v(1))
    pruned = session.prune(blocks.detach(), budget_tokens=48).wait()
    assert pruned.victims == [1] and held(daemon)["leased"] == 1 + 4
    with session.lease(50) as others:
        pool(session)[1][others.ids] = -1
        assert (array == 1).all()
    del array
    gc.collect()
    session.flush()
    assert held(daemon)["leased"] == 1 + 3
    session.release(pruned.table)


def park(session, step):
    """Releases that wait for the step: so many names that not one more can be parked."""
    blocks = session.lease(2)
    for i in range(17):
        # Three of the most that a verb may name, and then halves: of what room is left, less than that is afterwards.
        names = 16384 >> max(i - 2, 0)
        session.release(session.ref(blocks.refs[i > 2:][:1] * names), after=step)
        session.flush()  # Otherwise it would be one verb with the next.
    blocks.release(after=step)


def test_a_view_of_a_victim_outlives_it_however_much_is_parked(daemon, session):
    step = session.begin_step()
    blocks = leased(session, [9, 1, 8, 7])
    session.ref(blocks.refs).release(after=step)  # A parked verb, on the blocks of the prune.
    park(session, step)
    array = np.asarray(blocks.v(1))
    pending = session.prune(blocks.detach(), budget_tokens=48)
    session.complete_step(step)
    pruned = pending.wait()
    assert pruned.victims == [1]
    step = session.begin_step()
    park(session, step)
    with session.lease(50) as others:
        pool(session)[1][others.ids] = -1
        assert (array == 1).all()
    del array
    gc.collect()
    session.release(pruned.table)
    session.complete_step(step)
    # What could not be parked goes in parts, some time after its step.
    deadline = time.monotonic() + 60
    while held(daemon)["leased"] != 1:
        assert time.monotonic() < deadline, f"{held(daemon)['leased']} blocks are leased, not 1"
        session.flush()
    session.check()
    assert session.counters["refused"] == 0


def test_a_compact_of_bare_refs(daemon, session):
    refs = leased(session, range(4)).detach()
    done = session.compact(refs, keep=[*range(16), 20, 40, 60], last_block_tokens=13).wait()
    assert done.last_block_tokens == 3 and done.moved_from_block == 1 and done.released == 3
    assert done.table[0] == refs[0] and not set(done.table[1:]) & set(refs)
    moved = pool(session)[1][kvpool.block_id(done.table[1]), 0, :3, 0, 0]
    assert moved.tolist() == [1, 2, 3]
    assert held(daemon)["leased"] == 1 + 2
    # By score, with the sources kept.
    again = session.compact(done.table, budget_tokens=5, scorer=kvpool.Scorer("streaming_llm", {"sinks": 2}), scope="layer",
                            last_block_tokens=3, keep_sources=True).wait()
    assert again.kept_positions == [[0, 1, 16, 17, 18]] * 2 and again.released == 0
    session.flush()
    assert held(daemon)["leased"] == 1 + 3
    session.release(again.table + done.table)
    session.flush()
    assert held(daemon)["leased"] == 1 and session.counters["refused"] == 0


def test_a_compact_that_nobody_waits_for_keeps_no_new_block(daemon, session):
    refs = leased(session, range(4)).detach()
    session.compact(refs, keep=[5, 40])
    # It is done some time after it was dropped.
    deadline = time.monotonic() + 60
    while held(daemon)["leased"] != 1:
        assert time.monotonic() < deadline, f"{held(daemon)['leased']} blocks are leased, not 1"
        session.flush()


def test_bare_refs_wait_for_their_step(session):
    step = session.begin_step()
    refs = leased(session, [1, 2, 3]).detach()
    pending = session.prune(refs, budget_tokens=32)
    with pytest.raises(kvpool.DeadlineExceededError):
        pending.wait(timeout=0.05)
    assert not pending.ready
    session.complete_step(step)
    assert pending.wait().kept_tokens == 32
    with pytest.raises(kvpool.FailedPreconditionError, match="taken already"):
        pending.wait()


def test_bad_prunes_of_bare_refs(session):
    blocks = leased(session, [1, 2, 3])
    for verb in (lambda: session.prune(blocks, budget_tokens=16), lambda: session.compact(blocks, keep=[1])):
        with pytest.raises(kvpool.InvalidArgumentError, match=r"detach\(\) the Blocks"):
            verb()
    refs = blocks.detach()
    for call, words in (
            (lambda: session.prune(refs), "one of budget_tokens and budget_blocks is needed"),
            (lambda: session.compact(refs), "one of budget_tokens and keep is needed"),
            (lambda: session.prune(refs + refs[:1], budget_tokens=16), "twice"),
            (lambda: session.prune(refs, budget_tokens=16, last_block_tokens=17), "last_block_tokens is 17"),
            (lambda: session.prune(refs, budget_tokens=16, group=1), "group is 1"),
            (lambda: session.prune(refs, budget_tokens=0), "budget_tokens is 0; must be 1 to 16777216"),
            (lambda: session.compact(refs, keep=[3, 2]), "keep.positions has 2 behind 3; must be ascending")):
        with pytest.raises(kvpool.InvalidArgumentError, match=words):
            call().wait()
    for wrong, words in ((refs[:1] + ["a"], r"blocks\[1\] is 'a'; must be a ref"),
                         ([-1], r"blocks\[0\] is -1; must be a ref: an int of 0 to"),
                         (7, "blocks is 7; must be Blocks, or a list")):
        with pytest.raises(TypeError, match=words):
            session.prune(wrong, budget_tokens=16)
    with pytest.raises(kvpool.InvalidArgumentError, match="scope is 'head'; with keep it must not be set"):
        session.compact(refs, keep=[1], scope="head")
    with pytest.raises(kvpool.FailedPreconditionError):
        session.prune([refs[0] + 2**32], budget_tokens=16).wait()  # Another generation.
    session.release(refs)
    session.flush()
    assert session.counters["refused"] == 0


def per_layer():
    """A layer group for each of two layers: each has a table and a budget of its own."""
    plane = dict(layer_stride=1024, token_stride=64, head_stride=64, dim_stride=4)
    return kvpool.Layout([kvpool.LayerGroup(name=name, layers=[layer], tokens_per_block=16, kv_heads=1, k_head_dim=16,
                                            v_head_dim=16, dtype="float32", k=kvpool.Plane(offset=0, **plane),
                                            v=kvpool.Plane(offset=1024, **plane))
                          for layer, name in enumerate(("first", "second"))], block_bytes=2048)


class MadeAnew(collections.abc.Sequence):
    """Pairs of a table and random queries that nobody but who asked for them holds."""

    def __init__(self, tables):
        self.tables = tables

    def __len__(self):
        return len(self.tables)

    def __getitem__(self, i):
        return self.tables[i], kvpool.QueryWindow(np.random.default_rng(i).normal(size=(1, 8, 2, 16)).astype(np.float32))


def test_budgets_by_what_queries_look_at(daemon):
    rng = np.random.default_rng(1)
    with kvpool.Session(per_layer(), "by layer", socket=daemon.socket) as session:
        with session.lease(4) as varied, kvpool.LiveSequence(session, group=1) as uniform:
            # Of the first layer each query attends to something else; in the second all keys are alike.
            for i in range(4):
                np.asarray(varied.k(i))[:] = rng.normal(size=(1, 16, 1, 16))
            uniform.append(session.lease(4))
            np.asarray(session.k(group=1, blocks=session.max_blocks))[uniform.ids] = 0
            uniform.extend(range(64))
            window = kvpool.QueryWindow(rng.normal(size=(1, 8, 2, 16)).astype(np.float32))
            sequences = [(kvpool.BlockTable(varied), window), (uniform, window)]
            plan = session.plan_budgets("cake", 20, sequences=sequences)
            assert sum(plan.budget_tokens) == 40 and len(plan.weights) == 2
            assert plan.budget_tokens[0] > 3 * plan.budget_tokens[1] and plan.weights[0] > 100 * plan.weights[1]
            made = MadeAnew([table for table, _ in sequences])
            assert (session.plan_budgets("cake", 20, sequences=made).weights
                    == session.plan_budgets("cake", 20, sequences=list(made)).weights)
            # Of queries that all ask the same no layer has more than another.
            same = kvpool.QueryWindow(np.zeros((1, 8, 2, 16), np.float32))
            alike = session.plan_budgets("d2o", 20, sequences=[(table, same) for table, _ in sequences])
            assert alike.budget_tokens == [20, 20]
            shorter = kvpool.BlockTable(varied, last_block_tokens=9)
            assert session.plan_budgets("d2o", 20, sequences=[(shorter, same), (uniform, same)]).budget_tokens != [20, 20]
            session.begin_step()
            assert session.plan_budgets("cake", 20, sequences=sequences, after=0).budget_tokens == plan.budget_tokens
            for method, more, words in (
                    ("pyramid", dict(sequences=sequences), "only BUDGET_METHOD_CAKE and BUDGET_METHOD_D2O take them"),
                    ("cake", dict(sequences=sequences, statistics=[1.0] * 4), "in place of statistics"),
                    ("cake", dict(sequences=sequences[::-1]), "plan_budgets.sequences"),
                    ("cake", dict(statistics=[1.0]), "plan_budgets.statistics has 1 entries"),
                    ("cake", dict(sequences=sequences, layers=3), "layers"),
                    ("best", {}, "method: there is no 'best'")):
                with pytest.raises(kvpool.InvalidArgumentError, match=words):
                    session.plan_budgets(method, 20, after=0, **more)
            for wrong, words in (([(varied, window)], r"the table of sequences\[0\] is .*; must be a LiveSequence or a BlockTable"),
                                 ([sequences[0], (uniform, None)],
                                  r"the window of sequences\[1\] is None; must be a QueryWindow"),
                                 ([uniform], "incompatible")):
                with pytest.raises(TypeError, match=words):
                    session.plan_budgets("cake", 20, sequences=wrong)
            with pytest.raises(kvpool.DeadlineExceededError):
                session.plan_budgets("cake", 20, sequences=sequences, timeout=0.05)
            session.complete_step()


def quests_bounds(keys, queries):
    """[rows, blocks] of K [blocks, layers, tokens, heads, dim] and queries [layers, queries, query heads, dim]: Quest's formula, for the mean of the heads
    that share a KV head."""
    layers, count, q_heads, dim = queries.shape
    heads = keys.shape[3]
    of_head = queries.reshape(layers, count, heads, q_heads // heads, dim).mean(3).transpose(0, 2, 1, 3)[:, :, None]
    least, greatest = (bound.transpose(1, 2, 0, 3)[:, :, :, None] for bound in (keys.min(2), keys.max(2)))
    return np.maximum(of_head * least, of_head * greatest).sum(-1).max(-1).reshape(layers * heads, -1) / dim ** .5


def test_a_selection_has_the_blocks_of_the_greatest_bounds(daemon, session):
    rng = np.random.default_rng(2)
    with session.lease(9) as blocks:
        k, _ = pool(session)
        k[blocks.ids] = rng.normal(size=(9, *k.shape[1:]))
        layers, heads, dim = k.shape[1], k.shape[3], k.shape[4]
        queries = rng.normal(size=(layers, 3, 2 * heads, dim)).astype(np.float32)
        table, window = kvpool.BlockTable(blocks), kvpool.QueryWindow(queries)
        bounds = quests_bounds(k[blocks.ids], queries)
        selection = session.select(table, window, budget_blocks=4, first_blocks=0, last_blocks=0, bounds=True).wait()
        best = np.argsort(-bounds, axis=1)[:, :4]
        assert selection.positions.tolist() == best.tolist() and selection.positions.dtype == np.uint32
        assert np.allclose(selection.bounds, np.take_along_axis(bounds, best, 1), rtol=1e-4, atol=1e-5)
        assert selection.blocks_read == 9
        # The first and the last block are always in.
        ends = session.select(table, window, budget_tokens=4 * 16 + 15)
        positions = ends.wait().positions
        assert (positions[:, :2] == [0, 8]).all()
        among = np.argsort(-bounds[:, 1:8], axis=1)[:, :2] + 1
        assert positions[:, 2:].tolist() == among.tolist()
        assert session.select(table, window, budget_blocks=2).wait().bounds is None
        session.begin_step()
        assert session.select(table, window, budget_blocks=9, after=0).wait().blocks_read == 0
        later = session.select(table, window, budget_blocks=9)
        assert not later.ready
        session.complete_step()
        later = later.wait()
        assert sorted(later.positions[0].tolist()) == list(range(9)) and later.blocks_read == 0
        with kvpool.BlockArray(session, 4 * layers * heads * 3 + 8) as into:
            written = session.select(table, window, budget_blocks=3, into=into, into_offset=8).wait()
            memory = np.asarray(session.k(blocks=session.max_blocks))[into.blocks.ids[0]].view(np.int32).reshape(-1)
            assert (memory[2:2 + written.positions.size] == written.positions.reshape(-1)).all()
            with pytest.raises(kvpool.InvalidArgumentError, match="select.into.offset_bytes is 2"):
                session.select(table, window, budget_blocks=3, into=into, into_offset=2).wait()
        with pytest.raises(TypeError, match="into is 'there'; must be a BlockArray"):
            session.select(table, window, budget_blocks=3, into="there")
        for told, words in ((dict(), "one of budget_tokens and budget_blocks"),
                            (dict(budget_tokens=16, budget_blocks=1), "one of budget_tokens and budget_blocks")):
            with pytest.raises(kvpool.InvalidArgumentError, match=words):
                session.select(table, window, **told)
        with pytest.raises(kvpool.InvalidArgumentError, match="are 2 blocks of this sequence; the budget is 1"):
            session.select(table, window, budget_blocks=1).wait()
        for wrong, words in (((blocks, window), r"table is .*; must be a LiveSequence or a BlockTable"),
                             ((table, "queries"), "window is 'queries'; must be a QueryWindow")):
            with pytest.raises(TypeError, match=words):
                session.select(*wrong, budget_blocks=2)
        assert held(daemon)["leased"] == 1 + 9  # One is the sink.


def test_budgets_by_statistics(session):
    plan = session.plan_budgets("epicache", 100, statistics=[0.9, 0.1, 0.5], params={"power": 1})
    assert sum(plan.budget_tokens) == 300 and plan.weights == [0.9, 0.1, 0.5]
    assert plan.budget_tokens[1] > plan.budget_tokens[2] > plan.budget_tokens[0]


def test_who_waits_lets_others_in(session):
    step = session.begin_step()
    with leased(session, [1]) as blocks, concurrent.futures.ThreadPoolExecutor() as threads:
        put = session.put_episode("late", [1], [kvpool.BlockTable(blocks)])
        waiting = [threads.submit(put.wait), threads.submit(session.plan_budgets, "uniform", 7, layers=2)]
        session.complete_step(step)
        assert waiting[0].result().episodes == 1 and waiting[1].result().budget_tokens == [7, 7]


def test_host_memory_has_no_device_uuid(session):
    assert session.device_uuid == b""
