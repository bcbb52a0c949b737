"""Holds the stubs, the package, the README's examples, the engines' packages, which ship py.typed too, tests/compat and
tests/tidy to mypy --strict.
Usage: types_check.py ROOT BUILD"""

import os
import pathlib
import subprocess
import sys
import tempfile

from readme_test import python_blocks

# Engines are not installed here, so what comes of them, and may be returned or derived from, is Any. Attributes that are None while
# there is no session are used as if there were one: hence no strict optionals.
ENGINES = ("--ignore-missing-imports", "--allow-subclassing-any", "--no-warn-return-any", "--no-strict-optional")

root, build = (pathlib.Path(path).resolve() for path in sys.argv[1:])


def mypy(*arguments):
    return subprocess.run([sys.executable, "-m", "mypy", "--cache-dir=/dev/null", "--no-error-summary", *arguments],
                          cwd=build / "client/python", env={**os.environ, "MYPYPATH": str(build / "client/python")},
                          check=False).returncode


with tempfile.TemporaryDirectory() as folder:
    examples = [root / "client/examples/engine.py"]
    for number, block in enumerate(python_blocks(root / "client/python/README.md")):
        path = pathlib.Path(folder) / f"readme_{number}.py"
        path.write_text(block)
        examples.append(path)
    failed = mypy("--strict", build / "client/python/kvpool", *examples)
for package in sorted((root / "client/integrations").glob("*/kvpool_*")):
    failed |= mypy("--strict", *ENGINES, package)
failed |= mypy("--strict", *sorted((root / "tests/compat").glob("*.py")))
failed |= mypy("--strict", root / "tests/tidy/tidy.py")
sys.exit(failed)
