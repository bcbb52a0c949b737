"""llama.cpp on kvpool: the same tokens as its own cache, prefixes of other processes, and nothing wrong ever loaded."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="needs llama.cpp: tests/engines.sh installs it")

import ggufs
import kvpool
from daemon import Daemon, KeptDaemon
from kvpool_llama_cpp import Engine, LlamaError

HERE = pathlib.Path(__file__).parent
GEMMA = os.environ.get("KVPOOL_GGUF")


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma-3-270m"])
def model(request, tmp_path_factory):
    if request.param == "gemma-3-270m":
        if GEMMA is None:
            pytest.skip("needs the model: tests/engines.sh --gemma")
        return GEMMA
    make = ggufs.llama if request.param == "llama" else ggufs.gemma
    return make(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return ggufs.llama(tmp_path_factory.mktemp("gguf") / "small.gguf")


def prompt(tokens, seed=1):
    return np.random.default_rng(seed).integers(3, ggufs.VOCABULARY, tokens).tolist()


def open_engine(model, daemon=None, **options):
    """With a pool, if there is a daemon or its socket."""
    context = options.pop("context", None)
    if daemon is not None:
        options = {"pool": {"socket": getattr(daemon, "socket", daemon), **options}}
    return Engine(model, threads=1, n_ctx=2048, n_batch=256, context=context, **options)


def prompts_of(engine):
    """Fifty: five beginnings, each with ten endings. Text, where the model knows any."""
    if GEMMA is None or engine.library.vocab_n_tokens(engine._vocabulary) == ggufs.VOCABULARY:
        return [prompt(150 + 60 * i, seed=i) + prompt(5 + 7 * j, seed=100 + j) for i in range(5) for j in range(10)]
    text = (HERE.parents[1] / "server/README.md").read_text()
    parts = [engine.tokenize(text[i:i + 900 + 200 * (i % 3)]) for i in range(0, 7500, 1500)]
    return [part + engine.tokenize(f"\nQuestion {j}: what is said here of the word '{word}'?\nAnswer:", special=False)
            for part in parts for j, word in enumerate("daemon engine block budget session memory policy trace GPU key".split())]


def own_cache(own, tokens, has):
    """What llama.cpp says with `has` tokens of the prompt in its own cache.

    As many as the other engine found: how a prompt is cut into batches changes the last bits of its logits, and with them,
    once in a while, a word of llama.cpp's own.
    """
    own.prefill(tokens[:has] + [tokens[has] + 1])
    said = own.generate(tokens, 16)
    assert own.reused == has
    return said


def test_greedy_output_is_that_of_its_own_cache(daemon, model):
    """Fifty prompts, by an engine that computes what is not shared yet, then by one that has only what that one computed."""
    with open_engine(model) as own, open_engine(model, daemon) as first, open_engine(model, daemon) as second:
        prompts, found = prompts_of(own), 0
        assert len(prompts) == 50
        for i, tokens in enumerate(prompts):
            for engine in (first, second):
                engine.reset()
                said = engine.generate(tokens, 16)
                assert said == own_cache(own, tokens, engine.found), (i, engine is first)
                assert bytes(engine.logits()) == bytes(own.logits())
            found += first.found
            assert second.found == (len(tokens) - 1) // 32 * 32
        assert found > 40 * 100  # Five beginnings were computed, and found ten times less one.
        for engine in (first, second):
            assert engine.cache.attached
            assert engine.cache.counters["refused_blocks"] == engine.cache.counters["lost_daemons"] == 0


def test_what_the_engine_has_and_what_the_pool_has_beyond(daemon, small):
    with open_engine(small, daemon) as first, open_engine(small, daemon) as second, open_engine(small) as own:
        first.generate(prompt(300), 8)
        second.generate(prompt(300)[:100], 8)
        said = second.generate(prompt(300), 8)
        # It had 100 of its own: of these three blocks stay, and six more come.
        assert (second.reused, second.found) == (100, 188) and said == own.generate(prompt(300), 8)
        assert second.cache.counters["loaded_blocks"] == 3 + 6
        # What was generated is not saved before it is part of a prompt.
        longer = prompt(300) + said + prompt(50, seed=2)
        assert second.generate(longer, 8) == own.generate(longer, 8) and second.found == 0
        assert first.generate(longer, 8) == own.generate(longer, 8) and first.found > 0


ENGINE = """
import sys
from kvpool_llama_cpp import Engine
model, socket, tokens = sys.argv[1], sys.argv[2], eval(sys.argv[3])
engine = Engine(model, threads=1, n_ctx=2048, n_batch=256, pool={"socket": socket})
print(engine.generate(tokens, 16), flush=True)
engine.cache.session.flush()
print("ready", flush=True)
sys.stdin.read()
"""


def test_another_process_prefix_and_its_death(daemon, model):
    tokens = prompt(500)
    other = subprocess.Popen([sys.executable, "-c", ENGINE, model, daemon.socket, str(tokens)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    said = eval(other.stdout.readline())
    assert other.stdout.readline() == "ready\n"
    with open_engine(model) as own, open_engine(model, daemon) as engine:
        assert own.generate(tokens, 16) == said
        said = own_cache(own, tokens, 480)
        assert engine.generate(tokens, 16) == said and engine.found == 480
        other.kill()
        other.wait()
        engine.reset()
        assert engine.generate(tokens, 16) == said and engine.found == 480
        with open_engine(model, daemon) as late:
            assert late.generate(tokens, 16) == said and late.found == 480
    other.stdin.close(), other.stdout.close()


def test_what_differs_is_not_shared(daemon, small, tmp_path):
    tokens = prompt(100)
    with open_engine(small, daemon) as engine:
        engine.generate(tokens, 4)
        engine.reset()
        engine.generate(tokens, 4)
        assert engine.found == 96
        # Another tenant's salt, an adapter; another beginning.
        assert engine.cache.load(tokens, salt=b"tenant") == engine.cache.load(tokens, extra_keys=[b"adapter"]) == 0
        assert engine.cache.load([5] + tokens[1:]) == 0
        # A salt behind a system prompt of 40 tokens, which everybody shares: one block of 32 is full.
        assert engine.cache.load(tokens, salt=b"tenant", salt_from=40) == 32
        engine.reset()
        engine.prefill(tokens)
        assert engine.cache.save(tokens, salt=b"tenant", salt_from=40) == 3
        engine.reset()
        for salted, found in ((dict(salt=b"tenant", salt_from=40), 96), (dict(salt=b"tenant", salt_from=63), 96),
                              (dict(salt=b"tenant", salt_from=64), 64), (dict(salt=b"another", salt_from=40), 32), (dict(salt=b"tenant"), 0)):
            assert engine.cache.load(tokens, **salted) == found, salted
            engine.reset()
        with pytest.raises(kvpool.InvalidArgumentError, match="salt_from is -1"):
            engine.cache.load(tokens, salt=b"tenant", salt_from=-1)
        assert engine.cache.attached
    same = shutil.copy(small, tmp_path / "same.gguf")
    changed = tmp_path / "changed.gguf"
    data = bytearray(pathlib.Path(small).read_bytes())
    data[-4] ^= 1  # The last bit of one weight.
    changed.write_bytes(data)
    for path, context, found in ((same, {}, 96), (str(changed), {}, 0), (small, {"type_k": 0}, 0), (small, {"n_ubatch": 64}, 0),
                                 (small, {"rope_freq_base": 500_000.0}, 0)):
        with open_engine(path, daemon, context=context) as engine, open_engine(path, context=context) as own:
            assert engine.generate(tokens, 8) == own.generate(tokens, 8) and engine.found == found, (path, context)


def test_a_wrong_block_is_computed_again(daemon, small):
    """Memory that was written over: state, tokens, or a block that stands under another's key."""
    tokens = prompt(300)
    with open_engine(small, daemon) as engine, open_engine(small) as own:
        said = own.generate(tokens, 8)
        engine.generate(tokens, 8)
        session = engine.cache.session
        pool = np.asarray(session.data())
        with session.match(session.hasher().chain(tokens, 32)).wait() as hit:
            ids = hit.blocks.ids
        state, header = 4096, 20
        for block, place, right in ((4, state, 4), (2, header, 2), (0, 0, 0)):
            pool[ids[block], place] ^= 1
            engine.reset()
            assert engine.generate(tokens, 8) == said and engine.found == 32 * right
            pool[ids[block], place] ^= 1
        first, second = pool[ids[0]].copy(), pool[ids[1]].copy()
        pool[ids[0]], pool[ids[1]] = second, first
        engine.reset()
        assert engine.generate(tokens, 8) == said and engine.found == 0
        assert engine.cache.counters["refused_blocks"] == 4
        pool[ids[0]], pool[ids[1]] = first, second
        engine.reset()
        assert engine.generate(tokens, 8) == said and engine.found == 288


def test_a_pool_that_is_too_small(small):
    daemon = Daemon(capacity="4MiB", slab="2MiB")
    try:
        with open_engine(small, daemon, timeout=0.5, retry=0) as engine, open_engine(small) as own:
            session = engine.cache.session
            for seed in range(6):  # More than fits: the oldest go.
                tokens = prompt(1500, seed)
                assert engine.generate(tokens, 4) == own.generate(tokens, 4)
            assert engine.cache.attached and engine.cache.counters["saved_blocks"] > session.max_blocks
            with session.lease(session.max_blocks - 2 - 4):  # Others hold all but a few.
                tokens = prompt(1500, 7)
                assert engine.generate(tokens, 4) == own.generate(tokens, 4)
                assert engine.cache.attached and engine.cache.counters["unsaved_blocks"] > 0
            assert engine.generate(tokens[:900] + [9], 4) == own.generate(tokens[:900] + [9], 4)
            assert engine.cache.save(tokens[:896]) == 28
    finally:
        daemon.close()


def test_no_daemon_at_the_start(small, tmp_path):
    socket = str(tmp_path / "there" / "kvpoold.sock")
    with pytest.raises(kvpool.UnavailableError, match="there/kvpoold.sock"):
        open_engine(small, socket, open_timeout=0.2)
    with pytest.raises(ValueError, match="only 'own'"):
        open_engine(small, socket, fallback="none")
    with open_engine(small, socket, fallback="own", open_timeout=0.2, retry=0) as engine, open_engine(small) as own:
        said = own.generate(prompt(100), 8)
        assert engine.generate(prompt(100), 8) == said and not engine.cache.attached
        daemon = Daemon()
        try:  # One comes later.
            os.symlink(daemon.path, tmp_path / "there")
            engine.reset()
            assert engine.generate(prompt(100), 8) == said and engine.cache.attached and engine.found == 0
            engine.reset()
            assert engine.generate(prompt(100), 8) == said and engine.found == 96
        finally:
            daemon.close()


def test_a_daemon_that_is_lost_while_serving(small, tmp_path):
    daemon = Daemon()
    link = tmp_path / "there"
    os.symlink(daemon.path, link)
    with open_engine(small, str(link / "kvpoold.sock"), open_timeout=0.2, retry=0) as engine, open_engine(small) as own:
        said = own.generate(prompt(200), 8)
        assert engine.generate(prompt(200), 8) == said
        daemon.kill()
        engine.reset()
        assert engine.generate(prompt(200), 8) == said and engine.found == 0 and not engine.cache.attached
        # What it has, it has.
        assert engine.generate(prompt(200), 8) == said and engine.reused == 199
        daemon.close()
        daemon = Daemon()
        try:
            link.unlink()
            os.symlink(daemon.path, link)
            for found in (0, 192):
                engine.reset()
                assert engine.generate(prompt(200), 8) == said and engine.found == found and engine.cache.attached
        finally:
            daemon.close()


def test_kills_of_the_daemon(small):
    """With a keeper an engine goes on through them, and finds again what it had computed."""
    daemon = KeptDaemon()
    try:
        with open_engine(small, daemon) as engine, open_engine(small) as own:
            said = own.generate(prompt(200), 8)
            with daemon.killed_every(0.2) as kills:
                while kills[0] < 20:
                    assert engine.generate(prompt(200), 8) == said and engine.cache.attached
                    engine.reset()
            until = time.monotonic() + 60
            while True:
                assert engine.generate(prompt(200), 8) == said
                if engine.found == 192:
                    break
                assert time.monotonic() < until
                engine.reset()
                time.sleep(0.05)
    finally:
        daemon.close()


def test_bad_input(daemon, small, tmp_path):
    for context, match in (({"n_seq_max": 1}, "n_seq_max 1"), ({"kv_unified": False}, "kv_unified")):
        with pytest.raises(ValueError, match=match):
            open_engine(small, daemon, context=context)
    with pytest.raises(ValueError, match="n_batch 256"):
        open_engine(small, daemon, tokens_per_block=257)
    windowed = ggufs.gemma(tmp_path / "windowed.gguf")
    with open_engine(windowed, daemon, context={"swa_full": False}) as engine:
        with pytest.raises(ValueError, match="swa_full"):
            engine.generate(prompt(900), 4)
    # Engines of one fingerprint must cut alike: both sides are named.
    with open_engine(small, daemon):
        with pytest.raises(kvpool.FailedPreconditionError, match="tokens_per_block: 32 -> 16"):
            open_engine(small, daemon, tokens_per_block=16)
    with pytest.raises(LlamaError, match="loading"):
        open_engine(str(tmp_path / "none.gguf"))
    with pytest.raises(LlamaError, match="has no llama_"):
        Engine(small, library=kvpool._core.__file__)
    with open_engine(small, daemon) as engine:
        with pytest.raises(ValueError, match="positions -1 to -1"):
            engine.cache.save(prompt(100))
