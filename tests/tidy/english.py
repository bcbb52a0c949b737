"""How comments read: what a machine can see of it."""

import re

from tree import Tree

SUFFIXES = (".h", ".cc", ".cu", ".cuh", ".proto")
# A comment behind code is a sentence with a subject and a verb, or a unit. One that opens with one of these hangs in the air:
# "ranks.size();  // Of the session" leaves the reader to find what is of the session.
PREPOSITIONS = frozenset(
    "of that by in on at for with from to as until under over than before after without within between behind per beside besides "
    "beyond above below into onto out through among against since during across around toward towards upon via like unlike despite "
    "except inside outside near past up down".split())


def _trailing_comment(line: str) -> tuple[str, str] | None:
    """(code, comment) of a line that has both, or None. Strings and characters are no comments."""
    line = re.sub(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'', '""', line)
    code, mark, comment = line.partition("//")
    return (code.strip(), comment.strip()) if mark and code.strip() and comment.strip() else None


def trailing_comments(tree: Tree) -> list[str]:
    """No comment behind code opens with a preposition."""
    errors = []
    for name in tree.files(*SUFFIXES):
        for number, line in tree.lines(name):
            found = _trailing_comment(line)
            # What closes a guard or a namespace names it.
            if found is None or found[0].startswith("#endif") or found[1].startswith("namespace"):
                continue
            first = re.match(r"[A-Za-z]+", found[1])
            if first and first.group(0).lower() in PREPOSITIONS:
                errors.append(f"{name}:{number}: '// {found[1]}' opens with a preposition: write a sentence, or a unit")
    return errors
