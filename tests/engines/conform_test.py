"""kvpool-conform of this project's own integrations."""

import os
import subprocess
import sys

import pytest

import conform_engines
from vllm_processes import HERE, OVERLAY, PYTHON


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two of each kind, which differ in their weights."""
    import models
    directory = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        models.llama(seed, head_dim=32).save_pretrained(directory / str(seed))
        try:
            import ggufs
            ggufs.llama(directory / f"{seed}.gguf", seed)
        except ImportError:
            pass  # Without llama.cpp there is no test of it.
    return directory


@pytest.mark.parametrize("kind", conform_engines.KINDS)
def test_it_conforms(models, kind):
    if kind.startswith("vllm"):
        if PYTHON is None:
            pytest.skip("needs vLLM: tests/engines.sh --vllm")
        python, environment = PYTHON, {**OVERLAY, "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    else:
        if kind == "llama_cpp":
            pytest.importorskip("xllamacpp", reason="needs llama.cpp: tests/engines.sh installs it")
        python, environment = sys.executable, {}
    done = subprocess.run([sys.executable, "-m", "kvpool.conform", "--", python, HERE / "conform_engines.py", kind, models, "{socket}", "{other}"],
                          env={**os.environ, "HF_HUB_OFFLINE": "1", **environment}, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
