"""Long texts that Debian ships, without installing anything: a novelist's works, out of copyright, and a manual."""

import gzip
import pathlib
import re
import struct
import subprocess
import zlib

PACKAGES = ("r-cran-janeaustenr", "debian-policy")
_NOVELS = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
_MANUAL = "usr/share/doc/debian-policy/policy.txt.gz"
_STRING = b"\x00\x04\x00\x09"  # In R's serialization: flags of an ASCII string, before its length and its bytes.


def _unpack(directory):
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / _NOVELS).exists() or not (directory / _MANUAL).exists():
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=directory, check=True, capture_output=True)
        for package in sorted(directory.glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, directory], check=True)


def _strings(serialized):
    place = 0
    while (place := serialized.find(_STRING, place)) >= 0:
        (size,) = struct.unpack_from(">i", serialized, place + 4)
        yield serialized[place + 8:place + 8 + max(size, 0)].decode("latin-1")
        place += 8 + max(size, 0)


def _novels(path):
    """Chunks of a lazy-load database: the size of what comes, then a zlib stream. Each novel is a list of lines."""
    data = path.read_bytes()
    while data:
        stream = zlib.decompressobj()
        yield list(_strings(stream.decompress(data[4:])))
        data = stream.unused_data


def texts(directory):
    """Name -> text: of each novel, and of the manual."""
    directory = pathlib.Path(directory)
    _unpack(directory)
    found = {}
    for lines in _novels(directory / _NOVELS):
        if len(lines) > 1000:  # Others are names of things.
            found[lines[0].title()] = re.sub(r"(?<!\n)\n(?!\n)", " ", "\n".join(lines))  # Lines become paragraphs.
    found["Debian Policy"] = gzip.decompress((directory / _MANUAL).read_bytes()).decode()
    return found


def middle(text, tokenize, tokens, part):
    """`tokens` token ids of the text from `part` (0 to 1) of it on, where a paragraph begins."""
    begin = text.index("\n\n", int(len(text) * part)) + 2
    return tokenize(text[begin:begin + 8 * tokens])[:tokens]
