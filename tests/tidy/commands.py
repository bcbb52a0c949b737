"""Makes compile_commands.json of single sources. Usage: commands.py BUILD_FOLDER FOLDER

CMake's unity build compiles sources in groups, of which clang-tidy and the check `sources_are_built` know nothing: in what this
writes to FOLDER/compile_commands.json, each source of a group has the group's command.
"""

import json
import pathlib
import re
import sys
from typing import Any


def of_sources(path: pathlib.Path) -> list[dict[str, Any]]:
    """The commands in `path`, a group's once for each of its sources."""
    found = []
    for entry in json.loads(path.read_text(encoding="utf-8")):
        group = pathlib.Path(entry["directory"]) / entry["file"]
        sources = []
        if "/Unity/unity_" in str(group):
            sources = re.findall(r'^#include "([^"]+)"$', group.read_text(encoding="utf-8"), re.MULTILINE)
        found += [{**entry, "file": source, "command": entry["command"].replace(str(group), source)} for source in sources or [str(group)]]
    return found


def main() -> None:
    build, folder = map(pathlib.Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    commands = of_sources(build / "compile_commands.json")
    (folder / "compile_commands.json").write_text(json.dumps(commands, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
