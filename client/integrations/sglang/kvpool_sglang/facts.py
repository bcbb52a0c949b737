"""What the pages of a pool depend on: its space's fingerprint, and the facts of it that people can read."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from typing import TYPE_CHECKING, Any

from kvpool_engines.weights import directory_of, fingerprint_of, weights_digest

from kvpool_sglang.options import Options

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

# Arguments of the server that K and V go by, beside the files of the model.
_ARGUMENTS = ("dtype", "quantization", "kv_cache_dtype", "quantization_param_path", "json_model_override_args", "context_length", "model_impl",
              "attention_backend", "prefill_attention_backend", "decode_attention_backend", "speculative_algorithm",
              "speculative_draft_model_quantization", "load_format", "model_loader_extra_config", "decrypted_config_file", "modelopt_quant",
              "modelopt_checkpoint_restore_path", "rl_quant_profile", "kt_weight_path", "kt_method", "kt_num_gpu_experts",
              "kt_max_deferred_experts_per_token", "enforce_shared_experts_fusion", "flashinfer_mxfp4_moe_precision",
              "enable_w4a4_mxfp4_megamoe", "enable_precise_embedding_interpolation")
# Of a host pool, where it has them.
_GEOMETRY = ("layout", "dtype", "page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim", "kv_lora_rank",
             "qk_rope_head_dim", "kv_cache_dim", "storage_format_tag")


def _argument(name: str) -> Any:
    """What SGLang made of an argument; None: it has none of that name."""
    from sglang.srt.arg_groups.overrides import resolution_result
    from sglang.srt.runtime_context import get_server_args
    return resolution_result(get_server_args(), name)


def _files(path: str, config: str, revision: str | None = None) -> str:
    """Digests of weights and of the file that says how they are used."""
    cache = _argument("download_dir")
    if os.path.isfile(path):
        return weights_digest(path)
    with open(os.path.join(directory_of(path, revision, cache), config), "rb") as file:
        return f"{weights_digest(path, revision, cache)} {hashlib.sha256(file.read()).hexdigest()}"


def _model(path: str, load_format: str, revision: str | None) -> str:
    if load_format == "dummy":
        return f"dummy, seed {_argument('random_seed')}, {path}"[:256]
    return _files(path, "config.json", revision)


def _adapters() -> str:
    """SGLang's keys have an adapter's name and path where it was given at the start, and otherwise what no other server has. So the
    files of the former count, too."""
    adapters = [[adapter.lora_name, adapter.lora_path, _files(adapter.lora_path, "adapter_config.json")]
                for adapter in _argument("lora_paths") or ()]
    return hashlib.sha256(json.dumps(adapters).encode()).hexdigest() if adapters else "none"


def _ranks(name: str, pool: Any, config: HiCacheStorageConfig) -> str:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    # Latent K and V are the same on all ranks, of which the first one writes. States, and drafts that have heads, are not.
    replicated = config.is_mla_model and name != "mamba" and not isinstance(pool, MHATokenToKVPoolHost)
    return (f"tp {'any' if replicated else config.tp_rank}/{config.tp_size} pp {config.pp_rank}/{config.pp_size} "
            f"cp {config.attn_cp_rank}/{config.attn_cp_size}")


def facts_of(name: str, pool: Any, piece_bytes: list[int], config: HiCacheStorageConfig) -> dict[str, str]:
    """{name: what of it, in at most 256 bytes}: pages may be shared if all are equal. `piece_bytes`: of each piece of a page."""
    import sglang
    import torch
    geometry = {field: str(getattr(pool, field)) for field in _GEOMETRY if getattr(pool, field, None) is not None}
    facts = {
        "engine": "sglang",
        "sglang": sglang.__version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "pool": f"{name} {type(pool).__name__}"[:256],
        "page": hashlib.sha256(json.dumps([geometry, piece_bytes], sort_keys=True).encode()).hexdigest(),
        "layout": str(pool.layout),
        "page_size": str(pool.page_size),
        "ranks": _ranks(name, pool, config),
        "weights": _model(_argument("model_path"), _argument("load_format"), _argument("revision")),
        "arguments": hashlib.sha256(json.dumps({field: str(_argument(field)) for field in _ARGUMENTS}).encode()).hexdigest(),
        "adapters": _adapters(),
    }
    if draft := _argument("speculative_draft_model_path"):
        facts["drafts"] = _model(draft, _argument("speculative_draft_load_format") or _argument("load_format"),
                                 _argument("speculative_draft_model_revision"))
    return facts


def digest_of(options: Options, facts: dict[str, str]) -> bytes:
    """The fingerprint's: of the spaces' name, the pool and the rank, or of the facts."""
    if options.space:
        return hashlib.sha256(json.dumps(["sglang", options.space, facts["pool"], facts["ranks"]]).encode()).digest()
    return fingerprint_of(facts)
