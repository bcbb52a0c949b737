"""The files of the project, as the checks see them."""

import pathlib
import re
from collections.abc import Iterator

# Made by builds and tools; nothing in them is written by hand.
NOT_OURS = {"build", ".git", "__pycache__", ".venv", ".cache"}
SOURCE_SUFFIXES = (".h", ".cc", ".cu", ".cuh")


class Tree:
    """Paths are relative to the root, with forward slashes, in sorted order."""

    def __init__(self, root: str | pathlib.Path) -> None:
        self.root = pathlib.Path(root)

    def files(self, *suffixes: str, under: str = "") -> list[str]:
        found = []
        for path in sorted(self.root.rglob("*")):
            relative = path.relative_to(self.root)
            if NOT_OURS.intersection(relative.parts) or not path.is_file():
                continue
            name = relative.as_posix()
            if name.startswith(under) and (not suffixes or name.endswith(suffixes)):
                found.append(name)
        return found

    def sources(self, under: str = "") -> list[str]:
        return self.files(*SOURCE_SUFFIXES, under=under)

    def exists(self, name: str) -> bool:
        return (self.root / name).is_file()

    def text(self, name: str) -> str:
        return (self.root / name).read_text(encoding="utf-8", errors="replace")

    def lines(self, name: str) -> Iterator[tuple[int, str]]:
        """(number, line) from 1."""
        return enumerate(self.text(name).splitlines(), start=1)


def without_comments(source: str) -> str:
    """C++ source without comments and with string literals emptied; line numbers stay."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)

    def blank(match: re.Match[str]) -> str:
        text = match.group(0)
        return '""' if text.startswith('"') else "\n" * text.count("\n")

    return pattern.sub(blank, source)
