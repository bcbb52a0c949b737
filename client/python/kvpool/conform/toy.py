"""An engine whose model is a hash, as an example of the protocol: kvpool-conform -- python -m kvpool.conform.toy --socket={socket} --other={other}

K of a token depends on all tokens in front, and what is said next on K of all tokens, so that any byte of the pool that is not what it
should be changes the answer. What the pool cannot do in time, the engine does in memory of its own.
"""

import argparse
import hashlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import kvpool
from kvpool.conform import adapter

VOCABULARY = 512
ROW_BYTES = 64  # K and V of a token.
ANSWER_S = 20.0  # A daemon that takes longer is done without,
BLOCKS_S = 0.3   # and so is a pool that is so long short of blocks.


class OwnMemory:
    """K and V of a sequence, without a pool."""

    found = 0

    def __init__(self) -> None:
        self.rows: list[bytes] = []

    def read(self, token: int) -> bytes:
        return self.rows[token]

    def write(self, text: list[int], token: int, row: bytes) -> None:
        self.rows.append(row)

    def release(self) -> None:
        self.rows.clear()


class PoolMemory:
    """The same in blocks of the pool: those that were found, and leased ones behind them, which are sealed when they are full."""

    def __init__(self, session: kvpool.Session, size: int, prompt: list[int], salt: bytes) -> None:
        self.session, self.size, self.hasher = session, size, session.hasher(salt)
        self.data = np.asarray(session.data(blocks=session.max_blocks))  # [blocks, bytes], in place
        # The last token is computed in any case: what comes next depends on it.
        if keys := self.keys(prompt)[:(len(prompt) - 1) // size]:
            hit = session.match(keys).wait(ANSWER_S)
            self.found, self.blocks = hit.tokens, hit.blocks
        else:
            self.found, self.blocks = 0, session.lease(1, BLOCKS_S)

    def keys(self, text: list[int]) -> list[bytes]:
        return self.hasher.chain(text, self.size)

    def row(self, token: int) -> Any:
        at = token % self.size * ROW_BYTES
        return self.data[self.blocks.ids[token // self.size], at:at + ROW_BYTES]

    def read(self, token: int) -> bytes:
        return bytes(self.row(token))

    def write(self, text: list[int], token: int, row: bytes) -> None:
        if token == len(self.blocks) * self.size:
            self.blocks.extend(self.session.lease(1, BLOCKS_S))
        self.row(token)[:] = np.frombuffer(row, np.uint8)
        if (token + 1) % self.size == 0:
            self.seal(self.keys(text[:token + 1]))

    def seal(self, keys: list[bytes]) -> None:
        """The last block, under the last of its sequence's keys."""
        self.session.seal(self.blocks.refs[-1:], keys[-1:], parent_key=keys[-2] if len(keys) > 1 else None)

    def release(self) -> None:
        self.blocks.release()


class Engine:
    memory = PoolMemory

    def __init__(self, socket: str, other: str) -> None:
        """other: what of it is not as usual, "model", "dtype" or "block"; "": nothing."""
        self.size = 32 if other == "block" else 16
        self.model = f"{'another' if other == 'model' else 'a'} model in {'float16' if other == 'dtype' else 'float32'}"
        self.fingerprint = f"{self.model}, in blocks of {self.size} tokens"  # All that K and V, and their places, depend on.
        self.about = {"block": self.size, "ids": [1, VOCABULARY], "longest": 1024, "salts": True, "shares_again": True,
                      "others": ["model", "dtype", "block"]}
        self.socket = socket
        self.session: kvpool.Session | None = self.open() if socket else None

    def open(self, timeout: float = 60.0) -> kvpool.Session:
        layout = kvpool.Layout.opaque(block_bytes=self.size * ROW_BYTES, tokens_per_block=self.size)
        return kvpool.Session(layout, self.fingerprint, socket=self.socket, client_name="toy", open_timeout=timeout)

    def generate(self, prompts: list[list[int]], tokens: int, salt: str = "", kill: list[int] | None = None,
                 stop: list[int] | None = None) -> dict[str, Any]:
        steps = itertools.count(1)
        answers = [self.answer(prompt, tokens, salt.encode(), lambda: adapter.signal_at(next(steps), kill, stop)) for prompt in prompts]
        return {"tokens": [said for said, _ in answers], "cached": [cached for _, cached in answers]}

    def answer(self, prompt: list[int], tokens: int, salt: bytes, step: Callable[[], None]) -> tuple[list[int], int]:
        try:
            if self.session is None and self.socket:
                self.session = self.open(BLOCKS_S)  # There may be a daemon again.
            if self.session is not None:
                return self.compute(self.memory(self.session, self.size, prompt, salt), prompt, tokens, step)
        except (kvpool.DeadlineExceededError, kvpool.ResourceExhaustedError) as error:
            self.late(error)
        except (kvpool.UnavailableError, kvpool.SessionEndedError) as error:
            self.lost(error)
        return self.compute(OwnMemory(), prompt, tokens, step)

    def late(self, error: kvpool.KvpoolError) -> None:
        """No answer in time, or no blocks."""

    def lost(self, error: kvpool.KvpoolError) -> None:
        """No daemon."""
        self.session = None

    def compute(self, memory: OwnMemory | PoolMemory, prompt: list[int], tokens: int, step: Callable[[], None]) -> tuple[list[int], int]:
        text = list(prompt)
        try:
            for token in itertools.count(memory.found):
                before = memory.read(token - 1) if token else b""
                memory.write(text, token, hashlib.shake_256(f"{self.model} {text[token]} ".encode() + before).digest(ROW_BYTES))
                step()
                if token + 1 == len(text):
                    all_rows = b"".join(map(memory.read, range(token + 1)))
                    text.append(int.from_bytes(hashlib.sha256(all_rows).digest()[:4], "big") % VOCABULARY)
                if len(text) == len(prompt) + tokens:
                    break
        finally:
            memory.release()
        return text[len(prompt):], memory.found

    def flush(self) -> dict[str, Any]:
        if self.session is not None:
            self.session.flush()
        return {}

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def main(kind: type[Engine] = Engine) -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--socket", default="")
    arguments.add_argument("--other", default="")
    given = arguments.parse_args()
    return adapter.serve(lambda: kind(given.socket, given.other))


if __name__ == "__main__":
    sys.exit(main())
