"""Each way to break the C ABI is found, and what may change may change."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

import c_abi

RELEASED = """
#include <stddef.h>
#include <stdint.h>
#define KVPOOL_KEY_BYTES 32
enum { KVPOOL_OK = 0, KVPOOL_GONE = 5 /* A comment; */ };
typedef struct kvpool_session kvpool_session;
typedef struct {
  size_t struct_size;
  const char* const* names; /* NULL: none. */
  uint64_t batches, blocks;
} kvpool_options;
typedef struct {
  uint32_t group;
  const void* keys;
} kvpool_keys;
int kvpool_open(const kvpool_options* options, uint8_t id[KVPOOL_KEY_BYTES],
                kvpool_session** session);
const char* kvpool_last_error(void);
"""


def listing(text: str) -> list[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".h") as file:
        file.write(text)
        file.flush()
        return c_abi.listing(pathlib.Path(file.name))


class CAbiTest(unittest.TestCase):
    def broken(self, before: str, after: str) -> list[str]:
        self.assertIn(before, RELEASED)
        return c_abi.broken(listing(RELEASED), listing(RELEASED.replace(before, after)))

    def test_list(self) -> None:
        self.assertEqual(listing(RELEASED), [
            "function kvpool_last_error: const char* (void)",
            "function kvpool_open: int (const kvpool_options*, uint8_t*, kvpool_session**)",
            "structure kvpool_options: 32 bytes", "field kvpool_options.struct_size: 8 bytes at 0",
            "field kvpool_options.names: 8 bytes at 8", "field kvpool_options.batches: 8 bytes at 16",
            "field kvpool_options.blocks: 8 bytes at 24", "structure kvpool_keys: 16 bytes",
            "field kvpool_keys.group: 4 bytes at 0", "field kvpool_keys.keys: 8 bytes at 8",
            "constant KVPOOL_KEY_BYTES: 32", "constant KVPOOL_OK: 0", "constant KVPOOL_GONE: 5"])

    def test_extensions(self) -> None:
        self.assertEqual(self.broken("batches, blocks;", "batches, blocks; int more;"), [])
        self.assertEqual(self.broken("const char* kvpool_last", "int kvpool_more(kvpool_session* s); const char* kvpool_last"), [])
        self.assertEqual(self.broken("KVPOOL_GONE = 5", "KVPOOL_GONE = 5, KVPOOL_NEW = 6"), [])

    def test_breaks(self) -> None:
        self.assertEqual(self.broken("const void* keys;", "const void* keys; int more;"),
                         ["structure kvpool_keys was 16 bytes and is 24 bytes"])
        self.assertEqual(self.broken("batches, blocks;", "blocks, batches;"),
                         ["field kvpool_options.batches was 8 bytes at 16 and is 8 bytes at 24",
                          "field kvpool_options.blocks was 8 bytes at 24 and is 8 bytes at 16"])
        self.assertEqual(self.broken("uint32_t group;", "uint16_t group;"),
                         ["field kvpool_keys.group was 4 bytes at 0 and is 2 bytes at 0"])
        self.assertEqual(self.broken("KVPOOL_GONE = 5", "KVPOOL_GONE = 6"), ["constant KVPOOL_GONE was 5 and is 6"])
        self.assertEqual(self.broken("const char* kvpool_last_error(void);", ""),
                         ["function kvpool_last_error was const char* (void) and is gone"])
        self.assertEqual(self.broken("kvpool_session** session)", "kvpool_session* session)"),
                         ["function kvpool_open was int (const kvpool_options*, uint8_t*, kvpool_session**) and is "
                          "int (const kvpool_options*, uint8_t*, kvpool_session*)"])


if __name__ == "__main__":
    unittest.main()
