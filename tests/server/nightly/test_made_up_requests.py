"""Requests that schemathesis makes up from our own document, right ones and wrong ones, of every operation: no answer is a 5xx,
none breaks the promise of its media type, and the server goes on."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from server.api import openapi
from server.api.routes import ROUTES
from tests.server.conftest import lasting_server
from tests.server.pooling.embedders import CLASSIFIER, EMBEDDER
from tests.server.test_costly_bodies import POOLED

DOCUMENT = json.loads(openapi.document(ROUTES, user_key=False, admin_key=False))
ENDLESS = "/dashboard/feed"  # an event stream that ends with its reader; test_dashboard reads it
OPERATIONS = [
    operation
    for result in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
    if (operation := result.ok()).path != ENDLESS
]
bounded = settings(max_examples=settings.default.max_examples // 13, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def embedding(tokenizer):
    with lasting_server(tokenizer, EMBEDDER) as server:
        yield server


@pytest.fixture(scope="module")
def classifying(tokenizer):
    with lasting_server(tokenizer, CLASSIFIER) as server:
        yield server


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_no_made_up_request_ends_in_a_fault_of_ours(request, operation, mode):
    pooled = operation.path in POOLED or "Pooling" in operation.definition.raw["tags"]
    runner, server = request.getfixturevalue(
        "classifying" if operation.path == "/classify" else "embedding" if pooled else "lasting"
    )

    @bounded
    @given(operation.as_strategy(generation_mode=mode))
    def check(case):
        arguments = case.as_transport_kwargs(base_url=str(server.http.base_url))
        known = ("method", "url", "headers", "params", "json")
        content = {"content": arguments["data"]} if isinstance(arguments.get("data"), bytes | str) else {}
        sent = server.http.request(**{k: arguments[k] for k in known if arguments.get(k) is not None}, **content)
        answer = runner.run(sent)
        assert answer.status_code < 500, (arguments, answer.text)
        if answer.headers["content-type"] == "application/json" and answer.content:
            json.loads(answer.content)

    try:
        check()
    except Exception as error:
        if "Unsatisfiable" not in type(error).__name__:  # nothing wrong can be made up of a GET without parameters
            raise
