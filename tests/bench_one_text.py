"""Latency of one text over HTTP: `python -m tests.bench_one_text PORT [WORDS …]`, beside a server of a model that is pooled.

One connection, one request after another, texts of words drawn at random; milliseconds by the client's clock, for answers as
numbers and as base64."""

from __future__ import annotations

import http.client
import json
import random
import re
import statistics
import sys
import time

REQUESTS, WARM = 200, 20
WORDS = re.findall(r"\b[a-z]+\b", __doc__ or "")


def main() -> None:
    port, *sizes = map(int, sys.argv[1:])
    rng = random.Random(1)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for num_words in sizes or [16, 128, 400]:
        for encoding in ("float", "base64"):
            times, num_tokens = [], 0
            for _ in range(WARM + REQUESTS):
                text = " ".join(rng.choices(WORDS, k=num_words))
                body = json.dumps({"input": text, "encoding_format": encoding})
                began_s = time.perf_counter()
                connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                read = answer.read()
                times.append(time.perf_counter() - began_s)
                if answer.status != 200:
                    raise SystemExit(read.decode())
                num_tokens = json.loads(read)["usage"]["prompt_tokens"]
            kept = sorted(1000 * each for each in times[WARM:])
            median, late = statistics.median(kept), kept[len(kept) * 9 // 10]
            print(
                f"{num_words} words, {num_tokens} tokens, {encoding}: p50 {median:.2f} ms, p90 {late:.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
