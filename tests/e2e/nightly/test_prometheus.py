"""Prometheus itself scrapes the server and evaluates the queries of the dashboard and the alerts; it needs its program."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[3] / "server" / "deploy"
METRIC = re.compile(r"\boneloop:\w+")


class Prometheus:
    def __init__(self, target: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.base = f"http://{address}/api/v1"
        scrape = {"job_name": "oneloop", "scrape_interval": "100ms", "static_configs": [{"targets": [target]}]}
        rules = [str(DEPLOY / "prometheus-rules.yaml")]
        (folder / "prometheus.yml").write_text(json.dumps({"rule_files": rules, "scrape_configs": [scrape]}))
        storage, listen = f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"
        self.process = subprocess.Popen(["prometheus", f"--config.file={folder}/prometheus.yml", storage, listen])

    def query(self, expression: str) -> list[dict]:
        """The samples of `expression`; none while Prometheus starts."""
        try:
            with urllib.request.urlopen(f"{self.base}/query?{urllib.parse.urlencode({'query': expression})}") as answer:
                return json.load(answer)["data"]["result"]
        except OSError:
            assert self.process.poll() is None
            return []


@pytest.fixture
def prometheus(server, tmp_path) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus")
    running = Prometheus(server.base.removeprefix("http://"), tmp_path)
    yield running
    running.process.kill()
    running.process.wait()


def expressions() -> list[str]:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    # An alert's condition does not hold: its metrics alone are asked for.
    found += METRIC.findall((DEPLOY / "prometheus-rules.yaml").read_text())
    return [re.sub(r"\$[a-z]\w*", ".*", each.replace("$__rate_interval", "1m")) for each in found]


def test_prometheus_has_an_answer_to_every_query(server, prometheus):
    server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 4})
    with urllib.request.urlopen(server.base + "/metrics") as answer:
        page = answer.read().decode()
    pending = [each for each in expressions() if all(f"\n{name}" in page for name in METRIC.findall(each))]
    assert len(pending) > 40  # others are about encoders of media, which this model has none of
    while pending := [each for each in pending if not prometheus.query(each)]:
        time.sleep(0.05)  # two scrapes make a rate
