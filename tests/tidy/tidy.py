"""What a machine can see of the project's style. Usage: tidy.py ROOT CHECK [--compile_commands FILE]

Prints one line for each thing wrong and ends with status 1 if there is any; 77: the check can't run here, and says why.
CHECK "list" prints the names.
"""

import argparse
import pathlib
import sys

import code_checks
import commands
import english
import licenses
import readmes
import python_cycles
import rooms
import text_checks
import tree

CHECKS = {
    "include_graph": code_checks.include_graph,
    "rooms": rooms.rooms,
    "cycles": rooms.cycles,
    "python_cycles": python_cycles.python_cycles,
    "sources_are_built": code_checks.sources_are_built,
    "own_names": code_checks.own_names,
    "test_programs_are_run": code_checks.test_programs_are_run,
    "conditionals": code_checks.conditionals,
    "include_guards": code_checks.include_guards,
    "scripts": code_checks.scripts,
    "formatting": code_checks.formatting,
    "python_lint": code_checks.python_lint,
    "lengths": code_checks.lengths,
    "banned_words": text_checks.banned_words,
    "proto_documented": text_checks.proto_documented,
    "proto_style": text_checks.proto_style,
    "metric_names": text_checks.metric_names,
    "dashboards": text_checks.dashboards,
    "runbooks": text_checks.runbooks,
    "licenses": licenses.licenses,
    "trailing_comments": english.trailing_comments,
    "readme": readmes.readme,
    "server_map": readmes.server_map,
}
NOTES_ONLY = {"lengths"}


def compiled_sources(root: pathlib.Path, path: pathlib.Path) -> list[str]:
    """Sources in compile_commands.json, relative to the root."""
    found = []
    for entry in commands.of_sources(path):
        source = pathlib.Path(entry["file"]).resolve()
        if source.is_relative_to(root):
            found.append(source.relative_to(root).as_posix())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("check", choices=[*CHECKS, "list"])
    parser.add_argument("--compile_commands", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.check == "list":
        print("\n".join(CHECKS))
        return 0
    root = arguments.root.resolve()
    extra = {}
    if arguments.check == "sources_are_built" and arguments.compile_commands:
        extra["compiled"] = compiled_sources(root, arguments.compile_commands)
    messages = CHECKS[arguments.check](tree.Tree(root), **extra)
    if messages is None:
        print(f"{arguments.check}: the program it needs is not installed")
        return 77
    for message in messages:
        print(message)
    if arguments.check in NOTES_ONLY:
        return 0
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
