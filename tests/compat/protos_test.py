"""Each way to break the protos is found, and each way to extend them is not a break."""

from __future__ import annotations

import pathlib
import subprocess
import tempfile
import unittest

from google.protobuf.descriptor_pb2 import FileDescriptorSet

import protos

RELEASED = """
syntax = "proto3";
package p;
enum Kind { KIND_NONE = 0; KIND_BIG = 1; KIND_OLD = 2; }
message Inner { uint32 a = 1; }
message Request {
  reserved 9; reserved "gone";
  uint32 count = 1;
  repeated Inner parts = 2;
  optional string name = 3;
  oneof what { bytes key = 4; uint64 id = 5; }
  Kind kind = 6;
  message Nested { bool b = 1; }
  Nested nested = 7;
}
service Engine {
  rpc Lease(Request) returns (Inner);
  rpc Step(stream Request) returns (stream Inner);
}
"""


def compiled(text: str) -> FileDescriptorSet:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "a.proto").write_text(text)
        subprocess.run(["protoc", f"-I{path}", f"-o{path / 'a.binpb'}", path / "a.proto"], check=True)
        return FileDescriptorSet.FromString((path / "a.binpb").read_bytes())


class ProtosTest(unittest.TestCase):
    def breaks(self, *changes: tuple[str, str]) -> list[str]:
        text = RELEASED
        for before, after in changes:
            self.assertIn(before, text)
            text = text.replace(before, after)
        return list(protos.breaks(compiled(RELEASED), compiled(text)))

    def test_nothing(self) -> None:
        self.assertEqual(self.breaks(), [])

    def test_extensions(self) -> None:
        self.assertEqual(self.breaks(("uint32 a = 1;", "uint32 a = 1; uint32 b = 2;"), ("KIND_OLD = 2;", "KIND_OLD = 2; KIND_NEW = 3;"),
                                     ("rpc Lease", "rpc Match(Request) returns (Inner); rpc Lease"),
                                     ("service Engine", "message More {} service Engine")), [])

    def test_removal_with_reservation(self) -> None:
        self.assertEqual(self.breaks(("uint32 count = 1;", 'reserved 1; reserved "count";')), [])
        self.assertEqual(self.breaks(("KIND_OLD = 2;", 'reserved 2; reserved "KIND_OLD";')), [])

    def test_fields(self) -> None:
        self.assertEqual(self.breaks(("uint32 count = 1;", "")),
                         ["p.Request.count = 1 is gone, and its number and name are not reserved"])
        self.assertEqual(self.breaks(("uint32 count = 1;", "reserved 1;")),
                         ["p.Request.count = 1 is gone, and its number and name are not reserved"])
        self.assertEqual(self.breaks(("uint32 count = 1;", "uint32 count = 8;")),
                         ["p.Request.count = 1 is gone, and its number and name are not reserved"])
        self.assertEqual(self.breaks(("uint32 count = 1;", "uint32 number = 1;")), ["p.Request.count = 1 is now called number"])
        self.assertEqual(self.breaks(("uint32 count = 1;", "fixed32 count = 1;")), ["p.Request.count = 1 was uint32 and is fixed32"])
        self.assertEqual(self.breaks(("repeated Inner parts", "Inner parts")), ["p.Request.parts = 2 was repeated p.Inner and is p.Inner"])
        self.assertEqual(self.breaks(("optional string", "string")), ["p.Request.name = 3 was optional string and is string"])
        self.assertEqual(self.breaks(("bytes key = 4; ", ""), ("Kind kind", "bytes key = 4; Kind kind")),
                         ["p.Request.key = 4 was in oneof what and is in no oneof"])
        self.assertEqual(self.breaks(("Nested nested", "Inner nested")), ["p.Request.nested = 7 was p.Request.Nested and is p.Inner"])
        self.assertEqual(self.breaks(("reserved 9; ", "")), ["p.Request: the numbers from 9 are no longer reserved"])
        self.assertEqual(self.breaks(('reserved "gone";', "")), ["p.Request: gone is no longer reserved"])

    def test_messages_enums_and_services(self) -> None:
        self.assertEqual(self.breaks(("message Nested", "message Other"), ("Nested nested", "Other nested"))[-1],
                         "message p.Request.Nested is gone")
        self.assertEqual(self.breaks(("KIND_OLD = 2;", "")), ["p.Kind.KIND_OLD = 2 is gone, and its number and name are not reserved"])
        self.assertEqual(self.breaks(("KIND_BIG = 1", "KIND_HUGE = 1")), ["p.Kind.KIND_BIG = 1 is now called KIND_HUGE"])
        self.assertEqual(self.breaks(("rpc Lease(Request) returns (Inner);", "")), ["p.Engine.Lease is gone"])
        self.assertEqual(self.breaks(("rpc Lease(Request)", "rpc Lease(Inner)")), ["p.Engine.Lease takes or answers another message"])
        self.assertEqual(self.breaks(("(stream Request)", "(Request)")), ["p.Engine.Step streams otherwise"])
        self.assertEqual(self.breaks(("service Engine", "service Motor")), ["service p.Engine is gone"])
        self.assertEqual(self.breaks(("enum Kind", "enum Sort"), ("Kind kind", "Sort kind")),
                         ["p.Request.kind = 6 was p.Kind and is p.Sort", "enum p.Kind is gone"])


if __name__ == "__main__":
    unittest.main()
