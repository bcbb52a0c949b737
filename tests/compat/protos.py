"""What a change of the protos would break for programs built with a release.

Usage: protos.py RELEASED CURRENT    descriptor sets of protoc; prints each break and ends with status 1 if there is any
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable, Iterator

from google.protobuf.descriptor_pb2 import (DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet,
                                            ServiceDescriptorProto)


def _in_file(files: FileDescriptorSet, kind: str) -> Iterator[tuple[str, DescriptorProto | EnumDescriptorProto | ServiceDescriptorProto]]:
    for file in files.file:
        for part in getattr(file, kind):
            yield f"{file.package}.{part.name}", part


def _messages(files: FileDescriptorSet) -> dict[str, DescriptorProto]:
    found: dict[str, DescriptorProto] = {}

    def enter(name: str, message: DescriptorProto) -> None:
        found[name] = message
        for nested in message.nested_type:
            enter(f"{name}.{nested.name}", nested)

    for name, message in _in_file(files, "message_type"):
        assert isinstance(message, DescriptorProto)
        enter(name, message)
    return found


def _enums(files: FileDescriptorSet) -> dict[str, EnumDescriptorProto]:
    found = {name: enum for name, enum in _in_file(files, "enum_type") if isinstance(enum, EnumDescriptorProto)}
    for name, message in _messages(files).items():
        found.update({f"{name}.{enum.name}": enum for enum in message.enum_type})
    return found


def _services(files: FileDescriptorSet) -> dict[str, ServiceDescriptorProto]:
    return {name: service for name, service in _in_file(files, "service") if isinstance(service, ServiceDescriptorProto)}


def _reserved(number: int, name: str, now: DescriptorProto | EnumDescriptorProto) -> bool:
    """Whether neither the number nor the name can come to mean anything else. The end of a message's range is not part of it; that
    of an enum's is."""
    last = 0 if isinstance(now, EnumDescriptorProto) else 1
    return name in now.reserved_name and any(span.start <= number <= span.end - last for span in now.reserved_range)


def _type(field: FieldDescriptorProto) -> str:
    label = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
    presence = "optional " if field.proto3_optional else ""
    of = field.type_name.lstrip(".") or FieldDescriptorProto.Type.Name(field.type)[len("TYPE_"):].lower()
    return f"{label}{presence}{of}"


def _oneof(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    if field.proto3_optional or not field.HasField("oneof_index"):
        return "no oneof"
    return f"oneof {message.oneof_decl[field.oneof_index].name}"


def _fields(name: str, was: DescriptorProto, now: DescriptorProto) -> Iterator[str]:
    fields = {field.number: field for field in now.field}
    for old in was.field:
        new = fields.get(old.number)
        if new is None:
            if not _reserved(old.number, old.name, now):
                yield f"{name}.{old.name} = {old.number} is gone, and its number and name are not reserved"
            continue
        if new.name != old.name:
            yield f"{name}.{old.name} = {old.number} is now called {new.name}"
        if _type(new) != _type(old):
            yield f"{name}.{old.name} = {old.number} was {_type(old)} and is {_type(new)}"
        if _oneof(new, now) != _oneof(old, was):
            yield f"{name}.{old.name} = {old.number} was in {_oneof(old, was)} and is in {_oneof(new, now)}"


def _values(name: str, was: EnumDescriptorProto, now: EnumDescriptorProto) -> Iterator[str]:
    values = {value.number: value.name for value in now.value}
    for old in was.value:
        if old.number not in values:
            if not _reserved(old.number, old.name, now):
                yield f"{name}.{old.name} = {old.number} is gone, and its number and name are not reserved"
        elif values[old.number] != old.name:
            yield f"{name}.{old.name} = {old.number} is now called {values[old.number]}"


def _reservations(name: str, was: DescriptorProto | EnumDescriptorProto, now: DescriptorProto | EnumDescriptorProto) -> Iterator[str]:
    for old in was.reserved_name:
        if old not in now.reserved_name:
            yield f"{name}: {old} is no longer reserved"
    for span in was.reserved_range:
        if not any(new.start <= span.start and span.end <= new.end for new in now.reserved_range):
            yield f"{name}: the numbers from {span.start} are no longer reserved"


def _methods(name: str, was: ServiceDescriptorProto, now: ServiceDescriptorProto) -> Iterator[str]:
    methods = {method.name: method for method in now.method}
    for old in was.method:
        new = methods.get(old.name)
        if new is None:
            yield f"{name}.{old.name} is gone"
        elif (new.input_type, new.output_type) != (old.input_type, old.output_type):
            yield f"{name}.{old.name} takes or answers another message"
        elif (new.client_streaming, new.server_streaming) != (old.client_streaming, old.server_streaming):
            yield f"{name}.{old.name} streams otherwise"


def breaks(released: FileDescriptorSet, current: FileDescriptorSet) -> Iterable[str]:
    messages, enums, services = _messages(current), _enums(current), _services(current)
    for name, message in _messages(released).items():
        if name not in messages:
            yield f"message {name} is gone"
            continue
        yield from _fields(name, message, messages[name])
        yield from _reservations(name, message, messages[name])
    for name, enum in _enums(released).items():
        if name not in enums:
            yield f"enum {name} is gone"
            continue
        yield from _values(name, enum, enums[name])
        yield from _reservations(name, enum, enums[name])
    for name, service in _services(released).items():
        if name not in services:
            yield f"service {name} is gone"
            continue
        yield from _methods(name, service, services[name])


def main() -> int:
    released, current = (FileDescriptorSet.FromString(pathlib.Path(path).read_bytes()) for path in sys.argv[1:])
    found = list(breaks(released, current))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
