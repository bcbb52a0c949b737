#!/usr/bin/env python3
"""Runs what the READMEs of the integrations have a reader run, as it stands, in new environments, and looks at what it prints.

Usage: tests/engines/readmes.py [vllm] [transformers] [llama_cpp]

It needs kvpool's wheel (deploy/wheel.sh) and, for llama.cpp, the model of tests/engines.sh --gemma in $KVPOOL_ENGINES_DIR. It downloads what
the READMEs say, uses the paths in /tmp that they use, and takes some five minutes for each.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENGINES = pathlib.Path(os.environ.get("KVPOOL_ENGINES_DIR", "/var/tmp/kvpool-engines"))
TIME_LIMIT_S = 3600
END = "pkill -f -- '--port 800[0-9]' || true; while pgrep -f -- '--port 800[0-9]' >/dev/null; do sleep 1; done\n"


def fences(name):
    """[(language, text)] of the README's code, in order."""
    text = (ROOT / f"client/integrations/{name}/README.md").read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def program(text, name="ask.py"):
    """A Python program, saved under that name."""
    return f"cat >{name} <<'END_OF_PROGRAM'\n{text}END_OF_PROGRAM\n"


def vllm():
    install, model, serve, ask, said, from_python, connector, ask_again = (text for _, text in fences("vllm"))
    # A connector saves a step behind the answer.
    script = [install, model, serve, ask, END, program(from_python), "python ask.py\n", connector, ask_again]
    same = r'"token_ids":(\[[\d,]+\])\n"cached_tokens":0\n"token_ids":{}\n"cached_tokens":1984\n'
    return script, [same.format(r"\1"), r"SPACE +TENANT", same.format(r"\1")]


def transformers():
    install, start, ask = (text for _, text in fences("transformers"))
    script = ["python3 -m venv venv\n. venv/bin/activate\n", install, start, program(ask), "python ask.py\npython ask.py\n"]
    answers = r"[\d.]+ s: (\[[\d, ]+\])\n[\d.]+ s: \1\n[\d.]+ s: \[[\d, ]+\]\n"
    return script, [answers, answers]


def llama_cpp():
    install, ask, run, _ = (text for _, text in fences("llama_cpp"))
    script = ["python3 -m venv venv\n. venv/bin/activate\n", install, program(ask), run]
    return script, [re.escape(said) for said in re.findall(r"# (\d+ of \d+ tokens were in the pool)", run)]


def check(name, make, wheel):
    script, wanted = make()
    with tempfile.TemporaryDirectory(prefix="kvpool-readme-") as directory:
        for path in ("/tmp/vllm", "/tmp/model", "/tmp/kvpool"):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copy(ROOT / "LICENSE", directory)
        for model in ENGINES.glob("*.gguf"):
            os.symlink(model, pathlib.Path(directory) / model.name)
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", "".join(script)], cwd=directory, timeout=TIME_LIMIT_S, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                              env={**os.environ, "WHEEL": str(wheel)})
        subprocess.run(["bash", "-c", f"{END} pkill -f -- --socket=/tmp/kvpoold.sock"], check=False)
    rest = done.stdout
    for pattern in wanted if done.returncode == 0 else []:
        found = re.search(pattern, rest)
        if found is None:
            print(f"{done.stdout[-5000:]}\n{name}: no line is as {pattern}")
            return False
        rest = rest[found.end():]
    if done.returncode != 0:
        print(f"{done.stdout[-5000:]}\n{name}: ended with {done.returncode}")
        return False
    print(f"{name}: as its README says")
    return True


def main():
    wheels = sorted((ROOT / "build/dist").glob("kvpool-*.whl"))
    if not wheels:
        sys.exit("readmes.py: no wheel in build/dist: deploy/wheel.sh makes it")
    makers = {make.__name__: make for make in (vllm, transformers, llama_cpp)}
    names = sys.argv[1:] or list(makers)
    if unknown := set(names) - set(makers):
        sys.exit(f"readmes.py: {', '.join(sorted(unknown))}: must be of {', '.join(makers)}")
    failed = [name for name in names if not check(name, makers[name], wheels[-1])]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
