"""The command line before anything heavy is imported: commands, where a model stands, and options that can be judged by then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from server.config.command_line import command_of
from server.config.parse import parse
from server.config.server_options import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("argv", "command", "rest"),
    [
        ([], "serve", []),
        (["--port", "1"], "serve", ["--port", "1"]),
        (["serve"], "serve", []),
        (["serve", "--port", "1"], "serve", ["--port", "1"]),
        (["serve", "owner/name", "--port", "1"], "serve", ["--model", "owner/name", "--port", "1"]),
        (["batch", "a", "b"], "batch", ["a", "b"]),
        (["models", "--help"], "models", ["--help"]),
        (["--help"], "help", []),
        (["help"], "help", []),
        (["serve", "--help"], "serve", ["--help"]),
        (["--help", "all"], "serve", ["--help", "all"]),
    ],
    ids=str,
)
def test_a_command_and_what_is_behind_it(argv, command, rest):
    assert command_of(argv) == (command, rest)


def test_serve_takes_the_model_as_everybody_types_it():
    _, rest = command_of(["serve", "owner/name", "--max-num-seqs", "3"])
    config = parse(rest, {})
    assert (config.model, config.max_num_seqs) == ("owner/name", 3)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["modles"], "unknown command 'modles' (did you mean models?)"),
        (["owner/name"], "did you mean oneloop serve owner/name?"),
        (["serve", "a", "--model", "b"], "a model is given as a and by --model"),
        (["serve", "a", "--model=b"], "a model is given as a"),
    ],
)
def test_what_is_no_command_is_refused_with_what_was_meant(argv, words):
    with pytest.raises(ConfigError) as refused:
        command_of(argv)
    assert words in str(refused.value)


def test_a_model_that_does_not_come_first_is_refused_with_where_it_goes():
    with pytest.raises(ConfigError, match="oneloop serve MODEL"):
        parse(["--port", "1", "owner/name"], {})


RUN = """
import json, sys
from server import __main__ as program
from runtime.platform import host
host.has_nvidia_driver = lambda: False
ended = []
for argv in json.loads(sys.argv[1]):
    sys.argv = ["oneloop", *argv]
    try:
        ended.append(program.main())
    except SystemExit as exit:
        ended.append(exit.code)
    assert "torch" not in sys.modules, argv
print(json.dumps(ended))
"""


def test_options_are_judged_before_the_engine_is_imported(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ["serve", str(tmp_path)]
    refused = {
        "--max-model-len 513 is more than the model's 512": [*model, "--max-model-len", "513"],
        "raise --kv-cache-memory to": [*model, "--kv-cache-memory", "1KiB"],
        "--device cuda: no NVIDIA driver is installed": ["--device", "cuda"],
        "there is no tool parser 'bogus'": ["--tool-parser", "bogus"],
        "there is no reasoning parser 'bogus'": ["--reasoning-parser", "bogus"],
        "did you mean --port?": ["serve", "--prot", "1"],
        "/nope: no such file or folder": ["serve", "/nope"],
        "did you mean qwen3-0.6b or": ["serve", "qwen3-0.6"],
        "no config.json in this folder": ["serve", "--embedding-model", str(tmp_path.parent)],
    }
    ended = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps([*refused.values(), ["--help"]])],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [2] * len(refused) + [0]
    complaints = ended.stderr.splitlines()
    assert len(complaints) == len(refused)
    for words, complaint in zip(refused, complaints, strict=True):
        assert words in complaint
    for word in ("serve [MODEL]", "batch IN OUT", "models [--fit]"):
        assert word in ended.stdout
