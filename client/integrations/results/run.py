"""Measures what was not measured yet, then writes RESULTS.md. Usage: results.sh [TABLE...]"""

import argparse
import pathlib

import lab
import pruning
import render
import speed

FOLDER = pathlib.Path(__file__).resolve().parent
TABLES = {  # name: (cells, what measures one)
    "ttft": (speed.ttft_cells, speed.ttft),
    "memory": (speed.memory_cells, speed.memory),
    "decode": (speed.decode_cells, speed.decode),
    "retrieval": (pruning.retrieval_cells, pruning.retrieval),
    "perplexity": (pruning.perplexity_cells, pruning.perplexity),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"by default all: {', '.join(TABLES)}")
    arguments = parser.parse_args()
    unknown = set(arguments.tables) - set(TABLES)
    if unknown:
        parser.error(f"no such table: {', '.join(sorted(unknown))}")
    here = lab.Lab()
    for name in arguments.tables or TABLES:
        cells, value_of = TABLES[name]
        lab.measure(name, cells(), value_of, here)
    stores = {name: lab.Store(name) for name in TABLES}
    (FOLDER.parent / "RESULTS.md").write_text(render.page(stores))
    if stores["perplexity"].where() and stores["retrieval"].where():
        (FOLDER / "pruning.svg").write_text(render.picture(stores["perplexity"], stores["retrieval"]))


if __name__ == "__main__":
    main()
