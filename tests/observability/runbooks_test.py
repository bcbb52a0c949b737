"""Checks the runbooks against a live daemon under load and against the sources. Usage: runbooks_test.py ROOT BIN

Each line of each `sh` block, and each `kvpoolctl …` within a sentence, runs with the programs that the image has and no others, and must
succeed; so must each `kvpool-sim …`, on what the daemon recorded. Log events, and fields of theirs,
must be in a Log call of the server; flags in some program's --help; panels on a dashboard; columns in kvpoolctl's tables; containers and
labels that a `kubectl …` names in the manifests.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from programs import Daemon, Programs, until

# Programs of debian:12-slim that a runbook may use. bash runs the lines.
IMAGE_PROGRAMS = ("cat", "cut", "grep", "head", "ls", "sort", "tail", "tr", "uniq", "wc")
OTHERS_FLAGS = {"--previous"}  # kubectl's


def blocks(text, language):
    """The fenced blocks of one language, which are indented within lists."""
    return re.findall(rf"^[ ]*```{language}\n(.*?)^[ ]*```", text, re.MULTILINE | re.DOTALL)


def commands(text):
    lines = [line.strip() for block in blocks(text, "sh") for line in block.splitlines()]
    prose = re.sub(r"^[ ]*```.*?^[ ]*```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for line in lines if line] + re.findall(r"`(kvpool(?:ctl|-sim) [^`]+)`", prose)


def log_calls(root):
    """{event: the call that logs it}, from the server's sources."""
    calls = {}
    for path in (root / "server").rglob("*.cc"):
        for call in re.findall(r"\bLog(?:Debug|Info|Warning|Error)?\((.*?)\);", path.read_text(encoding="utf-8"), re.DOTALL):
            for words in re.findall(r'"([a-z][^"]* [^"]*|serving|ended|device|draining)"', call):
                calls[words] = call
    return calls


def flags(bins):
    helps = [subprocess.run([bins / "kvpoold", "--help"], capture_output=True, text=True, check=True).stdout]
    helps.append(subprocess.run([bins / "kvpool-sim", "--help"], capture_output=True, text=True, check=True).stdout)
    names = re.findall(r"^  (\w+) ", subprocess.run([bins / "kvpoolctl", "--help"], capture_output=True, text=True, check=True).stdout,
                       re.MULTILINE)
    helps += [subprocess.run([bins / "kvpoolctl", name, "--help"], capture_output=True, text=True, check=True).stdout for name in names]
    return set(re.findall(r"^  (--[a-z-]+)", "\n".join(helps), re.MULTILINE)) | OTHERS_FLAGS


def unknown_to_kubernetes(root, text):
    """What `kubectl …` names and the manifests don't have."""
    base = root / "deploy/kubernetes/base"
    containers = re.findall(r"^ +- name: (\S+)\n +image:", (base / "deployment.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    labels = re.findall(r"^ +(\S+/\S+): (\S+)$", (base / "kustomization.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    known = {"-c": set(containers), "-l": {f"{key}={value}" for key, value in labels}}
    return [f"{option} {name}" for line in re.findall(r"`(kubectl [^`]+)`", text) for option, name in re.findall(r" (-[cl]) (\S+)", line)
            if name not in known[option]]


def false_claims(root, bins, name, text):
    found = [f"{name}: the manifests have nothing that `kubectl {what}` names" for what in unknown_to_kubernetes(root, text)]
    calls = log_calls(root)
    for event in re.findall(r"[Ll]og event `([^`]+)`", text):
        if event not in calls:
            found.append(f"{name}: nothing in server/ logs the event `{event}`")
    for field, event in re.findall(r"`(\w+)` of log\s+event `([^`]+)`", text):
        if f'{{"{field}",' not in calls.get(event, ""):
            found.append(f"{name}: log event `{event}` has no field `{field}`")
    for paragraph in re.split(r"\n\s*\n|\n(?=\d\. )", text):
        if re.search(r"\b(daemon's|[Tt]he|its) log\b", paragraph) and not re.search(r"[Ll]og event|does\s+not\s+(log|name)", paragraph):
            found.append(f"{name}: speaks of the log, and names no log event: {paragraph.strip()[:80]}")
    known = flags(bins)
    found += [f"{name}: no program has the flag {flag}" for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text) if flag not in known]
    titles = {panel["title"] for path in (root / "dashboards").glob("*.json") for panel in json.loads(path.read_text())["panels"]}
    found += [f'{name}: no panel "{title}"' for title in re.findall(r'[Pp]anel\s+"([^"]+)"', text) if title not in titles]
    tables = (root / "client/ctl/render.cc").read_text(encoding="utf-8")
    found += [f"{name}: kvpoolctl has no column {column}" for column in re.findall(r"[Cc]olumn ([A-Z]+(?: [A-Z]+)*)", text)
              if not re.search(rf'">?{column}"', tables)]
    return found


def load(daemon):
    """Starts engines, and returns values for what a runbook's lines leave open."""
    replay = daemon.replay("--time-scale=0.2", "--engines=2")

    def facts():
        sessions = [session for session in daemon.ctl("sessions")["sessions"] if not session["ended"]]
        if len(sessions) != 2:
            return None
        space = sessions[0]["space"]
        cached = daemon.ctl("blocks", f"--space={space}", "--state=cached", "--limit=1")["blocks"]
        if not cached:
            return None
        key = "base64:" + cached[0]["key"]
        if int(daemon.ctl("pin", f"--key={key}", "--ttl=1h")["pinned"]) == 0:
            return None
        return {"SESSION": sessions[0]["session"], "SPACE": space, "BLOCK": str(cached[0]["block"]), "KEY": key,
                "PID": sessions[0]["members"][0]["pid"], "EVENTS": str(daemon.folder / "events"), "FOLDER": str(daemon.folder / "other"),
                "BLOCK_BYTES": next(one["block_stride_bytes"] for one in daemon.ctl("spaces")["spaces"] if one["space"] == space)}

    return replay, until("two engines and a block that can be pinned", facts)


def failed_commands(daemon, path, name, lines):
    replay, facts = load(daemon)
    found = []
    for line in lines:
        done = subprocess.run(["/bin/bash", "-euo", "pipefail", "-c", line], capture_output=True, text=True, check=False, timeout=60,
                              cwd=daemon.folder, env={"PATH": str(path), "KVPOOL_SOCKET": str(daemon.socket), **facts})
        if done.returncode != 0 or not done.stdout.strip():
            found.append(f"{name}: `{line}` ends with {done.returncode}: {done.stdout}{done.stderr}")
    daemon.programs.forget(replay)
    replay.kill()
    replay.wait()
    until("the end of the sessions", lambda: not daemon.ctl("sessions")["sessions"])
    return found


def main(root, bins):
    books = sorted((root / "deploy/runbooks").glob("*.md"))
    found = [claim for book in books for claim in false_claims(root, bins, book.name, book.read_text(encoding="utf-8"))]
    programs, count = Programs(), 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        path = folder / "bin"
        path.mkdir()
        for program in IMAGE_PROGRAMS:
            (path / program).symlink_to(shutil.which(program))
        for program in ("kvpoolctl", "kvpool-sim"):
            (path / program).symlink_to(bins / program)
        try:
            daemon = Daemon(programs, bins, folder, "--capacity=64MiB", "--slab-bytes=8MiB", f"--event-log={folder}/events",
                            f"--tier=file:{folder}/tier,capacity=64MiB")
            for book in books:
                lines = commands(book.read_text(encoding="utf-8"))
                count += len(lines)
                if lines:
                    found += failed_commands(daemon, path, book.name, lines)
        finally:
            programs.stop()
    print("\n".join(found) or f"{count} commands of {len(books)} runbooks succeed, and what they speak of exists")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*(pathlib.Path(argument).resolve() for argument in sys.argv[1:3])))
