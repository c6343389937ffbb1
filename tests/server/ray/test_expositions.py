"""Metrics of several replicas on one page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from server.ray.expositions import joined

PAGE = """# HELP tokens_total Tokens
# TYPE tokens_total counter
tokens_total{engine="0"} 5.0
# HELP up Up
# TYPE up gauge
up 1.0
"""


def test_samples_stand_under_their_family_with_their_replica():
    page = joined({"a": PAGE.encode(), "b": PAGE.replace("5.0", "7.0").encode()}).decode()
    assert page.count("# TYPE tokens_total counter") == 1
    families = {family.name: family.samples for family in text_string_to_metric_families(page)}
    assert [(each.labels, each.value) for each in families["tokens"]] == [
        ({"replica": "a", "engine": "0"}, 5), ({"replica": "b", "engine": "0"}, 7),
    ]  # fmt: skip
    assert [each.labels for each in families["up"]] == [{"replica": "a"}, {"replica": "b"}]


def test_braces_without_a_label_and_the_end_of_a_page_do_no_harm():
    assert joined({"a": b"up{} 2\n# EOF\n", "b": b""}) == b'up{replica="a"} 2\n'
