"""What measurements share: the model, its sessions, texts, and a file of figures that are not measured twice."""

import atexit
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
from kvpool_llama_cpp import Engine
from kvpool_transformers import KvPoolCache, open_session
from kvpool_transformers.model import facts_of
from transformers import AutoModelForCausalLM

import texts

BIN = pathlib.Path(os.environ["KVPOOL_BIN"])
GEMMA, GGUF = os.environ["KVPOOL_GEMMA"], os.environ["KVPOOL_GGUF"]
MODELS = {"Gemma 3 270M": (GEMMA, GGUF), "SmolLM2 135M": (os.environ["KVPOOL_SMOLLM2"], os.environ["KVPOOL_SMOLLM2_GGUF"])}
DIRECTORY = pathlib.Path(os.environ["KVPOOL_RESULTS_DIR"])


class Daemon:
    """A kvpoold of one measurement's own."""

    def __init__(self, capacity, *flags):
        self._directory = tempfile.TemporaryDirectory(prefix="kvpool-results-")
        self._path = pathlib.Path(self._directory.name)
        self.socket = str(self._path / "kvpoold.sock")
        self._command = [BIN / "kvpoold", "--device=host", f"--capacity={capacity}", f"--socket={self.socket}", f"--state-dir={self._path}",
                         "--metrics-listen=127.0.0.1:0", "--shutdown-grace=200ms"]
        self.start(*flags)
        atexit.register(self.close)

    def start(self, *flags):
        """Also again, once it has ended."""
        with open(self._path / "log", "ab") as log:
            self.process = subprocess.Popen([*self._command, *flags], stdout=log, stderr=log)
        subprocess.run([BIN / "kvpoolctl", f"--socket={self.socket}", "health", "--wait=60s"], check=True, capture_output=True)

    def end(self):
        """In order: what is cached goes to the tier."""
        self.process.terminate()
        if self.process.wait(60) != 0:
            raise RuntimeError(f"kvpoold ended with {self.process.returncode}")

    def kill(self):
        """What is cached is lost."""
        self.process.kill()
        self.process.wait()

    def ctl(self, *words):
        return json.loads(subprocess.run([BIN / "kvpoolctl", f"--socket={self.socket}", "--json", *words], check=True,
                                         capture_output=True, text=True).stdout)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._directory.cleanup()


class Store:
    """Figures of one table: a line of JSON each, {"cell": ..., "value": ...}."""

    def __init__(self, name):
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        self.path = DIRECTORY / f"{name}.jsonl"
        self._known = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                entry = json.loads(line)
                self._known[json.dumps(entry["cell"], sort_keys=True)] = entry["value"]

    def __contains__(self, cell):
        return json.dumps(cell, sort_keys=True) in self._known

    def put(self, cell, value):
        self._known[json.dumps(cell, sort_keys=True)] = value
        with open(self.path, "a") as file:
            file.write(json.dumps({"cell": cell, "value": value}) + "\n")

    def where(self, **fields):
        """[(cell, value)] of the cells that have these fields."""
        cells = ((json.loads(key), value) for key, value in self._known.items())
        return [(cell, value) for cell, value in cells if fields.items() <= cell.items()]


class Lab:
    """Loads each thing when the first measurement asks for it. A cell says of which model: Gemma 3 270M where it says nothing."""

    def __init__(self):
        self._made = {}

    def once(self, key, make):
        """`make()` the first time; of records, which are large, only the last one is kept."""
        if key not in self._made:
            if key[0] == "record":
                self._made = {other: value for other, value in self._made.items() if other[0] != "record"}
            self._made[key] = make()
        return self._made[key]

    def model(self, cell):
        def load():
            torch.set_num_threads(1)
            return AutoModelForCausalLM.from_pretrained(_files(cell)[0], dtype=torch.bfloat16).eval()
        return self.once(("model", _name(cell)), load)

    @property
    def texts(self):
        return self.once(("texts",), lambda: texts.texts(DIRECTORY / "texts"))

    def tokenizer(self, cell):
        """f(text, special=True) -> token ids: with `special`, what the model puts in front of a text is in front."""
        return self.once(("engine", _name(cell)), lambda: Engine(_files(cell)[1], n_ctx=512, threads=1)).tokenize

    def session(self, cell):
        """Of this model, with attention that tells of itself."""
        daemon = self.once(("daemon",), lambda: Daemon("1GiB"))
        return self.once(("session", _name(cell), cell["block"]), lambda: open_session(
            self.model(cell), tokens_per_block=cell["block"], signals=True, socket=daemon.socket, magazine_blocks=0))

    def facts(self, cell):
        return facts_of(self.session(cell))

    def cache(self, cell, kind=KvPoolCache, **options):
        """As a cell says."""
        if cell["policy"] != "full":
            options.update(policy=cell["policy"], budget=cell["budget"], params=cell.get("params"), scope=cell.get("scope", "sequence"),
                           heads=cell.get("heads", "equal"), most=cell.get("most"),
                           disposition=cell.get("disposition", "drop"), low_bits=cell.get("low_bits"))
        return kind(self.session(cell), seal=False, **options)


def _name(cell):
    return cell.get("model", "Gemma 3 270M")


def _files(cell):
    return MODELS[_name(cell)]


def measure(name, cells, value_of, lab):
    """Fills the table's store. A line of progress every ten seconds."""
    store, cells = Store(name), list(cells)
    missing = [cell for cell in cells if cell not in store]
    began = told = time.monotonic()
    for done, cell in enumerate(missing, 1):
        store.put(cell, value_of(lab, cell))
        now = time.monotonic()
        if now - told > 10 or done == len(missing):
            told = now
            left = (now - began) / done * (len(missing) - done)
            print(f"{name}: {len(cells) - len(missing) + done} of {len(cells)}, {left / 60:.1f} minutes left", file=sys.stderr,
                  flush=True)
    return store
