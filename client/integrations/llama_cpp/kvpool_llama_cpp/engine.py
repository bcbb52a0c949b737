"""A small engine on llama.cpp: one live sequence, greedy. What it has of a prompt it does not compute again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvpool_llama_cpp.library import Library, fingerprint_of
from kvpool_llama_cpp.prefix_cache import PrefixCache


class Engine:
    """A GGUF, a context, and what the context's sequence has.

    model     a GGUF
    pool      options of PrefixCache and of kvpool.Session; None: prefixes are those of this engine alone
    n_ctx     tokens of the longest sequence
    context   more fields of llama_context_params
    library   a Library, or the path of one
    """

    def __init__(self, model: str | os.PathLike[str], *, pool: Mapping[str, Any] | None = None, n_ctx: int = 4096, n_batch: int = 512,
                 threads: int | None = None, n_gpu_layers: int | None = None, library: Library | str | None = None,
                 context: Mapping[str, Any] | None = None) -> None:
        self.library = library if isinstance(library, Library) else Library(library)
        self._model = self._context = self._greedy = None
        self.cache: PrefixCache | None = None
        params = self.library.model_default_params()
        if n_gpu_layers is not None:
            params.n_gpu_layers = n_gpu_layers
        self._model = self.library.model_load_from_file(os.fsencode(model), params)
        if not self._model:
            raise self.library.error(f"loading {model}")
        wanted = self.library.context_default_params()
        # Sharing takes a scratch sequence, cells that sequences share, and windows that keep what they have slid over.
        more: dict[str, Any] = {"n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_batch, "n_seq_max": 2, "kv_unified": True, "swa_full": True}
        if threads is not None:
            more.update(n_threads=threads, n_threads_batch=threads)
        for name, value in {**more, **(context or {})}.items():
            setattr(wanted, name, value)
        self._context = self.library.init_from_model(self._model, wanted)
        if not self._context:
            self.close()
            raise self.library.error("making a context")
        self._vocabulary = self.library.model_get_vocab(self._model)
        self._memory = self.library.get_memory(self._context)
        self._greedy = self.library.sampler_init_greedy()
        self._batch = wanted.n_batch
        self._has: list[int] = []  # Tokens of sequence 0.
        # Tokens of the last prompt that the sequence had, and that the pool had beyond.
        self.reused = self.found = 0
        if pool is not None:
            try:
                self.cache = PrefixCache(self.library, self._context, fingerprint_of(self.library, model, wanted.of_state()),
                                         **pool)
            except BaseException:
                self.close()
                raise

    # ---- Tokens

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Token ids; with those that begin a text, if `special`."""
        data = text.encode()
        room = len(data) + 8
        tokens = (ctypes.c_int32 * room)()
        count = self.library.tokenize(self._vocabulary, data, len(data), ctypes.addressof(tokens), room, special, True)
        if count < 0:
            raise self.library.error(f"tokenizing {len(data)} bytes")
        return tokens[:count]

    def text_of(self, tokens: Iterable[int]) -> str:
        pieces = []
        for token in tokens:
            piece = ctypes.create_string_buffer(256)
            pieces.append(piece.raw[:max(self.library.token_to_piece(self._vocabulary, token, piece, 256, 0, True), 0)])
        return b"".join(pieces).decode(errors="replace")

    # ---- Computing

    def reset(self) -> None:
        """Forgets its own sequence."""
        self.library.memory_seq_rm(self._memory, 0, -1, -1)
        self._has = []

    def prefill(self, tokens: Iterable[int]) -> None:
        """The sequence has `tokens`: what it or the pool has of them is not computed."""
        tokens = list(tokens)
        common = 0
        for ours, theirs in zip(self._has, tokens[:-1]):
            if ours != theirs:
                break
            common += 1
        self.library.memory_seq_rm(self._memory, 0, common, -1)
        self.reused, self.found = common, 0
        if self.cache is not None:
            has = self.cache.load(tokens, have=common)
            self.found, common = max(has - common, 0), has
        self._has = tokens[:common]
        self._decode(tokens[common:])
        if self.cache is not None:
            self.cache.save(tokens)

    def generate(self, tokens: Iterable[int], count: int, stop: bool = True) -> list[int]:
        """Up to `count` tokens, the likeliest each time; `stop`: until one ends the text."""
        self.prefill(tokens)
        said: list[int] = []
        while len(said) < count:
            said.append(self.library.sampler_sample(self._greedy, self._context, -1))
            if len(said) == count or (stop and self.library.vocab_is_eog(self._vocabulary, said[-1])):
                break
            self._decode(said[-1:])
        return said

    def logits(self) -> ctypes.Array[ctypes.c_float]:
        """Of the token decoded last, a copy: a buffer of float32."""
        address = self.library.get_logits_ith(self._context, -1)
        if not address:
            raise self.library.error("no logits")
        count = self.library.vocab_n_tokens(self._vocabulary)
        return (ctypes.c_float * count).from_buffer_copy((ctypes.c_float * count).from_address(address))

    def _decode(self, tokens: Sequence[int]) -> None:
        for first in range(0, len(tokens), self._batch):
            part = tokens[first:first + self._batch]
            ids = (ctypes.c_int32 * len(part))(*part)
            if self.library.decode(self._context, self.library.batch_get_one(ctypes.addressof(ids), len(part))) != 0:
                self.reset()  # What is in the sequence now is not known.
                raise self.library.error(f"decoding {len(part)} tokens")
            self._has += part

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()
        if self._greedy:
            self.library.sampler_free(self._greedy)
        if self._context:
            self.library.free(self._context)
        if self._model:
            self.library.model_free(self._model)
        self.cache = self._greedy = self._context = self._model = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
