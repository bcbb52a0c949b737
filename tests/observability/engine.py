"""One engine that does one thing, over libkvpool.so, for record.py and live_test.py. Usage: engine.py LIBRARY SOCKET WHAT

open: opens a session in a space of its own, and closes it. hold=COUNT: leases so many blocks. stale: touches eight blocks of an earlier
session of its own, once a second; stale=TIMES: so often, then it pins them once, while it holds nearly all of a slab. long: asks for a
prefix of 8,192 blocks, which is there, five times a second. Says "ready" when it has begun, and ends when its input does.
"""

import ctypes
import os
import select
import sys

BLOCK_BYTES, KEY_BYTES, TOKENS_PER_BLOCK, PATIENCE_MS = 4096, 32, 16, 30000


class Options(ctypes.Structure):
    """The first fields of kvpool_options; those behind them take their defaults."""
    _fields_ = [("struct_size", ctypes.c_size_t), ("socket", ctypes.c_char_p), ("tenant", ctypes.c_char_p), ("client_name", ctypes.c_char_p),
                ("fingerprint", ctypes.c_char_p), ("fingerprint_bytes", ctypes.c_size_t), ("layout", ctypes.c_void_p),
                ("layout_bytes", ctypes.c_size_t), ("block_bytes", ctypes.c_uint64), ("tokens_per_block", ctypes.c_uint32)]


class GroupKeys(ctypes.Structure):
    _fields_ = [("group", ctypes.c_uint32), ("key_bytes", ctypes.c_uint32), ("keys", ctypes.c_char_p), ("key_count", ctypes.c_size_t)]


class SealArguments(ctypes.Structure):
    """The first fields of kvpool_seal_arguments."""
    _fields_ = [("struct_size", ctypes.c_size_t), ("group", ctypes.c_uint32), ("blocks", ctypes.c_void_p), ("block_count", ctypes.c_size_t),
                ("key_bytes", ctypes.c_uint32), ("keys_per_block", ctypes.c_uint32), ("keys", ctypes.c_char_p)]


class Engine:
    def __init__(self, library, socket, fingerprint):
        self.library, self.session = library, ctypes.c_void_p()
        options = Options(ctypes.sizeof(Options), socket.encode(), None, b"engine.py", fingerprint, len(fingerprint), None, 0, BLOCK_BYTES,
                          TOKENS_PER_BLOCK)
        self.call("open", ctypes.byref(options), ctypes.byref(self.session))

    def call(self, verb, *arguments):
        if getattr(self.library, f"kvpool_{verb}")(*arguments) != 0:
            sys.exit(f"{verb}: {self.library.kvpool_last_error().decode()}")

    def lease(self, count):
        blocks = (ctypes.c_uint64 * count)()
        self.call("lease_within", self.session, blocks, ctypes.c_size_t(count), PATIENCE_MS)
        return blocks

    def seal(self, blocks, keys):
        seal = ctypes.c_void_p()
        arguments = SealArguments(ctypes.sizeof(SealArguments), 0, ctypes.addressof(blocks), len(blocks), KEY_BYTES, 1, keys)
        self.call("seal_start", self.session, ctypes.byref(arguments), ctypes.byref(seal))
        self.call("seal_wait", seal, PATIENCE_MS, (ctypes.c_uint64 * len(blocks))())
        self.library.kvpool_seal_free(seal)

    def match(self, keys):
        """How many tokens were there."""
        match, tokens = ctypes.c_void_p(), ctypes.c_uint64()
        groups = GroupKeys(0, KEY_BYTES, keys, len(keys) // KEY_BYTES)
        self.call("match_start", self.session, ctypes.byref(groups), ctypes.c_size_t(1), ctypes.byref(match))
        self.call("match_wait", match, PATIENCE_MS, ctypes.byref(tokens), None)
        self.library.kvpool_match_free(match)
        return tokens.value

    def touch(self, blocks):
        self.call("touch", self.session, blocks, ctypes.c_size_t(len(blocks)))
        self.call("flush", self.session, PATIENCE_MS)

    def pin(self, blocks):
        self.call("pin", self.session, blocks, ctypes.c_size_t(len(blocks)), ctypes.c_uint64(1000))
        self.call("flush", self.session, PATIENCE_MS)

    def close(self):
        self.call("close", self.session, PATIENCE_MS)
        self.library.kvpool_free(self.session)


def told_to_end(within_s):
    return bool(select.select([sys.stdin], [], [], within_s)[0])


def stale(library, socket, times):
    engine = Engine(library, socket, b"stale")
    blocks = engine.lease(8)
    engine.close()
    engine = Engine(library, socket, b"stale")
    engine.lease(2000 if times else 256)  # The eight are among them, with another generation.
    for _ in range(int(times or 0)):
        engine.touch(blocks)
    if times:
        engine.pin(blocks)
    print("ready", flush=True)
    while not told_to_end(1):
        if not times:
            engine.touch(blocks)
    engine.close()


def hold(library, socket, count):
    engine = Engine(library, socket, b"hold")
    engine.lease(int(count))
    print("ready", flush=True)
    while not told_to_end(PATIENCE_MS):
        pass
    engine.close()


def long(library, socket, _):
    engine = Engine(library, socket, b"long")
    blocks = engine.lease(8192)
    keys = os.urandom(len(blocks) * KEY_BYTES)
    engine.seal(blocks, keys)
    print("ready", flush=True)
    while not told_to_end(0.2):
        assert engine.match(keys) == len(blocks) * TOKENS_PER_BLOCK
    engine.close()


def only_open(library, socket, _):
    Engine(library, socket, os.urandom(8)).close()


def main(path, socket, what):
    library = ctypes.CDLL(path)
    library.kvpool_last_error.restype = ctypes.c_char_p
    for verb in ("free", "match_free", "seal_free"):
        getattr(library, f"kvpool_{verb}").restype = None
    what, _, count = what.partition("=")
    {"open": only_open, "hold": hold, "stale": stale, "long": long}[what](library, socket, count)


if __name__ == "__main__":
    main(*sys.argv[1:4])
