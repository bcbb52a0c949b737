"""The engine's side of the conformance suite's protocol (README.md beside this file), for engines that Python drives."""

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def serve(make: Callable[[], Any]) -> int:
    """Makes an engine and lets it answer: each line's "do" is a method of it, which takes the other fields and returns those of the
    answer. The engine may have `about`, what it says of itself once it is ready, and `close`. Returns the exit status."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What an engine prints is no answer.

    def say(**what: Any) -> None:
        print(json.dumps(what), file=out, flush=True)

    try:
        engine = make()
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        return 1
    say(ready=os.getpid(), **getattr(engine, "about", {}))
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say(**getattr(engine, asked.pop("do"))(**asked))
        except Exception as error:
            say(error=f"{type(error).__name__}: {error}")
    if hasattr(engine, "close"):
        engine.close()
    return 0


def signal_at(step: int, kill: list[int] | None = None, stop: list[int] | None = None) -> None:
    """What `generate` does when its model has run for the `step`th time: [process, step] of its `kill` and its `stop`."""
    for asked, number in ((kill, signal.SIGKILL), (stop, signal.SIGSTOP)):
        if asked is not None and asked[1] == step:
            os.kill(asked[0], number)
