"""Idle connections: memory per connection, and latency of new requests, while many connections are open and unused.

Each connection requests /health once and stays open. The server's resident set is read before, during and after. Meanwhile
requests on new connections are timed. The connections come from addresses 127.0.0.1 to 127.0.0.8, since a server may limit
connections per address. Standard library only; connects to loopback addresses only."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from pathlib import Path

from loadtests.address import Address

SUMMARY = "many idle connections: memory per connection, and latency of other requests"
NUM_SOURCES = 8
AT_ONCE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", type=Address.parse, required=True, metavar="URL")
    parser.add_argument("--pid", type=int, required=True, help="process id of the server, to read its memory")
    parser.add_argument("--connections", type=int, default=10_000, metavar="N")
    parser.add_argument("--probes", type=int, default=200, metavar="N", help="requests on new connections meanwhile")


def resident_bytes(pid: int) -> int:
    """Return the resident set of process `pid` in bytes, including shared pages (Linux)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


class Idle:
    """Connection that stays open and idle after its first answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, address: Address, source: str | None) -> Idle:
        local = None if source is None else (source, 0)
        connection = cls(*await asyncio.open_connection(address.host, address.port, local_addr=local, limit=4096))
        await connection.ask(address)
        return connection

    async def ask(self, address: Address) -> None:
        """Request /health on this connection. Raises ConnectionError unless the answer is complete and has status 200."""
        self.writer.write(f"GET {address.path}/health HTTP/1.1\r\nHost: {address.authority}\r\n\r\n".encode())
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split()[0])
            await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, IndexError) as error:
            raise ConnectionError("closed before its answer") from error
        if not head.startswith(b"http/1.1 200"):
            raise ConnectionError(head.splitlines()[0].decode("latin-1"))

    def close(self) -> None:
        self.writer.transport.abort()


async def measure(address: Address, pid: int, num: int, num_probes: int) -> dict[str, float]:
    warm = [await Idle.open(address, None) for _ in range(20)]
    for connection in warm:
        connection.close()
    before = resident_bytes(pid)
    began_s = time.perf_counter()
    opened: list[Idle] = []
    while len(opened) < num:
        batch = range(len(opened), min(num, len(opened) + AT_ONCE))
        several_sources = address.host == "127.0.0.1"
        sources = [f"127.0.0.{1 + number % NUM_SOURCES}" if several_sources else None for number in batch]
        opened += await asyncio.gather(*(Idle.open(address, source) for source in sources))
    opened_s = time.perf_counter() - began_s
    with_them = resident_bytes(pid)
    seconds = []
    for _ in range(num_probes):
        asked_s = time.perf_counter()
        (await Idle.open(address, None)).close()
        seconds.append(time.perf_counter() - asked_s)
    still_open = sum(not connection.reader.at_eof() for connection in opened)
    for connection in opened[:: max(1, num // 100)]:
        await connection.ask(address)  # they are not only open, but served
    for connection in opened:
        connection.close()
    (await Idle.open(address, None)).close()  # its answer comes after those departures
    seconds.sort()
    return {
        "connections": num,
        "still_open": still_open,
        "opened_per_s": round(num / opened_s, 1),
        "bytes_per_connection": round((with_them - before) / num, 1),
        "probe_p50_ms": round(seconds[len(seconds) // 2] * 1000, 3),
        "probe_max_ms": round(seconds[-1] * 1000, 3),
        "rss_before_mib": round(before / 2**20, 1),
        "rss_with_them_mib": round(with_them / 2**20, 1),
        "rss_after_mib": round(resident_bytes(pid) / 2**20, 1),
    }


def main(args: argparse.Namespace) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = args.connections + 100
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            print(f"this system's limit of open files, {hard}, is too small for {args.connections} connections")
            return 2
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    found = asyncio.run(measure(args.base_url, args.pid, args.connections, args.probes))
    for name, value in found.items():
        print(f"{name:<24}{value:>14,}")
    print(json.dumps(found))
    return 0 if found["still_open"] == args.connections else 1
