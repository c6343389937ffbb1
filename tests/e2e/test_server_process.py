"""The server as a process: its start and end, its answers and its refusals, through the official client."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import openai
import psutil
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


def test_health_tells_of_loading_before_it_says_ok(server, start):
    answers = start("--max-queue", "3").wait_until_healthy()
    codes = [code for code, _ in answers]
    assert codes == sorted(codes, reverse=True)
    assert answers[0][0] == 503
    assert answers[0][1]["status"] == "loading"
    assert answers[-1][1]["status"] == "ok"


def test_chat_streamed_and_not_give_the_same_text(server):
    client = server.client()
    model = client.models.list().data[0].id
    ask = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**ask)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.usage is not None
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 16 * ((whole.usage.prompt_tokens - 1) // 16)


def test_completions_take_several_prompts_and_token_ids(server):
    client = server.client()
    model = client.models.list().data[0].id
    _, tokens = server.post("/tokenize", {"prompt": "Once upon a time"})
    prompts = ["Once upon a time", "The sky is"]
    ask = {"model": model, "temperature": 0, "max_tokens": 8}
    both = client.completions.create(prompt=prompts, **ask)
    assert [choice.index for choice in both.choices] == [0, 1]
    by_ids = client.completions.create(prompt=tokens["tokens"], **ask)
    assert by_ids.choices[0].text == both.choices[0].text
    assert server.post("/detokenize", {"tokens": tokens["tokens"]})[1] == {"prompt": "Once upon a time"}


def test_a_seed_gives_the_same_text_alone_and_beside_others(server):
    client = server.client()
    model = client.models.list().data[0].id
    ask = {"model": model, "prompt": "My favourite", "temperature": 1.0, "top_p": 0.9, "seed": 5, "max_tokens": 16}
    alone = client.completions.create(**ask).choices[0].text
    texts: list[str] = []
    threads = [
        threading.Thread(
            target=lambda seed=seed: texts.append(client.completions.create(**{**ask, "seed": seed}).choices[0].text)
        )
        for seed in (5, 6, 7, 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone in texts
    assert len(set(texts)) == 4


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"logprobs": True, "top_logprobs": 21}, openai.BadRequestError, "top_logprobs"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, openai.BadRequestError, "audio"),
        ({"messages": [{"role": "user", "content": "word " * 20000}]}, openai.BadRequestError, "messages"),
    ],
)
def test_bad_requests_get_an_error_in_openais_shape(server, change, kind, param):
    client = server.client()
    model = client.models.list().data[0].id
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": model, "messages": QUESTION, **change})
    assert caught.value.param == param


def test_metrics_count_what_was_served(server):
    with urllib.request.urlopen(server.base + "/metrics") as answer:
        text = answer.read().decode()
    assert 'oneloop:request_success_total{engine="0",finished_reason="length"' in text
    assert "oneloop:time_to_first_token_seconds_bucket" in text


def test_an_idle_server_uses_no_cpu(server):
    """Not a timing: a process that polls is scheduled, one that waits is not."""
    process = psutil.Process(server.process.pid)

    def switches_in_two_seconds() -> int:
        before = process.num_ctx_switches().voluntary
        time.sleep(2.0)
        return process.num_ctx_switches().voluntary - before

    # Keep-alive timers of earlier clients run out within some of these.
    assert any(switches_in_two_seconds() <= 10 for _ in range(10))


def test_sigterm_finishes_what_is_in_flight_and_leaves_nothing_behind(start):
    server = start("--drain-timeout", "3600")
    server.wait_until_healthy()
    children = psutil.Process(server.process.pid).children(recursive=True)
    client = server.client()
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = [next(stream), next(stream)]
    server.process.send_signal(signal.SIGTERM)
    while (status := server.get("/health"))[1]["status"] != "draining":
        assert server.process.poll() is None
    assert status[0] == 503
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(model=model, messages=QUESTION)
    assert refused.value.status_code == 503
    assert "retry-after" in refused.value.response.headers
    chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    assert server.process.wait() == 0
    assert not [child for child in children if child.is_running()]


def test_a_second_signal_ends_at_once(start):
    server = start("--drain-timeout", "600")
    server.wait_until_healthy()
    client = server.client()
    stream = client.completions.create(
        model=client.models.list().data[0].id,
        prompt="a",
        max_tokens=7000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    server.process.send_signal(signal.SIGINT)
    while server.get("/health")[1]["status"] != "draining":
        assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)  # the same one could come within the moment in which it counts once
    assert server.process.wait() == 128 + signal.SIGTERM


def test_a_cached_model_needs_no_network(server, start):
    offline = start(PIP_INDEX_URL="http://127.0.0.1:9/", PIP_NO_INDEX="1", HF_HUB_OFFLINE="1")
    assert offline.wait_until_healthy()[-1][0] == 200


def test_an_unknown_option_is_refused_by_name():
    ended = subprocess.run([sys.executable, "-m", "server", "--max-modle-len", "5"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "--max-modle-len" in ended.stderr
    assert "--max-model-len" in ended.stderr.split("--max-modle-len", 1)[1]


def test_it_is_measured_and_found_healthy_by_its_own_program(server):
    """`oneloop bench` and `oneloop health` come with the package."""
    bench = [
        sys.executable,
        "-m",
        "server",
        "bench",
        "serve",
        "--url",
        server.base,
        "--workload",
        "c1_8_4",
        "--num-prompts",
        "2",
    ]
    measured = subprocess.run(bench, capture_output=True, text=True)
    assert measured.returncode == 0, measured.stderr
    [run] = json.loads(measured.stdout.splitlines()[-1])["runs"]
    assert (run["ok"], run["out_tokens"]) == (2, 8)
    health = [sys.executable, "-m", "server", "health", "generate", "--port", str(server.port)]
    assert subprocess.run(health, capture_output=True).returncode == 0
