"""Models, tokenize, health, metrics, version."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.api import LoadProgress, SpeechInfo
from server.api.routes import ROUTES
from server.config import __version__
from server.models.lifecycle import LoadPhase
from tests.server.conftest import MESSAGES
from tests.server.tiny import EOS, START, VOCAB_SIZE


async def test_models_are_listed_under_every_name(serve):
    server = await serve(served_model_name=("first", "org/second"), max_model_len=512)
    body = (await server.http.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["first", "org/second"]
    for card in body["data"]:
        assert card["max_model_len"] == 512
        assert card["object"] == "model"
        assert card["root"] == "first"
        assert (await server.http.get(f"/v1/models/{card['id']}")).json() == card


async def test_a_star_among_the_names_takes_any_name_and_answers_by_its_own(serve):
    server = await serve(served_model_name=("mine", "*"))
    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Hi"}]}
    answer = await server.post("/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["model"]) == (200, "mine")
    assert [model["id"] for model in (await server.http.get("/v1/models")).json()["data"]] == ["mine"]


@pytest.mark.parametrize("name", ["third", "first/x", "", "%2e%2e", "FIRST"])
async def test_an_unknown_model_is_404(serve, name):
    server = await serve(served_model_name=("first",))
    response = await server.http.get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_the_openai_client_lists_and_retrieves(serve):
    server = await serve()
    async with server.openai() as client:
        models = [model.id async for model in client.models.list()]
        assert (await client.models.retrieve(models[0])).id == "tiny"


async def test_the_anthropic_client_lists_and_retrieves(serve):
    server = await serve(served_model_name=("tiny", "claude"))
    async with server.anthropic() as client:
        models = [model async for model in client.models.list()]
        assert [(model.id, model.type, model.display_name) for model in models] == [
            ("tiny", "model", "tiny"),
            ("claude", "model", "claude"),
        ]
        assert models[0].created_at.tzinfo is not None
        assert await client.models.retrieve("claude") == models[1]


# --- tokenize -----------------------------------------------------------------------------------------------------


async def test_text_there_and_back(serve, tokenizer):
    server = await serve(max_model_len=512)
    text = "Grüße 👩‍👩‍👧"
    body = (await server.post("/tokenize", {"prompt": text})).json()
    assert body == {"count": len(text.encode()), "max_model_len": 512, "tokens": tokenizer.encode(text)}
    assert (await server.post("/detokenize", {"tokens": body["tokens"]})).json() == {"prompt": text}


async def test_token_strings_on_request(serve):
    server = await serve()
    body = (await server.post("/tokenize", {"prompt": "a b", "return_token_strs": True})).json()
    assert body["token_strs"] == ["a", "Ġ", "b"]


async def test_messages_become_the_ids_a_chat_would_use(serve):
    server = await serve()
    body = (await server.post("/tokenize", {"messages": MESSAGES})).json()
    await server.chat()
    assert body["tokens"] == list(server.engine.submitted[0].prompt_ids)
    shorter = (await server.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})).json()
    assert body["tokens"][: shorter["count"]] == shorter["tokens"]
    assert body["tokens"][shorter["count"]] == START


async def test_text_longer_than_the_context_is_still_counted(serve):
    server = await serve(max_model_len=64)
    assert (await server.post("/tokenize", {"prompt": "x" * 5000})).json()["count"] == 5000


async def test_special_tokens_are_spelled_out_when_detokenised(serve):
    server = await serve()
    ids = (await server.post("/tokenize", {"messages": MESSAGES})).json()["tokens"]
    text = (await server.post("/detokenize", {"tokens": [*ids, EOS]})).json()["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|eos|>"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
    ],
)
async def test_bad_tokenize_requests_are_refused_by_name(serve, path, body, param):
    server = await serve()
    response = await server.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


# --- health -------------------------------------------------------------------------------------------------------


async def health(server) -> tuple[int, dict]:
    response = await server.http.get("/health")
    return response.status_code, response.json()


async def test_health_tells_how_far_loading_is(serve):
    server = await serve(loaded=False)
    server.service.lifecycle.report(LoadProgress("download", 5, 20, "B"))
    assert await health(server) == (
        503, {"status": "loading", "phase": "download", "done": 5, "total": 20, "unit": "B"},
    )  # fmt: skip


async def test_health_counts_what_runs(serve):
    server = await serve(paused=True)
    assert await health(server) == (200, {"status": "ok", "running": 0, "waiting": 0})
    answer = await server.open_stream("/v1/chat/completions", messages=MESSAGES, stream=True)
    await server.engine.until(lambda: bool(server.engine.live))
    assert await health(server) == (200, {"status": "ok", "running": 1, "waiting": 0})
    answer.leave()


async def test_health_believes_the_engine(serve):
    server = await serve()
    server.engine.unhealthy = "a step has been running for 130 s"
    status, body = await health(server)
    assert (status, body["status"], body["reason"]) == (503, "failed", "a step has been running for 130 s")


async def test_health_tells_of_draining_and_of_failure(serve):
    server = await serve()
    server.service.lifecycle.drain()
    assert await health(server) == (503, {"status": "draining", "running": 0, "waiting": 0})
    failed = await serve(loaded=False)
    failed.service.lifecycle.fail("no such file")
    assert await health(failed) == (503, {"status": "failed", "reason": "no such file"})
    assert (await failed.chat()).status_code == 503


async def test_what_was_ready_too_late_does_not_end_a_drain(serve):
    server = await serve()
    lifecycle, loaded = server.service.lifecycle, server.service.lifecycle.loaded
    lifecycle.drain()
    lifecycle.ready(loaded)
    assert lifecycle.phase is LoadPhase.DRAINING


# --- metrics and version ------------------------------------------------------------------------------------------


async def test_metrics_are_the_engines_and_https_with_the_models_name(serve):
    server = await serve()
    await server.chat()
    await server.chat(temperature=9)
    await server.http.get("/nowhere")
    response = await server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    lines = response.text.splitlines()
    for line in (
        "# TYPE oneloop:request_success_total counter",
        'oneloop:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1.0',
        'oneloop:num_requests_running{engine="0",model_name="tiny"} 0.0',
        'oneloop:step_time_seconds_bucket{engine="0",le="0.1",model_name="tiny"} 3.0',
        'oneloop:step_time_seconds_bucket{engine="0",le="1.0",model_name="tiny"} 5.0',
        'oneloop:step_time_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 6.0',
        'oneloop:step_time_seconds_sum{engine="0",model_name="tiny"} 4.5',
        'oneloop:http_requests_total{engine="0",method="POST",model_name="tiny",route="/v1/chat/completions",status="200"} 1.0',
        'oneloop:http_requests_total{engine="0",method="POST",model_name="tiny",route="/v1/chat/completions",status="400"} 1.0',
        'oneloop:http_requests_total{engine="0",method="GET",model_name="tiny",route="unknown",status="404"} 1.0',
        'oneloop:http_request_duration_seconds_count{engine="0",model_name="tiny",route="/v1/chat/completions"} 2.0',
        'oneloop:http_requests_in_flight{engine="0",model_name="tiny"} 1.0',
    ):
        assert line in lines
    assert any(line.startswith("process_resident_memory_bytes") for line in lines)


MAX_METRICS_BYTES = 4 * 1024 * len(ROUTES)  # about 300 bytes for a route and status


async def test_metrics_stay_small_whatever_clients_have_sent(serve):
    """Every route, answered in each of many ways, and paths and methods that there are not."""
    server = await serve()
    stats = server.service.http_stats
    for route in ROUTES:
        for status in (200, 400, 401, 404, 429, 499, 500, 503):
            stats.observe(route.path, route.method, status, 0.02)
    for number in range(300):
        await server.http.get(f"/no/{number}")
        stats.observe("unknown", f"METHOD{number}", 405, 0.02)
    text = (await server.http.get("/metrics")).text
    assert len(text) < MAX_METRICS_BYTES
    of_others = [line for line in text.splitlines() if 'method="other"' in line or "METHOD" in line]
    assert len(of_others) == 1


async def test_metrics_answer_while_nothing_is_loaded(serve):
    server = await serve(loaded=False)
    await server.http.get("/health")
    text = (await server.http.get("/metrics")).text
    assert (
        'oneloop:http_requests_total{engine="0",method="GET",model_name="tiny",route="/health",status="503"} 1.0'
        in text
    )


async def test_metrics_speak_openmetrics_to_who_asks(serve):
    server = await serve()
    response = await server.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    assert "\noneloop:num_requests_running{" in response.text


async def test_version_answers_always(serve):
    server = await serve(loaded=False)
    assert (await server.http.get("/version")).json() == {"version": __version__}


async def test_head_is_get_without_a_body(serve):
    server = await serve()
    response = await server.http.head("/health")
    assert (response.status_code, response.content) == (200, b"")


async def test_every_answer_has_a_date_and_an_id(serve):
    server = await serve()
    for path in ("/health", "/nowhere"):
        headers = (await server.http.get(path)).headers
        assert headers["date"].endswith("GMT")
        assert len(headers["x-request-id"]) == 32


async def test_the_access_log_names_the_exchange_and_cannot_be_forged(serve, caplog):
    caplog.set_level("INFO", "oneloop.access")
    server = await serve()
    await server.http.get("/a%0Ab", headers={"x-request-id": "mine"})
    await server.http.get("/health")
    lines = [record.getMessage() for record in caplog.records if record.name == "oneloop.access"]
    assert len(lines) == 1
    assert '"GET /a\\nb" 404' in lines[0]
    assert lines[0].endswith("mine")


async def test_requests_are_logged_with_their_parameters_on_request(serve, caplog):
    caplog.set_level("INFO", "oneloop.http")
    server = await serve(log_requests=True)
    await server.chat(temperature=0.25)
    assert "temperature=0.25" in caplog.text


async def test_a_speech_model_is_listed_as_one_that_transcribes(serve):
    server = await serve()
    server.engine.model = replace(server.engine.model, speech=SpeechInfo(num_mel_bins=80))
    (card,) = (await server.http.get("/v1/models")).json()["data"]
    assert card["tasks"] == ["transcribe", "translate"]
