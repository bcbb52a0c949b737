"""Live sequences: keys that stay true, budgets, and policies over what an engine tells."""

import gc
import math

import numpy as np
import pytest

import kvpool
from conftest import layout
from session_test import held

TOKENS_PER_BLOCK = 16


def grow(session, sequence, tokens, value=None):
    """Appends tokens one by one, as a decoder does. K and V are `value(token)`."""
    for token in tokens:
        if sequence.room == 0:
            sequence.append(session.lease(1))
        at = sequence.tokens
        block, offset = sequence.ids[at // TOKENS_PER_BLOCK], at % TOKENS_PER_BLOCK
        for array in (np.asarray(session.k(blocks=session.max_blocks)), np.asarray(session.v(blocks=session.max_blocks))):
            array[block, :, offset] = value(token) if value else token
        sequence.extend([token])


def test_a_sequence_is_shared(session):
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(40))
        assert sequence.tokens == 40 and sequence.room == 8 and len(sequence.ids) == 3
        outcome = sequence.seal().wait()
        assert outcome.canonical == sequence.refs[:2]
        assert sequence.seal() is None
        assert sequence.last_key == session.hasher().chain(range(40), TOKENS_PER_BLOCK)[1]
    assert sequence.released
    with pytest.raises(kvpool.ReleasedError):
        sequence.tokens
    with session.match(session.hasher().chain(range(40), TOKENS_PER_BLOCK)).wait() as hit:
        with kvpool.LiveSequence(session) as again:
            with pytest.raises(kvpool.FailedPreconditionError):
                again.adopt(hit.blocks, range(31))
            again.adopt(hit.blocks, range(32))
            assert hit.blocks.released and again.tokens == 32
            assert np.asarray(again.k(1, layer=0))[:3, 0, 0].tolist() == [16, 17, 18]


def test_sequences_with_soft_salts_share_the_head_alone(session):
    """The system prompt of 40 tokens fills two blocks."""
    tokens, head = range(64), 40

    def keys(salt, salt_from=head):
        return session.hasher(salt, salt_from=salt_from).chain(tokens, TOKENS_PER_BLOCK)

    with kvpool.LiveSequence(session, salt=b"first", salt_from=head) as first:
        grow(session, first, tokens)
        first.seal().wait()
        assert first.last_key == keys(b"first")[-1]
        refs = first.refs
    for salt, salt_from, found in ((b"first", head, 4), (b"first", 32, 4), (b"first", 48, 2), (b"first", 0, 0), (b"second", head, 2),
                                   (b"", 0, 2), (b"", head, 2)):
        with session.match(keys(salt, salt_from)).wait() as hit:
            assert hit.blocks.refs == refs[:found], f"salt {salt} from {salt_from}"
    with session.match(keys(b"second")).wait() as hit, kvpool.LiveSequence(session, salt=b"second", salt_from=head) as second:
        second.adopt(hit.blocks, tokens[:32])
        grow(session, second, tokens[32:])
        outcome = second.seal().wait()
        assert outcome.canonical == second.refs[2:]
    with session.match(keys(b"second")).wait() as hit:
        assert hit.blocks.refs[:2] == refs[:2] and not set(hit.blocks.refs[2:]) & set(refs)


def test_a_soft_salt_counts_from_a_pruning_on(session):
    def pruned(**salted):
        with kvpool.LiveSequence(session, **salted) as sequence:
            grow(session, sequence, range(64))
            digest = sequence.prune(budget_tokens=48).kept_digest
            grow(session, sequence, range(64, 80))
            return sequence.last_key, digest

    none, digest = pruned()
    key, _ = pruned(salt=b"a", salt_from=1000)
    assert key != none and key == pruned(salt=b"a", salt_from=1000)[0] != pruned(salt=b"b", salt_from=1000)[0]
    hasher = session.hasher(b"a", salt_from=1000)
    parent = hasher.behind_pruning(hasher.chain(range(64), TOKENS_PER_BLOCK)[-1], [], digest)
    assert key == hasher.next(parent, range(64, 80), position=64)


def test_prune_holds_a_budget(session):
    # V grows with the token, K does not: PagedEviction keeps long values over short keys.
    with kvpool.LiveSequence(session) as sequence:
        sequence.append(session.lease(8))
        blocks = sequence.ids
        np.asarray(session.k(blocks=session.max_blocks))[blocks] = 1
        for i, block in enumerate(blocks):
            np.asarray(session.v(blocks=session.max_blocks))[block] = 10 - i
        sequence.extend(range(128))
        scores = sequence.score(token_scores=True)
        assert scores.token_scores.shape == (1, 128) and scores.block_scores.shape == (1, 8)
        assert (np.diff(scores.block_scores[0]) < 0).all()
        would = sequence.prune(budget_tokens=80, dry_run=True)
        assert sequence.ids == blocks and would.victims == [4, 5, 6]
        pruned = sequence.prune(budget_tokens=80)
        assert pruned.victims == [4, 5, 6] and pruned.kept_tokens == 80 and pruned.table == sequence.refs
        assert sequence.ids == [block for i, block in enumerate(blocks) if i not in (4, 5, 6)]
        assert len(pruned.kept_digest) == 32
        # What comes now saw another context: its key is not that of the tokens.
        sequence.append(session.lease(1))
        sequence.extend(range(128, 144))
        sequence.seal().wait()
        assert sequence.last_key != session.hasher().chain(range(144), TOKENS_PER_BLOCK)[-1]
        with session.match(session.hasher().chain(range(144), TOKENS_PER_BLOCK)).wait() as hit:
            assert hit.tokens == 0


def test_fresh_blocks_are_read_anew(session):
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(64))
        assert sequence.score().blocks_read == 4
        verbs = (sequence.score, lambda **more: sequence.prune(budget_tokens=48, dry_run=True, **more),
                 lambda **more: sequence.compact(budget_tokens=48, keep_sources=True, **more))
        assert [verb().blocks_read for verb in verbs] == [0, 0, 0]
        assert [verb(fresh=True).blocks_read for verb in verbs] == [4, 4, 4]


def test_compact_gathers(session):
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(50))
        done = sequence.compact(keep=list(range(16)) + [20, 30, 40, 49])
        assert done.last_block_tokens == 4 and done.moved_from_block == 1 and sequence.tokens == 20
        assert done.table == sequence.refs and len(sequence.ids) == 2
        kept = np.asarray(session.k(blocks=session.max_blocks))[sequence.ids[1], :, :4]
        assert (kept == np.array([20, 30, 40, 49]).reshape(1, 4, 1, 1)).all()
        scored = sequence.compact(budget_tokens=10, scorer=kvpool.Scorer("streaming_llm", {"sinks": 2}))
        assert scored.kept_positions == [[0, 1, 12, 13, 14, 15, 16, 17, 18, 19]] and sequence.tokens == 10


def test_compact_merges(session):
    """Keys are all alike, so what leaves is merged into the oldest token that stays."""
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(1, 33))
        done = sequence.compact(keep=[4, 9], disposition="merge", keep_sources=True)
        assert done.merged_tokens == 30 * len(done.merge_thresholds) and done.merge_thresholds == pytest.approx([1] * 6)
        kept = np.asarray(session.v(blocks=session.max_blocks))[kvpool.block_id(done.table[0]), :, :2]
        assert kept[:, 0] == pytest.approx((sum(range(1, 33)) - 10) / 31, rel=1e-5) and (kept[:, 1] == 10).all()
        none = sequence.compact(keep=[4, 9], disposition="merge", merge_thresholds=[2], keep_sources=True)
        assert none.merged_tokens == 0 and none.merge_thresholds == [2] * 6
        again = dict(disposition="merge", merge_thresholds=none.merge_thresholds, merge_smoothing=0.25)
        assert sequence.compact(keep=[4, 9], **again).merge_thresholds == pytest.approx([1.75] * 6)
        for wrong, words in ((dict(disposition="keep"), "disposition: there is no 'keep'"),
                             (dict(merge_thresholds=[1]), "goes with DISPOSITION_MERGE"),
                             (dict(again, merge_thresholds=[1, 2]), "has 2 numbers"),
                             (dict(again, merge_smoothing=2), "must be 0 to 1")):
            with pytest.raises(kvpool.InvalidArgumentError, match=words):
                sequence.compact(keep=[0], **wrong)


def low_records(keys, values, bits):
    """LowTerms of score.proto in NumPy: the records of one plane, whose [tokens, dim] of float32 leave."""
    def packed(codes):
        words = -(-codes.shape[1] * bits // 32)
        codes = np.pad(codes.astype(np.uint32), ((0, 32 - len(codes)), (0, words * 32 // bits - codes.shape[1])))
        return (codes.reshape(32, words, -1) << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32).tobytes()

    def quantised(x, axis):
        zero = x.min(axis, keepdims=True).astype(np.float16)
        scale = ((x.max(axis, keepdims=True) - x.min(axis, keepdims=True)) / np.float32(2**bits - 1)).astype(np.float16)
        with np.errstate(divide="ignore", invalid="ignore"):
            place = (x - zero.astype(np.float32)) * (np.float32(1) / scale.astype(np.float32))
        codes = np.where(scale == 0, 0, np.clip(np.rint(place), 0, 2**bits - 1))
        return np.stack([scale.ravel(), zero.ravel()], 1), codes

    for first in range(0, len(keys), 32):
        ranges, codes = quantised(keys[first:first + 32], 0)
        v_ranges, v_codes = quantised(values[first:first + 32], 1)
        v_ranges = np.pad(v_ranges, ((0, 32 - len(v_ranges)), (0, 0)))
        yield ranges.tobytes() + packed(codes) + v_ranges.tobytes() + packed(v_codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_compact_keeps_in_low_precision(session, bits):
    rng = np.random.default_rng(bits)
    low = session.layout.low(bits)
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(90), value=lambda token: rng.standard_normal(
            np.asarray(session.k(blocks=1))[0, :, 0].shape).astype(np.float32))
        k, v = (np.concatenate([np.asarray(pool(blocks=session.max_blocks))[i] for i in sequence.ids], 1) for pool in (session.k, session.v))
        keep = list(range(0, 90, 3))
        leave = [i for i in range(90) if i % 3]
        layers, _, heads, dim = k.shape
        assert low.planes == layers * heads and low.record_bytes == 4 * dim + 128 + 2 * 32 * low.k_row_bytes and low.v_row_bytes == low.k_row_bytes
        with session.lease(low.blocks(60) + 1) as blocks:
            done = sequence.compact(keep=keep, disposition="low", low_blocks=blocks, low_bits=bits)
            assert (done.low_tokens, done.low_blocks, done.low_records_per_block) == (60, low.blocks(60), low.records_per_block)
            data = np.asarray(session.data(blocks=session.max_blocks))
            for plane in range(low.planes):
                of_plane = (x[plane // heads, leave, plane % heads] for x in (k, v))
                for group, record in enumerate(low_records(*of_plane, bits)):
                    block, slot = divmod(group * low.planes + plane, low.records_per_block)
                    there = data[blocks.ids[block], slot * low.record_bytes:(slot + 1) * low.record_bytes].tobytes()
                    assert there == record, (plane, group)
            kept = np.asarray(session.k(blocks=session.max_blocks))[sequence.ids[0], :, :16]
            assert (kept == k[:, keep[:16]]).all() and sequence.tokens == 30
        assert blocks.released and sequence.tokens == 30


def test_low_precision_is_refused_without_blocks_or_bits(session):
    with kvpool.LiveSequence(session) as sequence, session.lease(1) as blocks:
        grow(session, sequence, range(16))
        for wrong, words in ((dict(disposition="low"), "compact.low.blocks has 0 blocks; 15 tokens that leave take"),
                             (dict(low_blocks=blocks), "goes with DISPOSITION_LOW, and disposition is DISPOSITION_DROP"),
                             (dict(disposition="low", low_blocks=blocks, low_bits=5), "compact.low.bits is 5"),
                             (dict(disposition="low", low_blocks=[*blocks.refs, *blocks.refs]), "names block [0-9]+ twice")):
            with pytest.raises(kvpool.InvalidArgumentError, match=words):
                sequence.compact(keep=[0], **wrong)
        assert sequence.tokens == 16
    for wrong, words in ((dict(bits=3), "bits is 3; must be 2, 4 or 8"), (dict(group=1), "group is 1; the layout has 1 groups")):
        with pytest.raises(kvpool.InvalidArgumentError, match=words):
            session.layout.low(**wrong)
    group = dict(name="g", layers=[0], tokens_per_block=16, kv_heads=1, k_head_dim=64, dtype="bfloat16")
    for wrong, block_bytes, words in ((dict(k_head_dim=1 << 30), 4096, "k_head_dim is 1073741824; the limit is 4096"),
                                      (dict(kv_heads=1 << 30), 4096, "kv_heads is 1073741824; the limit is 1024"),
                                      ({}, 4098, "block_bytes is 4098")):
        with pytest.raises(kvpool.InvalidArgumentError, match=words):
            kvpool.Layout([kvpool.LayerGroup(**(group | wrong))], block_bytes=block_bytes).low(4)


def test_compact_adds_to_a_state(session):
    """Against the formulas of LESS in float64, and again, added to the state before."""
    layers, heads, dim, rank, hidden = 2, 3, 8, 3, 5
    rng = np.random.default_rng(3)
    shapes = ((dim, hidden), (hidden, rank), (rank, rank))
    weights = rng.normal(size=(layers, heads, sum(a * b for a, b in shapes))).astype(np.float32)
    gelu = np.vectorize(lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))))

    def state_of(k, v, gone):
        """[layers, heads, rank, dim + 1] of keys and values [layers, tokens, heads, dim]."""
        state = np.zeros((layers, heads, rank, dim + 1))
        for layer, head in np.ndindex(layers, heads):
            w1, w2, w3 = (w.reshape(shape) for w, shape in zip(
                np.split(weights[layer, head].astype(np.float64), np.cumsum([a * b for a, b in shapes])[:2]), shapes))
            psi = np.abs(gelu(gelu(k[layer, gone, head] @ w1) @ w2) @ w3)
            state[layer, head] = psi.T @ np.c_[v[layer, gone, head], np.ones(len(gone))]
        return state

    with (kvpool.LiveSequence(session) as sequence, kvpool.BlockArray(session, 1024) as first,
          kvpool.BlockArray(session, 1024) as second):
        grow(session, sequence, range(40), value=lambda token: rng.normal(size=(layers, heads, dim)))
        k, v = (np.asarray(array)[sequence.ids].swapaxes(0, 1).reshape(layers, -1, heads, dim).astype(np.float64)
                for array in (session.k(blocks=session.max_blocks), session.v(blocks=session.max_blocks)))

        def written(array):
            memory = np.asarray(session.k(blocks=session.max_blocks))[array.blocks.ids[0], 0].reshape(-1)
            return memory[2:2 + layers * heads * rank * (dim + 1)].reshape(layers, heads, rank, dim + 1)

        terms = dict(rank=rank, hidden=hidden, weights=weights, weights_name=b"random", state_offset=8)
        kept = [0, 5, *range(20, 40)]
        gone = [token for token in range(40) if token not in kept]
        done = sequence.compact(keep=kept, disposition="less", less=kvpool.LessTerms(state=first, **terms))
        assert done.folded_tokens == len(gone) * layers * heads and sequence.tokens == len(kept)
        expected = state_of(k, v, gone)
        np.testing.assert_allclose(written(first), expected, rtol=1e-4, atol=1e-4)
        again = kvpool.LessTerms(state=second, previous=first, previous_offset=8, **terms)
        digest = sequence.compact(keep=[0, 1], disposition="less", less=again).kept_digest
        assert len(digest) == 32
        np.testing.assert_allclose(written(second), expected + state_of(k, v, kept[2:]), rtol=1e-4, atol=1e-4)
        for wrong, words in ((dict(disposition="less"), "and less is absent"), (dict(less=again), "and less is there"),
                             (dict(disposition="less", less=kvpool.LessTerms(state=second, **{**terms, "rank": 4})),
                              "weights.inlined has 1536 bytes; this sequence needs 1824")):
            with pytest.raises(kvpool.InvalidArgumentError, match=words):
                sequence.compact(keep=[0], **wrong)
        with pytest.raises(TypeError, match="state is 'there'; must be a BlockArray"):
            kvpool.LessTerms(state="there", **terms)


def test_heads_share_a_budget(session):
    """By mass that the engine tells: once by a LiveSequence, which knows what is padding, and once by bare refs, which are told."""
    layers, heads = np.asarray(session.k(blocks=1)).shape[1], np.asarray(session.k(blocks=1)).shape[3]
    k = np.asarray(session.k(blocks=session.max_blocks))
    rng = np.random.default_rng(5)

    def scorer(tokens):
        mass = rng.random((layers, heads, tokens)).astype(np.float32) * np.arange(1, heads + 1, dtype=np.float32)[None, :, None]
        return kvpool.Scorer("h2o", {"recent": 0}, signals=[kvpool.Signal("mass", mass, per_layer=True, per_head=True)]), mass

    def padding_of(refs, counts, length):
        rows = np.concatenate([k[ref & 0xffffffff] for ref in refs], 1)[:, :length]  # [layers, tokens, heads, dim]
        counts = np.array(counts).reshape(layers, 1, heads)
        return (rows == 0).all(-1) == (np.arange(length)[None, :, None] >= counts)

    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(1, 41))
        told, mass = scorer(40)
        done = sequence.compact(budget_tokens=12, scorer=told, scope="head", heads="ada", ada=kvpool.AdaTerms(least_share=0.5, most_tokens=20))
        assert [len(row) for row in done.kept_positions] == done.counts and len(done.counts) == layers * heads
        assert sequence.tokens == max(done.counts) <= 20 and min(done.counts) >= 6 and sum(done.counts) == 12 * layers * heads
        for row, positions in enumerate(done.kept_positions):
            of_row = mass[row // heads, row % heads]
            assert set(positions) == set(np.argsort(of_row)[-len(positions):]), row
        assert padding_of(sequence.refs, done.counts, sequence.tokens).all()
        for refused in (lambda: sequence.prune(budget_tokens=16), sequence.score, lambda: sequence.compact(budget_tokens=4),
                        lambda: session.select(sequence, kvpool.QueryWindow(np.zeros((layers, 1, heads, 8), np.float32)), budget_blocks=1),
                        lambda: session.put_episode("name", [1.0], [sequence])):
            with pytest.raises(kvpool.FailedPreconditionError, match="heads of this sequence keep different numbers of its first"):
                refused()
        length = sequence.tokens
        grow(session, sequence, range(100, 110))
        refs, before = list(sequence.refs), done.counts
        terms = dict(scorer=scorer(length + 10)[0], scope="head", heads="ada")
        # The same by bare refs, whose sources stay.
        bare = session.compact(refs, budget_tokens=12, last_block_tokens=(length + 10) % 16, keep_sources=True,
                               ada=kvpool.AdaTerms(counts=before, counted_tokens=length), **terms).wait()
        for row, positions in enumerate(bare.kept_positions):
            assert not any(before[row] <= position < length for position in positions)
        again = sequence.compact(budget_tokens=12, **terms)
        assert again.kept_positions == bare.kept_positions and again.counts == bare.counts
        assert padding_of(sequence.refs, again.counts, sequence.tokens).all()
        session.release(bare.table)
        with pytest.raises(kvpool.InvalidArgumentError, match="compact.ada goes with HEADS_ADA and HEADS_GIVEN; heads is HEADS_EQUAL"):
            session.compact(sequence.refs, budget_tokens=4, ada=kvpool.AdaTerms()).wait()


def test_views_survive_a_prune(daemon):
    with kvpool.Session(layout(), "a model", socket=daemon.socket, magazine_blocks=0) as session:
        sequence = kvpool.LiveSequence(session)
        grow(session, sequence, range(64))
        arrays = [np.asarray(sequence.k(i)) for i in range(4)]
        before = [array.copy() for array in arrays]
        assert not arrays[0].flags.writeable
        pruned = sequence.prune(budget_tokens=32, scorer="streaming_llm")
        assert pruned.victims == [1, 2]
        session.flush()
        assert held(daemon)["leased"] == 1 + 4  # The sink, and all that is looked at.
        with session.lease(50) as others:
            np.asarray(session.k(blocks=session.max_blocks))[others.ids] = -1
            assert all((array == copy).all() for array, copy in zip(arrays, before))
        sequence.release()
        del arrays
        gc.collect()
        session.flush()
        assert held(daemon)["leased"] == 1


def test_signals(session):
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(64), value=lambda token: 1)
        with pytest.raises(kvpool.FailedPreconditionError, match="attention mass"):
            sequence.prune(budget_tokens=32, scorer="h2o")
        mass = np.zeros(64, np.float32)
        mass[20] = 1
        told = kvpool.Scorer("h2o", {"recent": 16}, signals=[kvpool.Signal("mass", mass)], over_tokens="sum")
        assert sequence.prune(budget_tokens=32, scorer=told, dry_run=True).victims == [0, 2]
        # The same from blocks, which kernels could write.
        with kvpool.BlockArray(session, mass.nbytes) as array:
            array.write(mass)
            assert array.nbytes % session.layout.block_bytes == 0 and len(array.blocks) == 1
            told = kvpool.Scorer("h2o", {"recent": 16}, signals=[kvpool.Signal("mass", array)], over_tokens="sum")
            assert sequence.prune(budget_tokens=32, scorer=told, dry_run=True).victims == [0, 2]
            with pytest.raises(kvpool.InvalidArgumentError):
                array.write(np.zeros(array.nbytes // 4 + 1, np.float32))
        # Attention of a window of queries, which the daemon computes: token 40's key is where the queries look.
        np.asarray(session.k(blocks=session.max_blocks))[sequence.ids[2], :, 40 % 16, :, 0] = 50
        queries = np.zeros((2, 4, 6, 8), np.float32)
        queries[..., 0] = 10
        told = kvpool.Scorer("snapkv", {"kernel": 1}, window=kvpool.QueryWindow(queries))
        scores = sequence.score(told, token_scores=True, fresh=True)
        assert scores.token_scores[0, :60].argmax() == 40
        # From blocks, of another type than the layout's.
        with kvpool.BlockArray(session, queries.nbytes) as array:
            array.write(queries)
            window = kvpool.QueryWindow(array, queries=4, q_heads=6, dtype="float32")
            told = kvpool.Scorer("snapkv", {"kernel": 1}, window=window)
            assert (sequence.score(told, token_scores=True, fresh=True).token_scores == scores.token_scores).all()
            with pytest.raises(kvpool.InvalidArgumentError, match="dtype: 'int8' is none of float32"):
                kvpool.QueryWindow(array, queries=4, q_heads=6, dtype="int8")
        with pytest.raises(kvpool.InvalidArgumentError, match="over_tokens: there is no 'sum_of_all'; must be one of .*, sum,"):
            kvpool.Scorer(over_tokens="sum_of_all")
        with pytest.raises(kvpool.InvalidArgumentError, match="no_such_policy"):
            sequence.prune(budget_tokens=32, scorer="no_such_policy")
        with pytest.raises(TypeError):
            kvpool.Signal("mass", "abc")


def test_arrays_have_a_shape():
    values, queries = np.zeros(64, np.float32), np.zeros((2, 4, 6, 8), np.float32)
    for make, words in ((lambda: kvpool.Signal("mass", values, offset=4), "offset is 4"),
                        (lambda: kvpool.Signal("mass", values, nbytes=128), "nbytes is 128"),
                        (lambda: kvpool.QueryWindow(queries, queries=4), "queries is 4"),
                        (lambda: kvpool.QueryWindow(queries, q_heads=0), "q_heads is 0"),
                        (lambda: kvpool.QueryWindow(queries, offset=64), "offset is 64")):
        with pytest.raises(kvpool.InvalidArgumentError, match=f"{words}; it is for a BlockArray: an array has a shape"):
            make()
    with pytest.raises(kvpool.InvalidArgumentError, match="dtype is 'float32'; it is for a BlockArray: an array has a type"):
        kvpool.QueryWindow(queries, dtype="float32")


def test_scorers_of_other_things(session):
    mass = kvpool.Signal("mass", np.zeros(16, np.float32))
    for make, words in ((lambda: kvpool.Scorer("h2o", signals=[mass, "mass"]), r"signals\[1\] is 'mass'; must be a Signal"),
                        (lambda: kvpool.Scorer("h2o", {7: 1}), "a name in params is 7; must be a str"),
                        (lambda: session.score([1], scorer=7), "scorer is 7; must be a Scorer, the name of a policy, or None")):
        with pytest.raises(TypeError, match=words):
            make()


def test_protection(session):
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(96))
        keep = dict(budget_tokens=48, scorer=kvpool.Scorer("random", {"seed": 3}), dry_run=True)
        assert 4 not in sequence.prune(protect=[(70, 71)], **keep).victims
        ends = sequence.prune(protection=kvpool.Protection(first_blocks=2, last_blocks=1), **keep)
        assert {0, 1, 5}.isdisjoint(ends.victims)
        with pytest.raises(kvpool.InvalidArgumentError):
            sequence.prune(protection=kvpool.Protection(first_blocks=6), **keep)
        with pytest.raises(kvpool.InvalidArgumentError):
            sequence.prune()


def test_a_prune_waits_for_its_step(session):
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(64))
        session.begin_step()
        with pytest.raises(kvpool.DeadlineExceededError):
            sequence.prune(budget_tokens=32, timeout=0.05)
        with pytest.raises(kvpool.FailedPreconditionError, match="not finished"):
            sequence.extend([1])
        with pytest.raises(kvpool.FailedPreconditionError, match="not finished"):
            sequence.release(reuse="unlikely")
        session.complete_step()
        assert sequence.finish_prune().kept_tokens == 32 == sequence.tokens


def test_a_refused_append_takes_nothing(session):
    """Neither the blocks nor what a view shows of them."""
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(64))
        session.begin_step()
        with pytest.raises(kvpool.DeadlineExceededError):
            sequence.prune(budget_tokens=32, scorer="streaming_llm", timeout=0.05)
        more = session.lease(1)
        array = np.asarray(more.k(0))
        array[:] = 7
        with pytest.raises(kvpool.FailedPreconditionError, match="not finished"):
            sequence.append(more)
        with pytest.raises(kvpool.FailedPreconditionError, match="not finished"):
            sequence.adopt(more, range(16))
        session.complete_step()
        session.flush()
        with session.lease(40) as others:
            np.asarray(session.k(blocks=session.max_blocks))[others.ids] = -1
        assert (array == 7).all() and not more.released
        sequence.finish_prune()
        sequence.append(more)
        assert more.released and sequence.room == 16


def test_no_view_comes_while_a_prune_is_unfinished(session):
    """The daemon may have released the block, and nobody here knows."""
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(64))
        session.begin_step()
        with pytest.raises(kvpool.DeadlineExceededError):
            sequence.prune(budget_tokens=32, scorer="streaming_llm", timeout=0.05)
        for look in (sequence.k, sequence.v):
            with pytest.raises(kvpool.FailedPreconditionError, match="not finished"):
                look(1)
        session.complete_step()
        assert sequence.finish_prune().victims == [1, 2]
        assert (np.asarray(sequence.k(1, layer=0))[:, 0, 0] == np.arange(48, 64)).all()


def test_what_is_not_read_again_leaves_first(session):
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(96))
        keep = dict(budget_tokens=64, scorer="streaming_llm", dry_run=True)
        assert sequence.prune(**keep).victims == [1, 2]
        # A block of which one token is read keeps its place.
        assert sequence.prune(discard=[(48, 64), (64, 79)], **keep).victims == [1, 3]
        assert sequence.prune(discard=[(0, 96)], protection=kvpool.Protection(first_blocks=2), **keep).victims == [2, 3]
        for ranges, words in (([(5, 5)], "discard.* 5"), ([(0, 97)], "discard.*97")):
            with pytest.raises(kvpool.InvalidArgumentError, match=words):
                sequence.prune(discard=ranges, **keep)
        kept = sequence.compact(budget_tokens=64, scorer="streaming_llm", discard=[(40, 80)]).kept_positions[0]
        assert set(range(40)) | set(range(80, 96)) <= set(kept) and len(kept) == 64


def test_what_is_not_read_of_chosen_tokens(session):
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(32))
        for more in (dict(discard=[(0, 4)]), dict(protect=[(0, 4)]), dict(scorer="random")):
            with pytest.raises(kvpool.InvalidArgumentError, match="compact has keep"):
                sequence.compact(keep=[1, 2], **more)
        with pytest.raises(kvpool.InvalidArgumentError, match="scope is 'layer'; with keep it must not be set"):
            sequence.compact(keep=[1, 2], scope="layer")


def test_queries_of_a_prompt_behind_the_sequence(session):
    with kvpool.LiveSequence(session) as sequence:
        grow(session, sequence, range(4), value=lambda token: 1)
        queries = np.ones((2, 8, 6, 8), np.float32)  # More than there are tokens.
        told = kvpool.Scorer("epicache", window=kvpool.QueryWindow(queries, behind=True))
        assert sequence.score(told, token_scores=True).tokens == 4
        with pytest.raises(kvpool.InvalidArgumentError, match="8 queries|queries.* 8"):
            sequence.score(kvpool.Scorer("epicache", window=kvpool.QueryWindow(queries)), token_scores=True)
