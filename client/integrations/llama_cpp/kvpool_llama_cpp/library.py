"""llama.cpp as a shared library: the few of its C functions that are used here, and what identifies a build of it.

Any library that exports llama.h serves; by itself, the one that is found is that of the package xllamacpp, which is
a wheel. Structures that llama.h passes by value differ between versions: Library checks the defaults that llama.cpp
fills in against those that it is known by, and refuses a library whose fields lie elsewhere.
"""

from __future__ import annotations

import collections
import ctypes
import glob
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

_POINTER, _I32, _U32, _SIZE, _BOOL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_bool
_SPARE = 64  # Words behind the fields that are known: what later versions add lies there, and is passed on.


class LlamaError(RuntimeError):
    """llama.cpp said no; with its last words."""


class ModelParams(ctypes.Structure):
    _fields_ = [("devices", _POINTER), ("tensor_buft_overrides", _POINTER), ("n_gpu_layers", _I32),
                ("spare", _U32 * _SPARE)]


class ContextParams(ctypes.Structure):
    _fields_ = [(name, _U32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max",
                                          "n_outputs_max_per_seq")]
    _fields_ += [(name, _I32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type", "pooling_type",
                                           "attention_type", "flash_attn_type")]
    _fields_ += [(name, ctypes.c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor",
                                                     "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")]
    _fields_ += [("yarn_orig_ctx", _U32), ("defrag_thold", ctypes.c_float), ("cb_eval", _POINTER),
                 ("cb_eval_user_data", _POINTER), ("type_k", _I32), ("type_v", _I32), ("moe_cache_size", _SIZE),
                 ("abort_callback", _POINTER), ("abort_callback_data", _POINTER)]
    _fields_ += [(name, _BOOL) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")]
    _fields_ += [("spare", _U32 * _SPARE)]

    # What llama_context_default_params() says, in every version that has these fields at these places.
    DEFAULTS = {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "rope_scaling_type": -1, "pooling_type": -1,
                "attention_type": -1, "flash_attn_type": -1, "yarn_ext_factor": -1.0, "yarn_beta_slow": -1.0,
                "yarn_orig_ctx": 0, "type_k": 1, "type_v": 1, "offload_kqv": True, "no_perf": True, "op_offload": True,
                "swa_full": True, "kv_unified": False}

    # Those that K, V or their place in a state depend on. n_ubatch: sums are rounded in another order. n_ctx: long
    # contexts choose other rotations in some models.
    OF_STATE = ("n_ctx", "n_ubatch", "ctx_type", "rope_scaling_type", "attention_type", "flash_attn_type", "rope_freq_base",
                "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow",
                "yarn_orig_ctx", "type_k", "type_v", "offload_kqv", "op_offload", "swa_full", "kv_unified")

    def of_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.OF_STATE}


class Batch(ctypes.Structure):
    _fields_ = [("n_tokens", _I32), ("token", _POINTER), ("spare", _POINTER * 8)]


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_ERROR = 4  # GGML_LOG_LEVEL_ERROR

_FUNCTIONS = {  # name: (result, arguments)
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [_LOG, _POINTER]),
    "llama_print_system_info": (ctypes.c_char_p, []),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (_POINTER, [ctypes.c_char_p, ModelParams]),
    "llama_init_from_model": (_POINTER, [_POINTER, ContextParams]),
    "llama_model_free": (None, [_POINTER]),
    "llama_free": (None, [_POINTER]),
    "llama_get_model": (_POINTER, [_POINTER]),
    "llama_get_memory": (_POINTER, [_POINTER]),
    "llama_n_ctx": (_U32, [_POINTER]),
    "llama_n_ctx_seq": (_U32, [_POINTER]),
    "llama_n_batch": (_U32, [_POINTER]),
    "llama_n_seq_max": (_U32, [_POINTER]),
    "llama_model_desc": (_I32, [_POINTER, ctypes.c_char_p, _SIZE]),
    "llama_model_is_recurrent": (_BOOL, [_POINTER]),
    "llama_model_is_hybrid": (_BOOL, [_POINTER]),
    "llama_model_get_vocab": (_POINTER, [_POINTER]),
    "llama_vocab_n_tokens": (_I32, [_POINTER]),
    "llama_vocab_is_eog": (_BOOL, [_POINTER, _I32]),
    "llama_tokenize": (_I32, [_POINTER, ctypes.c_char_p, _I32, _POINTER, _I32, _BOOL, _BOOL]),
    "llama_token_to_piece": (_I32, [_POINTER, _I32, ctypes.c_char_p, _I32, _I32, _BOOL]),
    "llama_batch_get_one": (Batch, [_POINTER, _I32]),
    "llama_decode": (_I32, [_POINTER, Batch]),
    "llama_get_logits_ith": (_POINTER, [_POINTER, _I32]),
    "llama_sampler_init_greedy": (_POINTER, []),
    "llama_sampler_sample": (_I32, [_POINTER, _POINTER, _I32]),
    "llama_sampler_free": (None, [_POINTER]),
    "llama_memory_seq_rm": (_BOOL, [_POINTER, _I32, _I32, _I32]),
    "llama_memory_seq_cp": (None, [_POINTER, _I32, _I32, _I32, _I32]),
    "llama_memory_seq_pos_min": (_I32, [_POINTER, _I32]),
    "llama_memory_seq_pos_max": (_I32, [_POINTER, _I32]),
    "llama_state_seq_get_size": (_SIZE, [_POINTER, _I32]),
    "llama_state_seq_get_data": (_SIZE, [_POINTER, _POINTER, _SIZE, _I32]),
    "llama_state_seq_set_data": (_SIZE, [_POINTER, _POINTER, _SIZE, _I32]),
}


def _find() -> str:
    spec = importlib.util.find_spec("xllamacpp")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(glob.glob(os.path.join(folder, "xllamacpp*.so"))):
            return path
    raise LlamaError("no llama.cpp: pip install xllamacpp, or name a library that exports llama.h")


def sha256_of(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class Library:
    """llama.h's functions by their names, with `llama_` left out: library.decode(context, batch)."""

    # Keyed by path: llama.cpp has its log and its backends once in a process.
    _open: dict[str, Library] = {}

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any:
            """Functions of _FUNCTIONS, set by _load."""

    def __new__(cls, path: str | None = None) -> Library:
        path = os.path.realpath(path or _find())
        if path not in cls._open:
            self = super().__new__(cls)
            self._load(path)
            cls._open[path] = self
        return cls._open[path]

    def _load(self, path: str) -> None:
        self.path = path
        loaded = ctypes.CDLL(path)
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(loaded, name)
            except AttributeError:
                raise LlamaError(f"{path} has no {name}: another version of llama.cpp") from None
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("llama_"), function)
        self._words: collections.deque[str] = collections.deque(maxlen=5)
        self._hear = _LOG(self._heard)  # Kept: llama.cpp has only its address.
        self.log_set(self._hear, None)
        self.backend_init()
        defaults = self.context_default_params()
        for name, known in ContextParams.DEFAULTS.items():
            if getattr(defaults, name) != known:
                raise LlamaError(f"{path}: {name} is {getattr(defaults, name)} by default, where {known} was to be expected: "
                                 "another version of llama.cpp, whose parameters lie elsewhere")

    def _heard(self, level: int, text: bytes | None, _: Any) -> None:
        if level == _ERROR and text:
            self._words.append(text.decode(errors="replace").strip())

    def error(self, what: str) -> LlamaError:
        words = " ".join(self._words)
        self._words.clear()
        return LlamaError(f"{what}: {words}" if words else what)

    def digest(self) -> str:
        """Of this build: the library, those of ggml that it has loaded, and what it has found this CPU to have."""
        files = {self.path}
        with open("/proc/self/maps") as maps:
            for line in maps:
                path = line.rstrip("\n").split(maxsplit=5)[5:]
                if path and os.path.basename(path[0]).startswith("libggml"):
                    files.add(os.path.realpath(path[0]))
        parts = sorted(sha256_of(path) for path in files)
        return hashlib.sha256(json.dumps([parts, self.print_system_info().decode()]).encode()).hexdigest()


def fingerprint_of(library: Library, models: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], parameters: Mapping[str, Any],
                   **more: Any) -> bytes:
    """SHA-256 of all that a state's bytes depend on: contexts of equal fingerprints may load each other's.

    library     a Library
    models      the GGUF, all its parts if it has several
    parameters  of the context, ContextParams.of_state()
    more        whatever else K and V depend on: adapters for good, control vectors
    """
    models = [models] if isinstance(models, (str, os.PathLike)) else list(models)
    facts = [library.digest(), [sha256_of(path) for path in models], sorted(parameters.items()), sorted(more.items())]
    return hashlib.sha256(json.dumps(facts).encode()).digest()
