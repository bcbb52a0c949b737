"""Makes one page of all protos. Usage: protos.py DESCRIPTORS >PAGE; protoc wrote them with --include_source_info"""

import html
import pathlib
import sys

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

STYLE = """body { font: 15px/1.45 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em } pre { margin: .3em 0; white-space: pre-wrap }
table { border-collapse: collapse } td { vertical-align: top; padding: .2em .8em .2em 0 } code { white-space: nowrap }
h3 { margin-bottom: 0; border-top: 1px solid #ccc; padding-top: .6em }"""
# The numbers of fields in descriptor.proto that a path into a file goes by.
MESSAGE, ENUM, SERVICE, IN_MESSAGE_FIELD, IN_MESSAGE_MESSAGE, IN_MESSAGE_ENUM, VALUE, METHOD = 4, 5, 6, 2, 3, 4, 2, 2


class Page:
    def __init__(self, files):
        self.known = set()
        self.parts = []
        self.files = files.file
        for file in self.files:
            for part in [*file.message_type, *file.enum_type]:
                self.known.add(f".{file.package}.{part.name}")

    def add(self, text):
        self.parts.append(text)

    def type_of(self, field):
        name = field.type_name or FieldDescriptorProto.Type.Name(field.type)[len("TYPE_"):].lower()
        text = html.escape(name.rsplit(".", 1)[-1])
        if name in self.known:
            text = f'<a href="#{html.escape(name[1:])}">{text}</a>'
        prefix = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else "optional " if field.proto3_optional else ""
        return prefix + text

    def row(self, what, comment):
        self.add(f"<tr><td><code>{what}</code></td><td><pre>{comment}</pre></td></tr>")

    def heading(self, kind, name, comment):
        self.add(f'<h3 id="{html.escape(name)}">{kind} {html.escape(name.rsplit(".", 1)[-1])}</h3><pre>{comment}</pre><table>')

    def message(self, name, message, path, comment):
        self.heading("message", name, comment(path))
        for i, field in enumerate(message.field):
            self.row(f"{self.type_of(field)} {html.escape(field.name)} = {field.number}", comment((*path, IN_MESSAGE_FIELD, i)))
        self.add("</table>")
        for i, nested in enumerate(message.nested_type):
            self.message(f"{name}.{nested.name}", nested, (*path, IN_MESSAGE_MESSAGE, i), comment)
        for i, enum in enumerate(message.enum_type):
            self.enum(f"{name}.{enum.name}", enum, (*path, IN_MESSAGE_ENUM, i), comment)

    def enum(self, name, enum, path, comment):
        self.heading("enum", name, comment(path))
        for i, value in enumerate(enum.value):
            self.row(f"{html.escape(value.name)} = {value.number}", comment((*path, VALUE, i)))
        self.add("</table>")

    def service(self, name, service, path, comment):
        self.heading("service", name, comment(path))
        for i, method in enumerate(service.method):
            streams = ("stream " if method.client_streaming else "", "stream " if method.server_streaming else "")
            ends = [f'<a href="#{t[1:]}">{t.rsplit(".", 1)[-1]}</a>' for t in (method.input_type, method.output_type)]
            self.row(f"{method.name}({streams[0]}{ends[0]}) → {streams[1]}{ends[1]}", comment((*path, METHOD, i)))
        self.add("</table>")

    def file(self, file):
        comments = {tuple(place.path): place.leading_comments or place.trailing_comments for place in file.source_code_info.location}
        # The comment in front of `syntax` is the file's.
        about = {tuple(place.path): place for place in file.source_code_info.location}.get((12,))

        def comment(path):
            return html.escape("\n".join(line.removeprefix(" ") for line in comments.get(tuple(path), "").rstrip().splitlines()))

        self.add(f"<h2>{html.escape(file.name)}</h2>")
        if about is not None:
            self.add(f"<pre>{comment((12,))}</pre>")
        for i, service in enumerate(file.service):
            self.service(f"{file.package}.{service.name}", service, (SERVICE, i), comment)
        for i, message in enumerate(file.message_type):
            self.message(f"{file.package}.{message.name}", message, (MESSAGE, i), comment)
        for i, enum in enumerate(file.enum_type):
            self.enum(f"{file.package}.{enum.name}", enum, (ENUM, i), comment)


def main():
    page = Page(FileDescriptorSet.FromString(pathlib.Path(sys.argv[1]).read_bytes()))
    for file in page.files:
        page.file(file)
    print(f'<!doctype html><html lang="en"><meta charset="utf-8"><title>kvpool.v1</title><style>{STYLE}</style><h1>kvpool.v1</h1>')
    print("\n".join(page.parts))


if __name__ == "__main__":
    main()
