"""What programs that were linked with a release's libkvpool.so would find changed in this one, as abidiff of abigail-tools sees it.

Usage: c_library.py HEADER LIBRARY             prints what there is, for record.sh
       c_library.py HEADER LIBRARY --released ABI   prints what of a release changed, and ends with status 1 if anything did

c_abi.py reads the header. This reads what the compiler makes of it, so it also sees soname and symbol versions, and types of one size
that took each other's place. Types come from functions in C that do nothing, as the library itself has only C++'s, of which abigail
2.2 makes a megabyte that it can't compare. Exit status 77: abidiff is not here.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile

import c_abi


def compile_header(header: pathlib.Path, versions: pathlib.Path, soname: str, library: pathlib.Path) -> None:
    """Makes a library that has the header's functions, with their types, and does nothing."""
    lines = [f'#include "{header.resolve()}"']
    for name, kind in c_abi.declarations(header.read_text(encoding="utf-8"))[0].items():
        returns, types = kind[:-1].split(" (")
        parameters = types if types == "void" else ", ".join(f"{of} p{i}" for i, of in enumerate(types.split(", ")))
        lines.append(f"{returns} {name}({parameters}) {{ __builtin_trap(); }}")
    subprocess.run(["cc", "-g", "-fPIC", "-shared", f"-Wl,--version-script={versions}", f"-Wl,-soname,{soname}", "-o", library, "-xc", "-"],
                   input="\n".join(lines), text=True, check=True)


def soname_of(library: pathlib.Path) -> str:
    printed = subprocess.run(["readelf", "--dynamic", library], stdout=subprocess.PIPE, text=True, check=True).stdout
    return printed.split("soname: [")[1].split("]")[0]


def grown(released: list[str], current: list[str]) -> list[str]:
    """Structures that became larger, as those may that start with struct_size."""
    now = dict(line.split(": ", 1) for line in current)
    larger = []
    for line in released:
        what, was = line.split(": ", 1)
        name = what.split()[1]
        if what.startswith("structure ") and f"field {name}.struct_size" in now and int(now[what].split()[0]) > int(was.split()[0]):
            larger.append(name)
    return larger


def changes(released: pathlib.Path, library: pathlib.Path, may_grow: list[str]) -> str:
    # A structure that is named here is held to c_abi.py alone: abidiff 2.2 leaves out all that happened to it, not only its growth.
    with tempfile.NamedTemporaryFile("w", suffix=".suppr") as suppressions:
        for name in may_grow:
            suppressions.write(f"[suppress_type]\n type_kind = struct\n name = {name}\n has_data_member_inserted_at = end\n")
        suppressions.flush()
        run = subprocess.run(["abidiff", "--no-added-syms", "--suppressions", suppressions.name, released, library],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return run.stdout or f"abidiff ended with status {run.returncode}\n" if run.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("header", type=pathlib.Path)
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--released", type=pathlib.Path)
    arguments = parser.parse_args()
    if shutil.which("abidiff") is None:
        print("abidiff is not here: deploy/install_deps.sh test installs it")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        typed, stripped = pathlib.Path(folder) / "typed.so", pathlib.Path(folder) / "stripped.so"
        compile_header(arguments.header, arguments.header.with_name("kvpool.map"), soname_of(arguments.library), typed)
        if not arguments.released:
            # No paths and no lines: they change without anything else.
            subprocess.run(["abidw", "--no-show-locs", "--no-comp-dir-path", "--no-corpus-path", "--type-id-style", "hash", typed], check=True)
            return 0
        listed = arguments.released.with_name("c_abi.txt").read_text(encoding="utf-8").splitlines()
        subprocess.run(["strip", "-o", stripped, arguments.library], check=True)
        found = changes(arguments.released, typed, grown(listed, c_abi.listing(arguments.header))) + changes(arguments.released, stripped, [])
    print(found, end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
