"""Several models in one process, one loaded at a time: two that chat, one that embeds, and one whose weights are torn."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}

WIDTH, INNER, LAYERS, HEADS = 32, 64, 2, 2
EOS = "<|eos|>"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def several(start_for_module, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    one, two, torn = (tiny_checkpoint(folder / name, seed) for seed, name in enumerate(("one", "two", "torn")))
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    named = (("one", one), ("two", two), ("torn", torn), ("embeds", "all-minilm-l6-v2"))
    options = [word for name, model in named for word in ("--model", str(model), "--served-model-name", name)]
    server = start_for_module(*options)
    server.wait_until_healthy()
    return server


def chat(server, model: str, **fields) -> str:
    status, answer = server.post("/v1/chat/completions", {**CHAT, "model": model, **fields})
    assert (status, answer["model"], answer["usage"]["completion_tokens"]) == (200, model, fields.get("max_tokens", 12))
    return answer["choices"][0]["message"]["content"]


def states(server) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in server.get("/v1/models")[1]["data"]}


def test_a_name_that_no_model_has_is_told_at_the_start(start):
    server = start("--model", "all-minilm-l6-v2", "--model", "/no/such")
    assert server.process.wait() == 2
    server.kill()
    assert any("/no/such: no such file or folder" in line for line in server.log)


def test_what_was_never_loaded_is_described(several):
    """By its configuration; of the built-in one it is known once its files have come."""
    while any(card["max_model_len"] is None for card in several.get("/v1/models")[1]["data"] if card["id"] != "embeds"):
        pass  # it is found out while the server serves
    cards = {card["id"]: card for card in several.get("/v1/models")[1]["data"]}
    assert {name: cards[name]["max_model_len"] for name in ("two", "torn")} == {"two": 1024, "torn": 1024}
    assert (cards["two"]["tasks"], cards["two"]["modalities"]) == (["generate"], ["text"])
    assert cards["embeds"]["tasks"] in (None, ["embed", "token_embed"])
    assert states(several) == {"one": "loaded", "two": "unloaded", "torn": "unloaded", "embeds": "unloaded"}


def test_requests_alternate_and_each_model_says_what_it_says(several):
    assert states(several) == {"one": "loaded", "two": "unloaded", "torn": "unloaded", "embeds": "unloaded"}
    first = {name: chat(several, name) for name in ("one", "two")}
    assert first["one"] != first["two"]
    assert {name: chat(several, name) for name in ("one", "two")} == first, "what comes back is the same model"
    status, answer = several.post("/v1/embeddings", {"input": "Hi", "model": "embeds"})
    assert (status, len(answer["data"][0]["embedding"])) == (200, 384)
    assert states(several)["embeds"] == "loaded"
    assert chat(several, "one") == first["one"]


def test_streams_of_all_at_the_same_time_come_to_their_end(several):
    found: dict[int, tuple[str, str | None]] = {}
    alone = {name: chat(several, name, max_tokens=100) for name in ("one", "two")}

    def stream(number: int, model: str) -> None:
        with several.client() as client:
            chunks = client.chat.completions.create(
                model=model, messages=CHAT["messages"], max_tokens=100, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            text, finish = "", None
            for chunk in chunks:
                text += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason
            found[number] = (text, finish)

    asked = ["one", "two"] * 4
    threads = [threading.Thread(target=stream, args=each) for each in enumerate(asked)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [found[number] for number in range(len(asked))] == [(alone[name], "length") for name in asked]


def test_a_client_that_leaves_while_models_change_leaves_nothing_behind(several):
    chat(several, "one")
    body = b'{"prompt": "Hi", "model": "two"}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", several.port)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
    assert chat(several, "one") != chat(several, "two")
    while (load := several.get("/load")[1]["server_load"]) != 0:  # an abort takes a step
        assert load


def test_a_torn_model_is_an_error_of_its_own_and_the_former_comes_back(several):
    before = chat(several, "two")
    status, answer = several.post("/v1/chat/completions", {**CHAT, "model": "torn"})
    assert (status, answer["error"]["code"]) == (503, "model_load_failed")
    assert "model.safetensors" in answer["error"]["message"]
    assert chat(several, "two") == before
    assert several.get("/health")[0] == 200


def test_the_bench_of_swaps_finds_the_same_texts_and_whole_streams(several):
    command = [
        sys.executable,
        "-m",
        "oneloop",
        "bench",
        "swaps",
        "--url",
        several.base,
        "--models",
        "one",
        "two",
        "torn",
    ]
    done = subprocess.run(
        [*command, "--rounds", "1", "--pid", str(several.process.pid)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [each.get("same_answers") for each in found["models"].values()] == [True, True, None]
    assert "model.safetensors" in found["models"]["torn"]["failure"]
    assert (found["streams"]["whole"], found["streams"]["same_text"]) == (8, 8)


def tiny_checkpoint(folder: Path, seed: int) -> Path:
    """A Llama so small that it is loaded in no time: random weights, and a tokenizer whose tokens are bytes. By hand."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": TEMPLATE}))
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": len(alphabet) + 1, "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "max_position_embeddings": 1024, "eos_token_id": len(alphabet), "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) / 4

    tensors = {"model.embed_tokens.weight": drawn(len(alphabet) + 1, WIDTH), "model.norm.weight": torch.ones(WIDTH)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {f"{name}.self_attn.{each}_proj.weight": drawn(WIDTH, WIDTH) for each in "qkvo"}
        tensors |= {f"{name}.mlp.{each}_proj.weight": drawn(INNER, WIDTH) for each in ("gate", "up")}
        tensors[f"{name}.mlp.down_proj.weight"] = drawn(WIDTH, INNER)
        tensors |= {f"{name}.{each}_layernorm.weight": torch.ones(WIDTH) for each in ("input", "post_attention")}
    save_file(tensors, folder / "model.safetensors")
    return folder
