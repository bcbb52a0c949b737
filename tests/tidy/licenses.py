"""Whose each file is, and under which license: by REUSE.toml, in the words of SPDX."""

import re
import tomllib

from tree import Tree

IDENTIFIER = "SPDX-License-Identifier"
# What others copy into trees of their own, which have no REUSE.toml, says it in the file.
COPIED = re.compile(r"client/c/kvpool\.h|proto/.*\.proto")
# In pieces, so that this file does not say it of itself.
LINE = re.compile(r"SPDX-License" r"-Identifier: *([\w.+-]+)")


def _matches(name: str, pattern: str) -> bool:
    """As REUSE.toml has it: * stays in a folder, ** does not."""
    parts = re.split(r"(\*\*|\*)", pattern)
    return re.fullmatch("".join({"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts), name) is not None


def licenses(tree: Tree) -> list[str]:
    """REUSE.toml covers each file, names licenses whose text is in LICENSES/, and no file says otherwise."""
    annotations = tomllib.loads(tree.text("REUSE.toml")).get("annotations", []) if tree.exists("REUSE.toml") else []
    errors, used = [], set()
    for name in tree.files():
        if name.startswith("LICENSES/"):
            continue
        covering = [a for a in annotations if any(_matches(name, p) for p in ([a["path"]] if isinstance(a["path"], str) else a["path"]))]
        license = covering[-1].get(IDENTIFIER) if covering else None
        if license is None or "SPDX-FileCopyrightText" not in covering[-1]:
            errors.append(f"{name}: REUSE.toml does not say whose it is, and under which license")
            continue
        used.add(license)
        said = LINE.search("\n".join(tree.text(name).splitlines()[:40]))
        if said and said.group(1) != license:
            errors.append(f"{name}: says {said.group(1)}, where REUSE.toml says {license}")
        elif not said and COPIED.fullmatch(name):
            errors.append(f"{name}: others copy it, so it needs the line {IDENTIFIER}: {license}")
    texts = {name.removeprefix("LICENSES/").removesuffix(".txt") for name in tree.files(under="LICENSES/")}
    errors += [f"LICENSES/{license}.txt: {'nothing is under it' if license in texts else 'missing'}" for license in sorted(used ^ texts)]
    return errors
