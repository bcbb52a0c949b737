"""What K and V of an engine depend on: its fingerprint, and the facts of it that people can read."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvpool_vllm import groups

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

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
    """_file_digest, kept in $XDG_CACHE_HOME/kvpool-vllm for files that have not changed since."""
    stat = os.stat(path)
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvpool-vllm")
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


def weights_digest(model: ModelConfig, load: LoadConfig) -> str:
    if load.load_format == "dummy":
        return f"dummy, seed {model.seed}"
    directory = model.model
    if os.path.isfile(directory):
        return _remembered(directory)
    if not os.path.isdir(directory):
        from huggingface_hub import snapshot_download
        directory = snapshot_download(model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True)
    digest = hashlib.sha256()
    files = sorted(name for name in os.listdir(directory) if name.endswith(_WEIGHTS))
    if not files:
        raise ValueError(f"{directory} has no file of weights ({', '.join(_WEIGHTS)}): nothing tells what K and V depend on")
    for name in files:
        digest.update(f"{name} {_remembered(os.path.join(directory, name))}\n".encode())
    return digest.hexdigest()


def _model_config(model: Any) -> str:
    config = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version", "_attn_implementation_autoset"):
        config.pop(name, None)
    return json.dumps(config, sort_keys=True, default=str)


def has_drafts_with_kv(vllm_config: VllmConfig) -> bool:
    """Blocks hold layers of a draft model, too."""
    return vllm_config.speculative_config is not None and vllm_config.speculative_config.use_eagle()


def facts_of(vllm_config: VllmConfig, of_model: Sequence[groups.Group], isa: str, layout: str) -> dict[str, str]:
    """{name: what of it, in at most 256 bytes}: K and V may be shared if all are equal. `of_model`: its groups."""
    import vllm
    spec = next((group.spec for group in of_model if not group.has_states), None)
    states = [group.spec for group in of_model if group.has_states]
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    config = _model_config(model)
    facts = {
        "model": hashlib.sha256(config.encode()).hexdigest(),
        "architecture": ",".join(getattr(model.hf_config, "architectures", None) or ["?"])[:256],
        "weights": weights_digest(model, vllm_config.load_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(spec.dtype).removeprefix("torch.") if spec else "none",
        "block_size": str(of_model[0].spec.block_size),
        "groups": groups.describe(of_model),
        "layout": layout,
        "quantization": str(model.quantization),
        "attention": isa,
        "hash": cache.prefix_caching_hash_algo,
        "ranks": str(parallel.tensor_parallel_size),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),  # Keys are hashed over what it pickles.
        "machine": platform.machine(),
    }
    if has_drafts_with_kv(vllm_config):
        drafts = vllm_config.speculative_config
        of_drafts = hashlib.sha256(_model_config(drafts.draft_model_config).encode()).hexdigest()
        facts["drafts"] = f"{drafts.method} {of_drafts} {weights_digest(drafts.draft_model_config, drafts.draft_load_config or vllm_config.load_config)}"
    if (unit := getattr(cache, "prefix_match_unit", None)) not in (None, of_model[0].spec.block_size):
        facts["prefix_match_unit"] = str(unit)  # Keys are hashed over so many tokens each.
    if states:
        facts["states"] = hashlib.sha256(repr(states).encode()).hexdigest()  # Shapes and types of what a state is.
    if '"rope' in config and any(word in config for word in ('"longrope"', '"dynamic"')):
        facts["max_model_len"] = str(model.max_model_len)  # Frequencies go by it.
    return facts


def fingerprint_of(facts: Mapping[str, str]) -> bytes:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
