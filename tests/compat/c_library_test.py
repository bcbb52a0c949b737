"""Faults put in client/c/kvpool.h, each of which abidiff finds. Usage: c_library_test.py RELEASE"""

from __future__ import annotations

import pathlib
import shutil
import sys
import tempfile
import unittest

import c_abi
import c_library

RELEASE = pathlib.Path(sys.argv.pop(1))
C = pathlib.Path(__file__).parents[2] / "client" / "c"


class CLibraryTest(unittest.TestCase):
    def changes(self, before: str = "", after: str = "", *, versions: str = "KVPOOL_0", soname: str = "libkvpool.so.0") -> str:
        header = (C / "kvpool.h").read_text(encoding="utf-8")
        self.assertIn(before, header)
        listed = (RELEASE / "c_abi.txt").read_text(encoding="utf-8").splitlines()
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "kvpool.h").write_text(header.replace(before, after, 1))
            (folder / "kvpool.map").write_text((C / "kvpool.map").read_text(encoding="utf-8").replace("KVPOOL_0", versions))
            c_library.compile_header(folder / "kvpool.h", folder / "kvpool.map", soname, folder / "library.so")
            grown = c_library.grown(listed, c_abi.listing(folder / "kvpool.h"))
            return c_library.changes(RELEASE / "libkvpool.abi", folder / "library.so", grown)

    def test_nothing(self) -> None:
        self.assertEqual(self.changes(), "")

    def test_extensions(self) -> None:
        self.assertEqual(self.changes("} kvpool_options;", "uint64_t more; } kvpool_options;"), "")
        self.assertEqual(self.changes("const char* kvpool_version(void);", "const char* kvpool_version(void);\nint kvpool_more(void);"), "")

    def test_faults(self) -> None:
        for before, after in (
                ("const char* kvpool_version(void);", ""),
                ("const char* kvpool_version(void);", "int kvpool_version(void);"),
                ("const char* kvpool_version(void);", "const char* kvpool_version(int part);"),
                ("typedef uint64_t kvpool_block;", "typedef uint32_t kvpool_block;"),
                ("typedef uint64_t kvpool_block;", "typedef int64_t kvpool_block;"),
                # Of a structure that has not grown since the release: see c_library.changes.
                ("uint32_t keys_per_block;", "float keys_per_block;"),
                ("uint32_t last_block_tokens;", "uint64_t last_block_tokens;"),
                ("uint32_t keys_per_block;", "uint32_t more, keys_per_block;"),
                ("} kvpool_group_keys;", "int more; } kvpool_group_keys;"),
                ("uint8_t uuid[KVPOOL_DEVICE_UUID_BYTES]", "uint8_t** uuid")):
            with self.subTest(after):
                self.assertRegex(self.changes(before, after).splitlines()[0], "[1-9][0-9]* (Removed|Changed)")

    def test_soname_and_versions(self) -> None:
        self.assertIn("SONAME changed", self.changes(soname="libkvpool.so.1"))
        self.assertIn("kvpool_open@@KVPOOL_0", self.changes(versions="KVPOOL_1"))


if __name__ == "__main__":
    if shutil.which("abidiff") is None:
        print("abidiff is not here: deploy/install_deps.sh test installs it")
        sys.exit(77)
    unittest.main()
