"""Measures what was not measured yet, then writes RESULTS.md. Usage: run.py [TABLE...]"""

import argparse
import pathlib
import sys

import lab
import pruning

TABLES = {
    "perplexity": lambda here: lab.measure("perplexity", pruning.perplexity_cells(), pruning.perplexity, here),
    "retrieval": lambda here: lab.measure("retrieval", pruning.retrieval_cells(), pruning.retrieval, here),
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
        TABLES[name](here)


if __name__ == "__main__":
    main()
