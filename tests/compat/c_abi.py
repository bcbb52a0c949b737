"""What client/c/kvpool.h promises to programs that were compiled with it: symbols, structures, constants.

Usage: c_abi.py HEADER                       prints the list
       c_abi.py HEADER --released LIST       prints what of a release's list no longer holds, and ends with status 1 if anything
       c_abi.py HEADER --library LIBRARY     prints functions that only one of header and library has

A line of the list holds for ever. A structure that starts with struct_size may grow at its end.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile


def declarations(header: str) -> tuple[dict[str, str], dict[str, list[str]], list[str]]:
    """Functions and their types, structures and their fields, constants."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    constants = re.findall(r"^#define (KVPOOL_\w+) \S", text, re.MULTILINE)
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    for body in re.findall(r"\benum \{(.*?)\}", text, re.DOTALL):
        constants += re.findall(r"(\w+)\s*=", body)
    structures = {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", text, re.DOTALL):
        structures[name] = [re.sub(r"[*\s]+", "", field.split()[-1]) for line in body.split(";") if line.strip()
                            for field in line.split(",")]
    text = re.sub(r"(typedef struct|enum) \{.*?\}[^;]*;", "", text, flags=re.DOTALL)
    functions = {}
    for returns, name, parameters in re.findall(r"([\w\s*]+?)\b(kvpool_\w+)\(([^)]*)\);", text):
        types = []
        for parameter in parameters.split(","):
            bare = re.sub(r"\s+", " ", parameter.strip())
            array = "*" if "[" in bare else ""
            types.append(re.sub(r"\s*\b\w+(\[\w+\])?$", "", bare) + array if bare != "void" else bare)
        functions[name] = f"{' '.join(returns.split())} ({', '.join(types)})"
    return functions, structures, constants


def listing(path: pathlib.Path) -> list[str]:
    functions, structures, constants = declarations(path.read_text(encoding="utf-8"))
    program = ["#include <stdio.h>", f'#include "{path.resolve()}"', "int main(void) {"]
    for name, fields in structures.items():
        program.append(f'printf("structure {name}: %zu bytes\\n", sizeof({name}));')
        program += [f'printf("field {name}.{field}: %zu bytes at %zu\\n", sizeof((({name}*)0)->{field}), offsetof({name}, {field}));'
                    for field in fields]
    program += [f'printf("constant {name}: %llu\\n", (unsigned long long)({name}));' for name in constants]
    with tempfile.TemporaryDirectory() as folder:
        source, binary = pathlib.Path(folder) / "list.c", pathlib.Path(folder) / "list"
        source.write_text("\n".join([*program, "return 0; }"]))
        subprocess.run(["cc", "-o", binary, source], check=True)
        printed = subprocess.run([binary], stdout=subprocess.PIPE, text=True, check=True).stdout
    return [*(f"function {name}: {kind}" for name, kind in sorted(functions.items())), *printed.splitlines()]


def broken(released: list[str], current: list[str]) -> list[str]:
    """The lines of the release that are not in the current list."""
    now = dict(line.split(": ", 1) for line in current)
    found = []
    for line in released:
        what, was = line.split(": ", 1)
        if what.startswith("structure ") and f"field {what.split()[1]}.struct_size" in now and what in now:
            if int(now[what].split()[0]) >= int(was.split()[0]):
                continue
        if now.get(what) != was:
            found.append(f"{what} was {was} and is {now.get(what, 'gone')}")
    return found


def unlike(library: pathlib.Path, functions: set[str]) -> list[str]:
    printed = subprocess.run(["nm", "-D", "--defined-only", library], stdout=subprocess.PIPE, text=True, check=True).stdout
    # "A" is the node of the version script.
    exported = {name.split("@")[0] for *_, kind, name in map(str.split, printed.splitlines()) if kind != "A"}
    return [*(f"{name}: in the header, not in the library" for name in sorted(functions - exported)),
            *(f"{name}: in the library, not in the header" for name in sorted(exported - functions))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("header", type=pathlib.Path)
    parser.add_argument("--released", type=pathlib.Path)
    parser.add_argument("--library", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.library:
        found = unlike(arguments.library, set(declarations(arguments.header.read_text(encoding="utf-8"))[0]))
    elif arguments.released:
        found = broken(arguments.released.read_text(encoding="utf-8").splitlines(), listing(arguments.header))
    else:
        print("\n".join(listing(arguments.header)))
        return 0
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
