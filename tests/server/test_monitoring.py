"""Grafana's dashboard and Prometheus' rules ask for metrics and labels that `/metrics` has; promtool takes them, where it is."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from runtime.api import MediaItem
from runtime.batch import EncoderWork
from runtime.encode.scheduling import EncoderLimits, EncoderScheduling
from server.config.server_config import ServerConfig
from server.http.clients import Clients
from server.http.metrics import HttpStats, exposition, registry
from tests.fake_runner import FakeRunner, make_engine

DEPLOY = Path(__file__).parents[2] / "server" / "deploy"
OF_PROMETHEUS = {"job", "instance"}  # labels that it puts on what it asks for
ACCEPTED = {
    "nothing": "",
    "anything": "*/*",
    "text": "text/plain;version=1.0.0;escaping=underscores",
    "Prometheus 2": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Prometheus 3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "Prometheus 3 with legacy names": "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=underscores;q=0.4,*/*;q=0.2",
    "Prometheus 3 with dots": "application/openmetrics-text;version=1.0.0;escaping=dots;q=0.6,*/*;q=0.2",
}
WORDS = {"sum", "max", "min", "avg", "by", "without", "and", "or", "unless", "on", "ignoring", "bool", "offset"}
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"")
_LABELS = re.compile(r"\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_NAME = re.compile(r"(?<![\w:$.])([a-zA-Z_][\w:]*)(?!\s*\(|[\w:])")


async def page(accept: str) -> tuple[str, str]:
    """What `/metrics` of an engine says, and its content type."""
    stats, engine = (
        HttpStats(),
        make_engine(FakeRunner(), encoding=(encoding := EncoderScheduling(EncoderLimits(16, 16, 64)))),
    )
    picture = MediaItem("image", b"digest", np.array([1], np.int32), {})
    encoding.stats.encoded(EncoderWork(1, b"key", picture), 0.1)
    encoding.stats.failed(EncoderWork(2, b"key", picture))
    stats.observe("/v1/completions", "POST", 200, 0.1)
    try:
        metrics = [*engine.metrics(), *stats.metrics(), *Clients(ServerConfig(), None).metrics()]
        body, content_type = exposition(registry(metrics, "tiny"), accept)
        return body.decode(), content_type
    finally:
        await engine.close()


@pytest.fixture(scope="module", params=ACCEPTED)
def served(request) -> dict[str, set[str]]:
    """Samples, and their labels, as who scrapes gets them."""
    found: dict[str, set[str]] = {"up": set()}
    text, content_type = asyncio.run(page(ACCEPTED[request.param]))
    is_openmetrics = content_type.startswith("application/openmetrics-text")
    assert is_openmetrics == request.param.startswith("Prometheus")
    parse = openmetrics.text_string_to_metric_families if is_openmetrics else text_string_to_metric_families
    for family in parse(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> list[dict[str, Any]]:
    return json.loads((DEPLOY / "grafana.json").read_text())["panels"]


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for group in yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']} {target['refId']}", target["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


def asked(expression: str) -> tuple[set[str], set[str]]:
    """Metrics and labels of a PromQL expression."""
    bare = re.sub(r"\[[^\]]*\]", "", _STRING.sub('""', expression))
    labels = {re.split(r"[=!~]", each)[0].strip() for found in _LABELS.findall(bare) for each in found.split(",")}
    labels |= {each.strip() for found in _GROUPING.findall(bare) for each in found.split(",")}
    bare = _GROUPING.sub("", _LABELS.sub("", bare))
    return set(_NAME.findall(bare)) - WORDS, labels


def test_an_expression_is_taken_apart_as_prometheus_would():
    expression = (
        'histogram_quantile(0.9, sum by (le, x) (rate(a:b_bucket{c=~"d,e}", f!="g"}[5m]))) > 0.5 * max(h) and on (i) j'
    )
    assert asked(expression) == ({"a:b_bucket", "h", "j"}, {"le", "x", "c", "f", "i"})


def test_every_expression_asks_for_what_metrics_has(served):
    seen = []
    for name, expression in expressions():
        metrics, labels = asked(expression)
        assert metrics <= served.keys(), name
        assert labels <= set().union(*(served[metric] for metric in metrics)) | OF_PROMETHEUS, name
        seen += metrics
    assert len(set(seen)) > 20


def test_labels_of_legends_and_messages_are_those_that_are_left():
    for panel in panels():
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in asked(target["expr"])[1] | OF_PROMETHEUS
    for rule in rules():
        for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
            grouped = set(re.findall(r"\w+", " ".join(_GROUPING.findall(rule["expr"]))))
            assert label in grouped | (OF_PROMETHEUS if not grouped else set()), rule["alert"]


def test_panels_are_numbered_and_none_lies_on_another():
    numbers, taken = [], set()
    for panel in panels():
        numbers.append(panel["id"])
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len(set(numbers)) == len(numbers)


def test_variables_of_expressions_are_those_that_the_dashboard_asks_its_user_for():
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    defined = {each["name"] for each in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps([panel.get("targets", ()) for panel in panels()])))
    assert used == defined


def test_queries_of_the_variables_ask_for_what_metrics_has(served):
    for each in json.loads((DEPLOY / "grafana.json").read_text())["templating"]["list"]:
        if each["type"] == "query":
            asks, label = re.fullmatch(r"label_values\((.*), (\w+)\)", each["definition"]).groups()
            [metric] = asked(asks)[0]
            assert label in served[metric] | OF_PROMETHEUS


promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")


@promtool
def test_prometheus_takes_the_rules():
    checked = subprocess.run(
        ["promtool", "check", "rules", str(DEPLOY / "prometheus-rules.yaml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


@promtool
def test_prometheus_reads_every_expression_of_the_dashboard(tmp_path):
    found = [expression for name, expression in expressions() if name.startswith("panel")]
    records = [
        {"record": f"x{index}", "expr": each.replace("$__rate_interval", "5m")} for index, each in enumerate(found)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": records}]}))
    checked = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@promtool
def test_an_alert_fires_at_what_it_is_for_and_not_otherwise(tmp_path):
    """Preemptions alone are no full cache, nor is a full cache alone."""
    series = 'oneloop:{}{{instance="a", model_name="m"}}'
    values = {"full": ("0+30x30", "0.95x30"), "preempting": ("0+30x30", "0.3x30"), "well": ("0x30", "0.95x30")}
    labels = {"severity": "warning", "instance": "a", "model_name": "m"}
    [annotations] = [rule["annotations"] for rule in rules() if rule["alert"] == "OneloopKVCacheFull"]
    told = {key: text.replace("{{ $labels.model_name }}", "m") for key, text in annotations.items()}
    tests = [
        {
            "interval": "1m",
            "input_series": [
                {"series": series.format("num_preemptions_total"), "values": preemptions},
                {"series": series.format("kv_cache_usage_perc"), "values": usage.replace("x", "+0x")},
            ],
            "alert_rule_test": [
                {
                    "eval_time": "25m",
                    "alertname": "OneloopKVCacheFull",
                    "exp_alerts": [{"exp_labels": labels, "exp_annotations": told}] if name == "full" else [],
                }
            ],
        }
        for name, (preemptions, usage) in values.items()
    ]
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "prometheus-rules.yaml")], "tests": tests}))
    checked = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
