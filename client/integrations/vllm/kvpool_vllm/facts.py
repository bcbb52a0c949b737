"""What K and V of an engine depend on: its fingerprint, and the facts of it that people can read."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvpool_engines.weights import weights_digest
from kvpool_vllm import groups

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig


def _weights_digest(model: ModelConfig, load: LoadConfig) -> str:
    return f"dummy, seed {model.seed}" if load.load_format == "dummy" else weights_digest(model.model, model.revision, load.download_dir)


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
        "weights": _weights_digest(model, vllm_config.load_config),
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
        facts["drafts"] = f"{drafts.method} {of_drafts} {_weights_digest(drafts.draft_model_config, drafts.draft_load_config or vllm_config.load_config)}"
    if (unit := getattr(cache, "prefix_match_unit", None)) not in (None, of_model[0].spec.block_size):
        facts["prefix_match_unit"] = str(unit)  # Keys are hashed over so many tokens each.
    if states:
        facts["states"] = hashlib.sha256(repr(states).encode()).hexdigest()  # Shapes and types of what a state is.
    if '"rope' in config and any(word in config for word in ('"longrope"', '"dynamic"')):
        facts["max_model_len"] = str(model.max_model_len)  # Frequencies go by it.
    return facts
