"""Measures what was not measured yet, then writes RESULTS.md. Usage: results.sh [TABLE...]"""

import argparse
import pathlib
import signal
import sys

import alike
import lab
import presses
import pruning
import quality
import render
import selection
import speed
import tiers
import vllm_alike
import vllm_speed

FOLDER = pathlib.Path(__file__).resolve().parent
TABLES = {  # name: (cells, what measures one)
    "alike": (alike.cells, alike.measure),
    "ttft": (speed.ttft_cells, speed.ttft),
    "tiers": (tiers.cells, tiers.measure),  # That of vLLM where it is.
    "memory": (speed.memory_cells, speed.memory),
    "decode": (speed.decode_cells, speed.decode),
    "retrieval": (pruning.retrieval_cells, pruning.retrieval),
    "perplexity": (pruning.perplexity_cells, pruning.perplexity),
    "gates": (quality.gate_cells, quality.gates),  # What the two below score with, of policies whose weights are trained.
    "quality_perplexity": (quality.perplexity_cells, quality.perplexity),
    "quality_retrieval": (quality.retrieval_cells, quality.retrieval),
    "selection": (selection.cells, selection.measure),
    "disposition_perplexity": (quality.disposition_perplexity_cells, quality.perplexity),
    "disposition_retrieval": (quality.disposition_retrieval_cells, quality.retrieval),
    "low_perplexity": (quality.low_perplexity_cells, quality.perplexity),
    "low_retrieval": (quality.low_retrieval_cells, quality.retrieval),
    "heads_perplexity": (quality.heads_perplexity_cells, quality.perplexity),
    "heads_retrieval": (quality.heads_retrieval_cells, quality.retrieval),
    "kvpress": (presses.cells, presses.measure),  # With tests/engines.sh --kvpress.
}
VLLM = {  # With tests/engines.sh --vllm.
    "vllm_alike": (vllm_alike.cells, vllm_alike.measure),
    "vllm_ttft": (vllm_speed.ttft_cells, vllm_speed.ttft),
    "vllm_rate": (vllm_speed.rate_cells, vllm_speed.rate),
    "vllm_stream": (vllm_speed.stream_cells, vllm_speed.stream),
    "vllm_memory": (vllm_speed.memory_cells, vllm_speed.memory),
}


def main():
    tables = TABLES | VLLM
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(tables)}; by default all, those of vLLM where it is")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Daemons end with this process.
    unknown = set(arguments.tables) - set(tables)
    if unknown:
        parser.error(f"no such table: {', '.join(sorted(unknown))}")
    here = lab.Lab()
    for name in arguments.tables or (tables if vllm_speed.available() else TABLES):
        cells, value_of = tables[name]
        lab.measure(name, cells(), value_of, here)
    stores = {name: lab.Store(name) for name in (*tables, "vllm_faults")}  # The last by tests/engines/vllm_http_faults_test.py.
    results = FOLDER.parent / "RESULTS.md"
    results.write_text(render.page(stores, results.read_text()))
    if stores["perplexity"].where() and stores["retrieval"].where():
        (FOLDER / "pruning.svg").write_text(render.picture(stores["perplexity"], stores["retrieval"]))


if __name__ == "__main__":
    main()
