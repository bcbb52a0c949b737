"""The toy engine of kvpool.conform with defects, one at a time: --defect=NAME, a class of this file. For conform_test.py."""

import argparse
import os
import signal
import subprocess
import sys
import time

import kvpool
from kvpool.conform import adapter, toy


class ReadsAnotherRow(toy.Engine):
    class memory(toy.PoolMemory):
        def read(self, token):
            return super().read(token if token < self.size else token - self.size)


class SharesNothing(toy.Engine):
    class memory(toy.PoolMemory):
        def seal(self, keys):
            pass


class SharesAtItsEnd(toy.Engine):
    class memory(toy.PoolMemory):
        ends = []

        def seal(self, keys):
            blocks = self.blocks.refs
            self.ends.append(lambda: self.session.seal(blocks[-1:], keys[-1:], parent_key=keys[-2] if len(keys) > 1 else None))

        def release(self):
            self.blocks.detach()

    def close(self):
        for end in self.memory.ends:
            end()
        super().close()


class HasOneSalt(toy.Engine):
    class memory(toy.PoolMemory):
        def __init__(self, session, size, prompt, salt):
            super().__init__(session, size, prompt, b"salt")


class HasOneFingerprint(toy.Engine):
    def open(self, timeout=60.0):
        self.fingerprint = "any"
        return super().open(timeout)


class CountsWhatItComputes(toy.Engine):
    def generate(self, prompts, tokens, **more):
        return {**super().generate(prompts, tokens, **more), "cached": [(len(prompt) - 1) // self.size * self.size for prompt in prompts]}


class ForgetsWhatIsInFront(toy.Engine):
    """Keys of a block tell its own tokens, and not those of the blocks in front."""

    class memory(toy.PoolMemory):
        def keys(self, text):
            return [self.hasher.chain(text[i:i + self.size], self.size)[0] for i in range(0, len(text) // self.size * self.size, self.size)]


class HashesHalfOfABlock(toy.Engine):
    class memory(toy.PoolMemory):
        def keys(self, text):
            return super().keys([0 if i % self.size < self.size // 2 else token for i, token in enumerate(text)])


class FindsWholePromptsOnly(toy.Engine):
    class memory(toy.PoolMemory):
        def __init__(self, session, size, prompt, salt):
            super().__init__(session, size, prompt, salt)
            if self.found < (len(prompt) - 1) // size * size:
                self.blocks.release()
                self.found, self.blocks = 0, session.lease(1, toy.BLOCKS_S)


class KeepsWhatItFound(toy.Engine):
    class memory(toy.PoolMemory):
        def release(self):
            if self.found:
                self.blocks.split(self.found // self.size).release()
                self.blocks.detach()
            super().release()


class KeepsALease(toy.Engine):
    class memory(toy.PoolMemory):
        def release(self):
            super().release()
            self.session.lease(1).detach()


class LeavesAProcess(toy.Engine):
    """A worker with a session of its own, which ends with the daemon."""

    def __init__(self, socket, other):
        super().__init__(socket, other)
        if socket:
            worker = subprocess.Popen([sys.executable, __file__, "--worker", f"--socket={socket}"], start_new_session=True,
                                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            worker.stdout.readline()


def worker(socket):
    engine = toy.Engine(socket, "")
    print("ready", flush=True)
    while os.path.exists(socket):
        time.sleep(0.01)
    engine.close()


class WritesIntoASealedBlock(toy.Engine):
    class memory(toy.PoolMemory):
        def release(self):
            if self.found:
                self.row(self.found - 1)[-1] ^= 1
            super().release()


class SealsBeforeItWrites(toy.Engine):
    class memory(toy.PoolMemory):
        def write(self, text, token, row):
            super().write(text, token, row)
            if token % self.size == 0 and len(text) > token + self.size:
                keys = self.keys(text[:token + self.size])
                self.session.seal(self.blocks.refs[-1:], keys[-1:], parent_key=keys[-2] if len(keys) > 1 else None).wait()

        def seal(self, keys):
            pass


class EndsWithTheDaemon(toy.Engine):
    def lost(self, error):
        os._exit(1)


class InventsAnswersWithoutADaemon(toy.Engine):
    def lost(self, error):
        super().lost(error)
        self.model += "?"


class NeverSharesAgain(toy.Engine):
    def lost(self, error):
        super().lost(error)
        self.socket = ""


class RefusesWhenItIsLate(toy.Engine):
    class memory(toy.PoolMemory):
        def __init__(self, session, size, prompt, salt):
            super().__init__(session, size, prompt, salt)
            session.flush(timeout=PATIENCE_S)

    def late(self, error):
        raise error


PATIENCE_S = 1.0


class TakesItsOldestBlockAgain(toy.Engine):
    """Where there is no other."""

    class memory(toy.PoolMemory):
        def write(self, text, token, row):
            try:
                super().write(text, token, row)
            except kvpool.KvpoolError:
                self.blocks.extend(self.session.ref(self.blocks.refs[:1]))
                super().write(text, token, row)

        def seal(self, keys):
            pass  # What it says is wrong, what it shares is not.


class WaitsForEver(toy.Engine):
    def late(self, error):
        signal.pause()


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--worker", action="store_true")
    arguments.add_argument("--defect")
    arguments.add_argument("--socket")
    arguments.add_argument("--other")
    given = arguments.parse_args()
    if given.worker:
        return worker(given.socket)
    return adapter.serve(lambda: globals()[given.defect](given.socket, given.other))


if __name__ == "__main__":
    sys.exit(main())
