"""Doxygen's filter: makes documentation of the comments in a header. Usage: comments.py HEADER

A comment in front of a declaration documents it, one behind it too, and the file's first one the file. Prose is prose; what is
indented or in columns stays as it is.
"""

import pathlib
import re
import sys


def escaped(text):
    return re.sub(r'([\\@<>&#%"$])', r"\\\1", text)


def is_table(line):
    return line.startswith("  ") or re.search(r"\S {3,}\S", line) is not None


def documentation(lines, command=""):
    """Doxygen's comment of a comment's lines."""
    made, table = [command] if command else [], False
    for line in lines:
        if line and is_table(line) != table:
            table = not table
            made.append("\\verbatim" if table else "\\endverbatim")
        made.append(line if table else escaped(line))
    if table:
        made.append("\\endverbatim")
    return ["/*!", *made, "*/"]


def without_blocks(text):
    """C's comments as C++'s."""

    def lines(found):
        inside = [re.sub(r"^\s*\* ?", "", line).rstrip() for line in found.group(1).split("\n")]
        return "\n".join(f"// {line.strip() if i == 0 else line}".rstrip() for i, line in enumerate(inside))

    return re.sub(r"/\*(.*?)\*/", lines, text, flags=re.DOTALL)


def main():
    text = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")
    made, pending, first = [], [], True
    for line in [*without_blocks(text).splitlines(), ""]:
        found = re.match(r"\s*//+ ?(.*)$", line)
        if found:
            pending.append(found.group(1))
            continue
        if pending:
            # Sections ("---- Opening") are for readers of the source.
            if first:
                made += documentation(pending, "\\file")
            elif line.strip() and not pending[0].startswith("----"):
                made += documentation(pending)
            pending = []
        first = first and not line.strip()
        behind = re.match(r"(.*[;,{)}\w])\s+// (.*)$", line)
        made.append(f"{behind.group(1)} /*!< {escaped(behind.group(2))} */" if behind else line)
    print("\n".join(made))


if __name__ == "__main__":
    main()
