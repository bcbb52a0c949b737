"""Holds the stubs, the package and the README's examples to mypy --strict. Usage: types_check.py ROOT BUILD"""

import pathlib
import subprocess
import sys
import tempfile

from readme_test import python_blocks

root, build = map(pathlib.Path, sys.argv[1:])
with tempfile.TemporaryDirectory() as folder:
    examples = []
    for number, block in enumerate(python_blocks(root / "client/python/README.md")):
        path = pathlib.Path(folder) / f"readme_{number}.py"
        path.write_text(block)
        examples.append(path)
    sys.exit(subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir=/dev/null", "--no-error-summary",
                             build / "client/python/kvpool", *examples], cwd=build / "client/python", check=False).returncode)
