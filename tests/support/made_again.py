"""Fails unless SCRIPT prints what is in FILE: JSON whose numbers are equal but for rounding. Usage: made_again.py SCRIPT FILE"""

import json
import math
import pathlib
import subprocess
import sys


def differences(kept, made, place):
    if isinstance(kept, dict) and isinstance(made, dict) and list(kept) == list(made):
        return [line for name in kept for line in differences(kept[name], made[name], f"{place}.{name}")]
    if isinstance(kept, list) and isinstance(made, list) and len(kept) == len(made):
        return [line for i, part in enumerate(kept) for line in differences(part, made[i], f"{place}[{i}]")]
    # The C libraries' exponentials differ in the last bit.
    if isinstance(kept, float) and isinstance(made, float) and math.isclose(kept, made, rel_tol=1e-9, abs_tol=1e-12):
        return []
    return [] if kept == made else [f"{place}: {kept} in the file, {made} made now"]


def main():
    script, file = sys.argv[1:]
    made = subprocess.run([sys.executable, "-B", script], stdout=subprocess.PIPE, check=True).stdout
    kept = pathlib.Path(file).read_bytes()
    if made == kept:
        return 0
    wrong = differences(json.loads(kept), json.loads(made), "")
    for line in wrong[:20]:
        print(f"{file}{line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
