"""Embeddings benchmark: texts per second, and latency of a single text, for one server of /v1/embeddings or several alternately.

Texts are random words, new in every round and equal for all servers. Connections are kept open. Throughput is measured with
concurrent requests of several texts, latency with single texts in sequence."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

from loadtests.address import Address, AddressRefused
from loadtests.probe import ProbeFailed, first_model
from loadtests.words import drawn

SUMMARY = "texts embedded per second, and the latency of one text, for one server or several"
LIMIT_S = 300.0


class EmbeddingFailed(Exception):
    """Error: a server did not return one vector per text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--base-url",
        type=Address.parse,
        required=True,
        nargs="+",
        metavar="URL",
        help="several are measured alternately",
    )
    add("--model", metavar="NAME", help="model name in requests (default: the first model of each server)")
    add("--words", type=int, nargs="+", default=[14, 110, 450], metavar="N", help="words of a text (14 110 450)")
    add("--texts", type=int, default=256, metavar="N", help="texts of a round (256)")
    add("--batch", type=int, default=32, metavar="N", help="texts of a request (32)")
    add("--concurrency", type=int, default=4, metavar="N", help="requests at a time (4)")
    add("--singles", type=int, default=100, metavar="N", help="single texts, one after the other (100)")
    add("--rounds", type=int, default=3, metavar="N", help="rounds, of which the median counts (3)")
    add("--seed", type=int, default=1, metavar="N")


class Connection:
    """Keep-alive connection that sends one request at a time."""

    def __init__(self, address: Address, model: str) -> None:
        self._address, self._model = address, model
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def embed(self, texts: list[str]) -> int:
        """Embed `texts` and return their number of tokens, as the server reports it. Raises EmbeddingFailed."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._address.host, self._address.port, limit=1 << 26)
        reader, writer = self._streams
        body = json.dumps({"model": self._model, "input": texts, "encoding_format": "base64"}).encode()
        head = (
            f"POST {self._address.path}/v1/embeddings HTTP/1.1\r\nHost: {self._address.authority}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        async with asyncio.timeout(LIMIT_S):
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            content = await reader.readexactly(int(answer.partition(b"content-length:")[2].split()[0]))
        if answer.startswith(b"http/1.0") or b"connection: close" in answer:
            self.close()
        if answer.split(maxsplit=2)[1] != b"200":
            raise EmbeddingFailed(f"{self._address.url}: {content[:300].decode(errors='replace')}")
        parsed: dict[str, Any] = json.loads(content)
        if len(parsed["data"]) != len(texts):
            raise EmbeddingFailed(f"{self._address.url}: {len(parsed['data'])} vectors for {len(texts)} texts")
        return int(parsed["usage"]["prompt_tokens"])

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def throughput(address: Address, model: str, texts: list[str], batch: int, concurrency: int) -> tuple[float, int]:
    """Embed all of `texts`, `batch` texts per request. Return the time in seconds and the number of tokens."""
    requests = iter([texts[first : first + batch] for first in range(0, len(texts), batch)])
    connections = [Connection(address, model) for _ in range(concurrency)]

    async def ask(connection: Connection) -> int:
        return sum([await connection.embed(each) for each in requests])

    began_s = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(ask, connections)))
    taken_s = time.perf_counter() - began_s
    for connection in connections:
        connection.close()
    return taken_s, tokens


async def latencies_ms(address: Address, model: str, texts: list[str]) -> list[float]:
    connection, times = Connection(address, model), []
    await connection.embed(texts[:1])
    for text in texts:
        began_s = time.perf_counter()
        await connection.embed([text])
        times.append((time.perf_counter() - began_s) * 1000)
    connection.close()
    return times


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rng, found = random.Random(args.seed), []
    models = {address: args.model or first_model(address) for address in args.base_url}

    def texts_of(num_texts: int, num_words: int) -> list[str]:
        return [drawn(rng, num_words) for _ in range(num_texts)]

    for num_words in args.words:
        rates: dict[Address, list[float]] = {address: [] for address in models}
        singles: dict[Address, list[float]] = {address: [] for address in models}
        tokens = dict.fromkeys(models, 0)
        for address, model in models.items():  # what a server does only once
            await throughput(address, model, texts_of(args.batch, num_words), args.batch, 1)
        for _ in range(args.rounds):
            texts = texts_of(args.texts, num_words)
            alone = texts_of(args.singles // args.rounds + 1, num_words)
            for address, model in models.items():
                taken_s, tokens[address] = await throughput(address, model, texts, args.batch, args.concurrency)
                rates[address].append(args.texts / taken_s)
                singles[address] += await latencies_ms(address, model, alone)
        for address, model in models.items():
            rate = statistics.median(rates[address])
            found.append({
                "url": address.url, "model": model, "words": num_words, "tokens": tokens[address] / args.texts,
                "texts_per_s": round(rate, 1), "tok_per_s": round(rate * tokens[address] / args.texts),
                "single_ms_p50": round(statistics.median(singles[address]), 3),
                "single_ms_p99": round(sorted(singles[address])[int(len(singles[address]) * 0.99)], 3),
                "runs": [round(each, 1) for each in rates[address]],
            })  # fmt: skip
            row = found[-1]
            print(
                f"{address.url:28} {num_words:4} words, {row['tokens']:6.1f} tokens: {rate:9.1f} texts/s, "
                f"one in {row['single_ms_p50']:.2f} ms (p99 {row['single_ms_p99']:.2f})",
                flush=True,
            )
    return found


def main(args: argparse.Namespace) -> int:
    if min(args.texts, args.batch, args.concurrency, args.singles, args.rounds, *args.words) < 1:
        print("words, texts, batch, concurrency, singles and rounds are at least 1")
        return 2
    try:
        found = asyncio.run(measure(args))
    except (AddressRefused, EmbeddingFailed, ProbeFailed, OSError, TimeoutError) as error:
        print(error)
        return 2
    print(json.dumps({"embeddings": found}))
    return 0
