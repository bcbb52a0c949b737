"""What K and V depend on, of an engine's files: digests that are kept for files that have not changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def _file_digest(path: str) -> str:
    # A blob of the Hugging Face cache is named by the SHA-256 of its content.
    name = os.path.basename(os.path.realpath(path))
    if len(name) == 64 and not set(name) - set("0123456789abcdef"):
        return name
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(8 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _remembered(path: str) -> str:
    """_file_digest, kept in $XDG_CACHE_HOME/kvpool-weights for files that have not changed since."""
    stat = os.stat(path)
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvpool-weights")
    identity = f"{os.path.realpath(path)} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino} {stat.st_dev}"
    kept = os.path.join(cache, hashlib.sha256(identity.encode()).hexdigest())
    try:
        with open(kept) as file:
            digest = file.read()
        if len(digest) == 64:
            return digest
    except OSError:
        pass
    digest = _file_digest(path)
    try:
        os.makedirs(cache, exist_ok=True)
        with open(f"{kept}.{os.getpid()}", "w") as file:
            file.write(digest)
        os.replace(f"{kept}.{os.getpid()}", kept)
    except OSError:
        pass  # Then it is computed again.
    return digest


def directory_of(model: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Of a model's files: itself, or where the Hugging Face cache has the model of this name."""
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download
    return str(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))


def weights_digest(model: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Of a file, or of all files of weights of a model."""
    if os.path.isfile(model):
        return _remembered(model)
    directory = directory_of(model, revision, download_dir)
    digest = hashlib.sha256()
    files = sorted(name for name in os.listdir(directory) if name.endswith(_WEIGHTS))
    if not files:
        raise ValueError(f"{directory} has no file of weights ({', '.join(_WEIGHTS)}): nothing tells what K and V depend on")
    for name in files:
        digest.update(f"{name} {_remembered(os.path.join(directory, name))}\n".encode())
    return digest.hexdigest()


def fingerprint_of(facts: Mapping[str, str]) -> bytes:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
