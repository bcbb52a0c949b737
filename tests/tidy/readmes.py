"""What every page of the project shows is there: commands and flags, programs, files, links."""

import fnmatch
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator

from tree import Tree

FRONT_PAGE = "README.md"
# Of the front page, code not counted: whoever comes by reads so much, and no more.
FRONT_PAGE_WORDS = 900
# Programs of the system that a page may show; everything else in a `sh` block must be ours.
SYSTEM_PROGRAMS = {
    ".", "apt-get", "c++", "cat", "cc", "cd", "cmake", "cp", "ctest", "curl", "docker", "export", "g++", "git",
    "grep", "grpcurl", "gzip", "head", "kill", "kubectl", "ls", "mkdir", "ninja", "pip", "pkg-config", "podman", "promtool",
    "python", "python3", "rm", "sleep", "sudo", "usermod",
}
# Words of the shell that a command may stand behind.
SHELL_WORDS = {"until", "while", "if", "then", "do", "done", "fi", "{", "}", "!", "sudo", "$"}
# Files that a page names between backticks.
FILE_NAME = r"[\w{][\w.{},*-]*(?:/[\w.{},*-]+)+\.(?:h|cc|cu|cmake|list|py|sh|md|proto|yaml|json|svg|\{[a-z,]+\})"
# Folders of the tree that an argument of a command may begin with.
OUR_FOLDERS = ("client/", "cuda/", "dashboards/", "deploy/", "proto/", "server/", "tests/")


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _commands(block: str) -> Iterator[list[str]]:
    """The commands of a `sh` block, each a list of words, without those of here-documents."""
    block = re.sub(r"<<-?'?(\w+)'?\n.*?^\1$", "", block, flags=re.MULTILINE | re.DOTALL)
    block = re.sub(r"\\\n|\|\n", lambda found: found.group(0)[:-1].replace("\\", " ") + " ", block)
    for line in block.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("();|&"):
                command.append(word)
                continue
            while command and (re.fullmatch(r"[A-Z_]+=.*", command[0]) or command[0] in SHELL_WORDS):
                command.pop(0)
            if command:
                yield command
            command = []


def _flag_exists(flag: str, sources: str) -> bool:
    """`--lease_blocks` is written "lease_blocks", "--lease_blocks", or lease_blocks as an identifier."""
    word = flag.lstrip("-")
    return re.search(rf'"(--)?{re.escape(word)}["=]|(?<![\w-])--{re.escape(word)}\b|\b{re.escape(word.replace("-", "_"))}\b',
                     sources) is not None


class _Programs:
    """What the build makes, and the words of its sources."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.names: set[str] = set()
        for name in tree.files("CMakeLists.txt"):
            self.names |= set(re.findall(r"add_executable\(\s*([\w-]+)", tree.text(name)))
        self.presets: set[str] = set()
        if tree.exists("CMakePresets.json"):
            self.presets = set(re.findall(r'"name":\s*"(\w+)"', tree.text("CMakePresets.json")))
        self.code = "\n".join(tree.text(name) for name in tree.sources() if not name.startswith("tests/"))

    def errors(self, words: list[str]) -> list[str]:
        """What is wrong with a command."""
        shown, command = " ".join(words), words[0].removeprefix("./")
        built = re.fullmatch(r"build/(\w+)/bin/([\w-]+)", command)
        if built and not (built.group(1) in self.presets and built.group(2) in self.names):
            return [f"{command} is not built by any preset and target"]
        if built or command in self.names:
            text: str | None = self.code
        elif self.tree.exists(command):
            text = self.tree.text(command)
        elif command in SYSTEM_PROGRAMS:
            text = None
        else:
            return [f"'{shown}': {command} does not exist"]
        errors = []
        for word in words[1:]:
            flag, _, value = word.partition("=") if word.startswith("--") else ("", "", word)
            if text is not None and len(flag) > 2 and not _flag_exists(flag, text):
                errors.append(f"'{shown}': {command} has no flag {flag}")
            value = value.removeprefix("./").partition("[")[0]  # PACKAGE[EXTRA]
            if value.startswith(OUR_FOLDERS) and not (self.tree.root / value).exists():
                errors.append(f"'{shown}': {value} does not exist")
        return errors


def _functions(block: str) -> set[str]:
    return set(re.findall(r"^(\w+)\(\) *\{", block, re.MULTILINE))


def _anchors(text: str) -> set[str]:
    """Those that a forge makes of headings."""
    headings = re.findall(r"^#+ +(.*)$", _without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _link_errors(tree: Tree, folder: str, text: str) -> Iterator[str]:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if "://" in target:
            continue
        path = posixpath.normpath(posixpath.join(folder, target)) if target else None
        if path is not None and not (tree.root / path).exists():
            yield f"link to {target}, which does not exist"
        elif anchor and anchor not in _anchors(text if path is None else tree.text(path)):
            yield f"link to {target}#{anchor}: there is no such heading"


def _spellings(name: str) -> list[str]:
    """space/verbs.{h,cc} as the two that it stands for."""
    found = re.search(r"\{([^{}]*)\}", name)
    if not found:
        return [name]
    return [whole for part in found.group(1).split(",") for whole in _spellings(name[:found.start()] + part + name[found.end():])]


def _file_errors(files: Iterable[str], text: str) -> Iterator[str]:
    """A file is named by its path, or the end of it. What is to be added, or has NAME for a name, need not be there."""
    for named in re.findall(rf"(?<!Add )`({FILE_NAME})`", text):
        for name in _spellings(named):
            if "NAME" not in name and not any(fnmatch.fnmatchcase("/" + file, "*/" + name) for file in files):
                yield f"names {name}, which does not exist"


def readme(tree: Tree) -> list[str]:
    """Commands in `sh` blocks start a script or program that exists, with flags that it knows; `cpp` blocks are programs of the
    tree, word for word, as those are built and run; links lead somewhere, and files that are named exist."""
    if not tree.exists(FRONT_PAGE):
        return [f"{FRONT_PAGE}: missing"]
    programs, files = _Programs(tree), tree.files()
    examples = {tree.text(name) for name in tree.sources() if "/examples/" in name}
    errors = []
    for page in tree.files(".md"):
        text, folder = tree.text(page), posixpath.dirname(page)
        functions: set[str] = set()  # A reader has those of the blocks above, too.
        for block in _blocks(text, "sh"):
            functions |= _functions(block)
            for words in _commands(block):
                if words[0] not in functions:
                    errors += [f"{page}: {error}" for error in programs.errors(words)]
        for block in _blocks(text, "cpp"):
            if block not in examples:
                errors.append(f"{page}: the cpp block '{block.splitlines()[0]} …' is no file in an examples folder")
        prose = _without_code(text)
        errors += [f"{page}: {error}" for error in (*_link_errors(tree, folder, prose), *_file_errors(files, prose))]
    words = [word for word in _without_code(tree.text(FRONT_PAGE)).split() if re.search(r"\w", word)]
    if len(words) > FRONT_PAGE_WORDS:
        errors.append(f"{FRONT_PAGE}: {len(words)} words (up to {FRONT_PAGE_WORDS} are read)")
    return errors


def server_map(tree: Tree) -> list[str]:
    """A reader of server/README.md finds every file of the daemon: each X.h and X.cc is named on the page of its folder, or of
    the nearest one above it that has a page. Replacement policies are in a table of their own, by name. Classes and functions
    that the page names exist."""
    errors = []
    page = tree.text("server/README.md") if tree.exists("server/README.md") else ""
    sources = "\n".join(tree.text(name) for name in tree.sources()) + "\n".join(tree.text(name) for name in tree.files(".proto"))
    for name in sorted(set(re.findall(r"`(?:\w+::)?([A-Z]\w*[a-z]\w*|\w+_mu_)`", page))):
        if not re.search(rf"\b{name}\b", sources):
            errors.append(f"server/README.md: nothing in the sources is called {name}")
    for name in tree.sources(under="server/"):
        folder, file = posixpath.split(name)
        if folder.startswith("server/replacement"):
            continue
        while folder and not tree.exists(f"{folder}/README.md"):
            folder = posixpath.dirname(folder)
        if folder and not re.search(rf"(?<![\w-]){re.escape(posixpath.splitext(file)[0])}(?![\w-])", tree.text(f"{folder}/README.md")):
            errors.append(f"{name}: {folder}/README.md does not say what it is")
    return errors
