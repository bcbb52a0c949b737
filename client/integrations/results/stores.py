"""Where tiers keep values: a folder, a Redis and a bucket, each the only one of its kind, on this machine."""

import asyncio
import os
import pathlib
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

WEED = pathlib.Path(__file__).resolve().parents[3] / "build/deps/python/bin/weed"
KEYS = ("kvpool", "secret-of-this-measurement")


def _ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [some.getsockname()[1] for some in sockets]
    for some in sockets:
        some.close()
    return ports


class Files:
    def __init__(self, path, capacity):
        self.tier = f"file:{path}/files,capacity={capacity}"


class Redis:
    """Without persistence."""

    def __init__(self, path):
        (self.port,) = _ports(1)
        # Debian has the server under this name, which starts no service.
        self._process = subprocess.Popen(["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                                          "--dir", str(path)], executable="/usr/bin/redis-check-rdb", stdout=subprocess.DEVNULL)
        _until(lambda: socket.create_connection(("127.0.0.1", self.port)).close())
        self.tier = f"resp:127.0.0.1:{self.port}"

    def close(self):
        self._process.kill()
        self._process.wait()


class Bucket:
    """SeaweedFS."""

    def __init__(self, path):
        self._path = path / "bucket"
        (self._path / "data").mkdir(parents=True)
        names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")
        ports = dict(zip(names, _ports(len(names))))
        actions = '"actions": ["Admin", "Read", "Write", "List"]'
        (self._path / "s3.json").write_text(f'{{"identities": [{{"name": "anonymous", {actions}}}, {{"name": "kv", "credentials": '
                                            f'[{{"accessKey": "{KEYS[0]}", "secretKey": "{KEYS[1]}"}}], {actions}}}]}}')
        credentials = self._path / "credentials"
        credentials.write_text(f"[default]\naws_access_key_id = {KEYS[0]}\naws_secret_access_key = {KEYS[1]}\n")
        credentials.chmod(0o600)
        with open(self._path / "log", "wb") as log:
            self._process = subprocess.Popen(
                [WEED, "server", f"-dir={self._path}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
                 "-master.volumeSizeLimitMB=1024", "-volume.max=40", "-volume.minFreeSpace=1MiB", "-volume.preStopSeconds=0", "-filer",
                 f"-filer.localSocket={self._path}/filer.sock", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false",
                 f"-s3.localSocket={self._path}/s3.sock", f"-s3.config={self._path}/s3.json", *(f"-{name}={port}" for name, port in ports.items())],
                stdout=log, stderr=log, cwd=self._path, env={**os.environ, "HOME": str(self._path)})
        place = f"http://127.0.0.1:{ports['s3.port']}/kv-cache"
        _until(lambda: urllib.request.urlopen(urllib.request.Request(place, method="PUT")).close())
        self.tier = f"s3:{place},credentials-file={credentials}"

    def close(self):
        self._process.kill()
        self._process.wait()


class Throttled:
    """What lies between a daemon and a store: so many bytes a second come back, of all connections together."""

    def __init__(self, port, bytes_per_second):
        self._rate, self._target, self._free_at = bytes_per_second, port, 0.0
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        threading.Thread(target=self._run, args=(ready,), daemon=True).start()
        ready.wait()

    def _run(self, ready):
        async def serve():
            server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await server.serve_forever()

        self._loop.run_until_complete(serve())

    async def _connect(self, reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._carry(reader, back, None), self._carry(there, writer, self._rate))

    async def _carry(self, reader, writer, rate):
        try:
            while some := await reader.read(65536):
                if rate is not None:
                    self._free_at = max(self._free_at, time.monotonic()) + len(some) / rate
                    await asyncio.sleep(self._free_at - time.monotonic())
                writer.write(some)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()


def _until(works, seconds=60):
    end = time.monotonic() + seconds
    while True:
        try:
            works()
            return
        except (OSError, urllib.error.URLError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
