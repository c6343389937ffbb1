"""`python -m server` as a user has it: a process on a port, real weights, the official clients. Imports nothing of ours, so that
it also runs against an installed wheel from outside the source tree."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import anthropic
import openai
import psutil
import pytest

START_LIMIT_S = 600  # the first start downloads the model


class Server:
    """A server process with its log; `stop` must leave nothing behind."""

    def __init__(self, *args: str, **env: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server", "--port", str(self.port), *args],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env},
        )  # fmt: skip
        self.log: list[str] = []
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stdout or ()), daemon=True)
        self._reader.start()

    def get(self, path: str) -> tuple[int, dict]:
        try:
            with urllib.request.urlopen(self.base + path, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait_until_healthy(self) -> list[tuple[int, dict]]:
        """Every answer of /health on the way, the 200 last."""
        answers: list[tuple[int, dict]] = []
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "".join(self.log)
            try:
                answers.append(self.get("/health"))
            except OSError:
                time.sleep(0.02)  # the port is not open yet
                continue
            if answers[-1][0] == 200:
                return answers
            time.sleep(0.02)
        raise AssertionError("".join(self.log))

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base + "/v1", api_key="none", max_retries=0, timeout=120)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    try:
        running.wait_until_healthy()
        yield running
    finally:
        running.kill()


QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


def test_health_tells_of_loading_before_it_says_ok(server):
    second = Server("--max-queue", "3")
    try:
        answers = second.wait_until_healthy()
    finally:
        second.kill()
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
    _, tokens = post(server, "/tokenize", {"prompt": "Once upon a time"})
    prompts = ["Once upon a time", "The sky is"]
    ask = {"model": model, "temperature": 0, "max_tokens": 8}
    both = client.completions.create(prompt=prompts, **ask)
    assert [choice.index for choice in both.choices] == [0, 1]
    by_ids = client.completions.create(prompt=tokens["tokens"], **ask)
    assert by_ids.choices[0].text == both.choices[0].text
    assert post(server, "/detokenize", {"tokens": tokens["tokens"]})[1] == {"prompt": "Once upon a time"}


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


def post(server: Server, path: str, body: object) -> tuple[int, dict]:
    ask = urllib.request.Request(server.base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(ask, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"logprobs": True, "top_logprobs": 21}, openai.BadRequestError, "top_logprobs"),
        ({"verbosity": "low"}, openai.BadRequestError, "verbosity"),
        ({"messages": [{"role": "user", "content": "word " * 20000}]}, openai.BadRequestError, "messages"),
    ],
)
def test_bad_requests_get_an_error_in_openais_shape(server, change, kind, param):
    client = server.client()
    model = client.models.list().data[0].id
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": model, "messages": QUESTION, **change})
    assert caught.value.param == param


# --- Anthropic's client -------------------------------------------------------------------------------------------

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}


def anthropic_ask(server: Server, **fields) -> tuple[anthropic.Anthropic, dict]:
    """A client, and what to ask with it: greedily, since what is asked has one answer."""
    client = anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0, timeout=120)
    model = server.get("/v1/models")[1]["data"][0]["id"]
    ask = {"model": model, "messages": QUESTION, "max_tokens": 24, "extra_body": {"temperature": 0}}
    return client, {**ask, **fields}


def test_messages_streamed_and_not_give_the_same_text(server):
    client, ask = anthropic_ask(server, system="You answer in one sentence.")
    whole = client.messages.create(**ask)
    assert "Paris" in whole.content[0].text
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == streamed.content[0].text == whole.content[0].text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = client.messages.count_tokens(model=ask["model"], messages=ask["messages"], system=ask["system"])
    used = streamed.usage
    assert used.cache_read_input_tokens == 16 * ((counted.input_tokens - 1) // 16)
    assert used.input_tokens + used.cache_read_input_tokens == counted.input_tokens


def test_a_prompt_may_be_put_into_the_cache_alone(server):
    client, ask = anthropic_ask(server, system="You only ever answer questions about lighthouses and their keepers.")
    before = client.messages.create(**{**ask, "max_tokens": 0})
    assert (before.content, before.stop_reason, before.usage.output_tokens) == ([], "max_tokens", 0)
    after = client.messages.create(**ask)
    assert after.usage.cache_read_input_tokens > before.usage.cache_read_input_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_that_has_to_be_called_is_called_as_its_schema_says(server, choice):
    client, ask = anthropic_ask(server, tools=[WEATHER], tool_choice=choice, max_tokens=300)
    ask["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    with client.messages.stream(**ask) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (use,) = message.content
    assert (use.type, use.name) == ("tool_use", "get_weather")
    assert use.input["city"] in ("Paris", "Rome")
    assert isinstance(use.input["days"], int)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "Rain."}]}
    turns = [*QUESTION, message.to_param(), {"role": "user", "content": [result]}]
    again = client.messages.create(**{**ask, "tool_choice": {"type": "none"}, "messages": turns})
    assert [block.type for block in again.content] == ["text"]


def test_messages_keep_to_a_schema_and_to_stop_sequences(server):
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    client, ask = anthropic_ask(server, output_config=form, max_tokens=100)
    assert json.loads(client.messages.create(**ask).content[0].text)["capital"] in ("Paris", "Rome")
    del ask["output_config"]
    stopped = client.messages.create(**ask, stop_sequences=["Paris"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in stopped.content[0].text


def test_metrics_count_what_was_served(server):
    with urllib.request.urlopen(server.base + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert 'oneloop:request_success_total{engine="0",finished_reason="length"' in text
    assert "oneloop:time_to_first_token_seconds_bucket" in text


def test_an_idle_server_uses_no_cpu(server):
    """Not a timing: a process that polls is scheduled, one that waits is not."""
    process = psutil.Process(server.process.pid)
    time.sleep(2.5)  # let keep-alive timers of earlier clients run out of the way
    before = process.num_ctx_switches()
    time.sleep(2.0)
    after = process.num_ctx_switches()
    assert after.voluntary - before.voluntary <= 10


def test_sigterm_finishes_what_is_in_flight_and_leaves_nothing_behind():
    server = Server()
    try:
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
        assert server.process.wait(60) == 0
        assert not [child for child in children if child.is_running()]
    finally:
        server.kill()


def test_a_second_signal_ends_at_once():
    server = Server("--drain-timeout", "600")
    try:
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
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) != 0
    finally:
        server.kill()


def test_a_cached_model_needs_no_network(server):
    offline = Server(PIP_INDEX_URL="http://127.0.0.1:9/", PIP_NO_INDEX="1", HF_HUB_OFFLINE="1")
    try:
        assert offline.wait_until_healthy()[-1][0] == 200
    finally:
        offline.kill()


def test_an_unknown_option_is_refused_by_name():
    ended = subprocess.run(
        [sys.executable, "-m", "server", "--max-modle-len", "5"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "--max-modle-len" in ended.stderr
    assert "--max-model-len" in ended.stderr.split("--max-modle-len", 1)[1]
