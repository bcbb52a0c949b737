"""Checks of C++ sources, build files and scripts. Each returns a list of messages: empty is good."""

import pathlib
import posixpath
import re
import subprocess
from collections.abc import Sequence

from tree import Tree, without_comments

# Who may include whom, by folder: the longest prefix of a file's path decides. "kvpool" is the generated code of proto/kvpool.
SHARED = ("proto/cli/", "proto/formats/", "proto/support/")
MAY_INCLUDE = {
    "proto/": ("proto/", "kvpool/"),
    "cuda/": ("cuda/", *SHARED),
    "server/": ("server/", "cuda/", *SHARED, "kvpool/"),
    "client/": ("client/", "cuda/", *SHARED, "kvpool/"),
    "tests/": ("tests/", "server/", "client/", "cuda/", *SHARED, "kvpool/"),
}
# What a leaf does without: no RPC, no metrics.
CUDA_MUST_NOT_INCLUDE = ("grpc", "google/protobuf", "prometheus")
# Macros that code may ask for: the device compiler, the C side of the C ABI, and in tests which sanitizer runs.
CONDITIONS = re.compile(r"__CUDACC__|__CUDA_ARCH__|__cplusplus")
TEST_CONDITIONS = re.compile(r"__CUDACC__|__cplusplus|__SANITIZE_\w+__|__has_feature")


def include_graph(tree: Tree) -> list[str]:
    errors = []
    for name in tree.sources():
        allowed = next((to for prefix, to in MAY_INCLUDE.items() if name.startswith(prefix)), None)
        if allowed is None:
            errors.append(f"{name}: sources live in {', '.join(MAY_INCLUDE)}")
            continue
        for number, line in tree.lines(name):
            found = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line)
            if not found:
                continue
            quote, target = found.groups()
            if name.startswith("cuda/") and target.startswith(CUDA_MUST_NOT_INCLUDE):
                errors.append(f"{name}:{number}: cuda/ is a leaf and must not include {target}")
            if quote != '"' or target.startswith(("gtest/", "gmock/")):
                continue
            if target.startswith(tuple(p for p in MAY_INCLUDE)) and not tree.exists(target):
                errors.append(f"{name}:{number}: includes {target}, which is not in the tree")
            ours = target.startswith(tuple(MAY_INCLUDE) + ("kvpool/",))
            if ours and not target.startswith(allowed):
                errors.append(f"{name}:{number}: {name.split('/')[0]}/ must not include {target}")
            elif not ours and (tree.exists(posixpath.join(posixpath.dirname(name), target)) or "/" not in target):
                errors.append(f'{name}:{number}: "{target}": include from the root of the repository')
    return errors


def _cmake_words(tree: Tree, name: str) -> list[str]:
    text = re.sub(r"#[^\n]*", "", tree.text(name))
    return re.findall(r'[^\s()";<>]+', text)


def sources_are_built(tree: Tree, compiled: Sequence[str] = ()) -> list[str]:
    """Every source is compiled by some target; `compiled` are paths from compile_commands.json."""
    mentioned = set(compiled)
    for name in tree.files("CMakeLists.txt", ".cmake"):
        folder = posixpath.dirname(name)
        for word in _cmake_words(tree, name):
            for prefix, base in (("${CMAKE_CURRENT_SOURCE_DIR}/", folder), ("${PROJECT_SOURCE_DIR}/", ""), ("", folder)):
                if word.startswith(prefix):
                    mentioned.add(posixpath.normpath(posixpath.join(base, word[len(prefix):])))
                    break
    return [f"{name}: no target builds it" for name in tree.files(".cc", ".cu") if name not in mentioned]


def _constants(text: str, kind: str) -> set[str]:
    """The constants of lines that begin with these words, also where one line has several."""
    return {name for line in re.findall(rf"^{kind} ([^;(]*?\bk\w+\s*[{{=\[][^;]*)", text, re.MULTILINE)
            for name in re.findall(r"(?:^[^={(]*?|,\s*)\b(k[A-Z]\w*)\s*(?:=(?!=)|\{|\[)", line)}


def _names_of_its_own(text: str) -> set[str]:
    """What a source defines outside functions and classes, without `::`: constants, types, and functions with what they take."""
    text = without_comments(text)
    names = _constants(text, r"(?:static )?const(?:expr|init)?")
    names |= set(re.findall(r"^(?:class|struct|enum class|enum) (\w+)(?: final)?(?: : [^;{]*)? \{", text, re.MULTILINE))
    for name, takes in re.findall(r"^(?!\s|extern|template|TEST|using|return)[\w:<>,*& ]*[*&> ](\w+)\(([^;{}]*)\)[^;{}()]*\{", text, re.MULTILINE):
        names.add(f"{name}({' '.join(takes.split())})")
    return names - {"main()"}


def _namespace_of(text: str) -> str:
    found = re.search(r"^namespace ([\w:]+) \{", text, re.MULTILINE)
    return found.group(1) if found else ""


def _constants_it_includes(tree: Tree, text: str) -> dict[str, str]:
    """The constants that the headers which a source names have in its namespace or in one around it, and which header has each."""
    return {constant: header for header in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)
            if tree.exists(header) and f"{_namespace_of(text)}::".startswith(_namespace_of(tree.text(header)))
            for constant in _constants(tree.text(header), "inline constexpr")}


def own_names(tree: Tree) -> list[str]:
    """No two sources of a target that is compiled in groups define the same name, and none a constant that a header of another one has:
    it would hide that, without a word of the compiler."""
    errors = []
    for name in tree.files("CMakeLists.txt"):
        folder = posixpath.dirname(name)
        text = re.sub(r"#[^\n]*", "", tree.text(name))
        for target, words in re.findall(r"(?:add_library|add_executable)\(\s*([\w-]+)([^)]*)\)", text):
            if re.search(rf"set_target_properties\(\s*{re.escape(target)}\b[^)]*UNITY_BUILD OFF", text):
                continue
            seen: dict[str, str] = {}
            included: dict[str, str] = {}
            for word in words.split():
                source = posixpath.normpath(posixpath.join(folder, word))
                if not word.endswith(".cc") or not tree.exists(source):
                    continue
                included |= _constants_it_includes(tree, tree.text(source))
                for defined in sorted(_names_of_its_own(tree.text(source))):
                    other = seen.setdefault(defined, source)
                    if other != source:
                        errors.append(f"{source}: {defined} is also in {other}, of the same target {target}")
            errors += [f"{seen[constant]}: {constant} hides that of {included[constant]}, in sources of the same target {target}"
                       for constant in sorted(seen.keys() & included.keys())]
    return errors


def test_programs_are_run(tree: Tree) -> list[str]:
    """A program made of *_test.cc is given to ctest in the same build file."""
    errors = []
    for name in tree.files("CMakeLists.txt", under="tests/"):
        text = re.sub(r"#[^\n]*", "", tree.text(name))
        for target, sources in re.findall(r"add_executable\(\s*(\S+)([^)]*)\)", text):
            if "_test.cc" not in sources or "${" in target:
                continue
            run = rf"(discover_(single_threaded_)?tests\(\s*|add_test\([^)]*\b|kvpool_\w+\([^)]*\b){re.escape(target)}\b"
            if not re.search(run, text):
                errors.append(f"{name}: {target} is built, but ctest does not know it")
    return errors


def conditionals(tree: Tree) -> list[str]:
    """Code is chosen at link time or in main, never by #if in a body."""
    errors = []
    for name in tree.sources():
        lines = without_comments(tree.text(name)).splitlines()
        allowed = TEST_CONDITIONS if name.startswith("tests/") else CONDITIONS
        for number, line in enumerate(lines, start=1):
            found = re.match(r"\s*#\s*(if|ifdef|ifndef|elif)\b\s*(.*)", line)
            if not found:
                continue
            following = lines[number] if number < len(lines) else ""
            macro = found.group(2).strip()
            # An include guard, or a constant that older headers of the system lack.
            if found.group(1) == "ifndef" and re.match(rf"\s*#\s*define\s+{re.escape(macro)}\b", following):
                continue
            if not allowed.search(macro):
                errors.append(f"{name}:{number}: '{line.strip()}': choose by source file or in main, not by the preprocessor")
    return errors


def include_guards(tree: Tree) -> list[str]:
    errors = []
    for name in tree.files(".h", ".cuh"):
        guard = "KVPOOL_" + re.sub(r"[^A-Za-z0-9]", "_", name).upper() + "_"
        if not re.search(rf"^#ifndef {guard}\n#define {guard}$", tree.text(name), re.MULTILINE):
            errors.append(f"{name}: expected the include guard {guard}")
    return errors


def scripts(tree: Tree) -> list[str]:
    """Shell scripts parse, stop at the first error and can be executed; Python parses."""
    errors = []
    for name in tree.files():
        path = tree.root / name
        first = path.read_bytes().split(b"\n", 1)[0]
        if first.startswith(b"#!") and b"sh" in first:
            parsed = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
            if parsed.returncode != 0:
                errors.append(f"{name}: {parsed.stderr.strip()}")
            if b"bash" in first and "set -euo pipefail" not in tree.text(name) and not name.startswith(".ci/"):
                errors.append(f"{name}: does not say 'set -euo pipefail'")
            if not path.stat().st_mode & 0o111:
                errors.append(f"{name}: starts with #! but is not executable")
        elif name.endswith(".py"):
            try:
                compile(tree.text(name), name, "exec")
            except SyntaxError as error:
                errors.append(f"{name}:{error.lineno}: {error.msg}")
    return errors


def formatting(tree: Tree) -> list[str] | None:
    """None if there is no clang-format here."""
    sources = tree.sources()
    try:
        result = subprocess.run(["clang-format", "--dry-run", "-Werror", *sources], cwd=tree.root, capture_output=True,
                                text=True, check=False)
    except FileNotFoundError:
        return None
    files = sorted({line.split(":")[0] for line in result.stderr.splitlines() if "[-Wclang-format-violations]" in line})
    return [f"{name}: run clang-format -i on it" for name in files]


def python_lint(tree: Tree) -> list[str] | None:
    """ruff with the tree's ruff.toml. None if deploy/install_deps.sh test could not get it."""
    ruff = pathlib.Path(__file__).parents[2] / "build/deps/python/bin/ruff"
    if not ruff.is_file():
        return None
    result = subprocess.run([ruff, "check", "--no-cache", "--quiet", "--output-format=concise", "."], cwd=tree.root,
                            capture_output=True, text=True, check=False)
    return (result.stdout + result.stderr).splitlines()


def lengths(tree: Tree) -> list[str]:
    """Notes, not errors: files and functions past the lengths that read well."""
    notes = []
    for name in tree.sources():
        lines = tree.text(name).splitlines()
        limit = 200 if name.endswith(".h") else 500
        if len(lines) > limit:
            notes.append(f"{name}: {len(lines)} lines (up to {limit} read well)")
        start = None
        for number, line in enumerate(lines, start=1):
            if re.match(r"\S.*\{$", line) and not line.startswith(("namespace", "class", "struct", "enum", "extern", "union")):
                start = number
            elif line.startswith("}") and start is not None:
                if number - start > 70:
                    notes.append(f"{name}:{start}: a function of {number - start} lines (up to 70 read well)")
                start = None
    return notes
