"""kvpool_vllm.cpu_attention without vLLM: its kernels are functions here that say what happened before them."""

import importlib
import sys
import types

import pytest
import torch


class Kernels(types.ModuleType):
    """vllm._custom_ops: a cache that keeps K and V by slot, and attention over it in float32."""

    def __init__(self, happened):
        super().__init__("vllm._custom_ops")
        self.happened = happened

    def cpu_attn_reshape_and_cache(self, k, v, keys, values, slots, isa):
        self.happened.append(f"write {isa}")
        for i, slot in enumerate(slots.tolist()):
            block, at = divmod(slot, keys.shape[2])
            keys[block, :, at], values[block, :, at] = k[i], v[i]

    def cpu_attn_get_scheduler_metadata(self, **_):
        return None

    def cpu_attention_with_kv_cache(self, query, key_cache, value_cache, output, block_table, **_):
        self.happened.append("attend")
        tokens = query.shape[0]
        k, v = (torch.cat([cache[block].transpose(0, 1) for block in block_table[0].tolist()])[:tokens].repeat_interleave(2, 1)
                for cache in (key_cache, value_cache))
        output.copy_(torch.nn.functional.scaled_dot_product_attention(*(x.float().transpose(0, 1) for x in (query, k, v)),
                                                                      is_causal=True).transpose(0, 1))


@pytest.fixture
def kernels(monkeypatch):
    """What happened, in order: the permission for AMX tiles, and kernels. Without that a kernel for AMX kills the process."""
    happened = []
    package, interface = types.ModuleType("vllm"), types.ModuleType("vllm.v1.kv_cache_interface")
    package._custom_ops, interface.SlidingWindowSpec = Kernels(happened), type("SlidingWindowSpec", (), {})
    for name, module in (("vllm", package), ("vllm._custom_ops", package._custom_ops), ("vllm.v1", types.ModuleType("vllm.v1")),
                         ("vllm.v1.kv_cache_interface", interface)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: happened.append("permission") is None)
    return happened


SPEC = types.SimpleNamespace(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)


def test_tiles_are_asked_for_before_the_first_kernel(kernels):
    cpu_attention = importlib.import_module("kvpool_vllm.cpu_attention")
    for check in (cpu_attention.check_strides, cpu_attention.planes):
        kernels.clear()
        check(SPEC, "amx")
        assert kernels[0] == "permission" and "write amx" in kernels
        kernels.clear()
        check(SPEC, "vec")
        assert "permission" not in kernels


def test_where_the_kernel_does_not_give_them(kernels, monkeypatch):
    cpu_attention = importlib.import_module("kvpool_vllm.cpu_attention")
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    for check in (cpu_attention.check_strides, cpu_attention.planes):
        with pytest.raises(RuntimeError, match="AMX"):
            check(SPEC, "amx")
    assert kernels == []
