"""Options: where they come from, which one wins, and what is refused by name."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from runtime.config import CACHE_TYPES, ELEMENT_BYTES, EngineConfig
from runtime.engine_options import Dtype, EngineOptions, KVCacheDtype, SchedulingPolicy, parse_size
from runtime.policy.fairness import POLICIES
from runtime.speculate.config import SpeculativeConfig
from server.config import __version__
from server.config.command_line import COMMANDS, COMMON, overview
from server.config.option import options_by_name, variable_of
from server.config.parse import from_keywords, parse
from server.config.server_config import ServerConfig
from server.config.server_options import MEDIA, ConfigError, flag_of

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "starlette", "uvicorn", "tokenizers", "transformers", "jinja2", "msgspec", "yaml", "numpy", "asyncio")


@pytest.fixture
def config_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_no_options_give_the_defaults():
    assert parse([], {}) == ServerConfig()
    assert parse([], {"PATH": "/bin", "ONELOOPY": "1"}) == ServerConfig()


def test_flag_beats_environment_beats_file_beats_default(config_file):
    path = config_file("port: 1\nhost: file\nmax-queue: 7\n")
    config = parse(["--config", path, "--port", "3"], {"ONELOOP_PORT": "2", "ONELOOP_HOST": "environment"})
    assert (config.port, config.host, config.max_queue, config.ping_interval) == (3, "environment", 7, 15.0)


def test_the_file_may_be_named_by_the_environment(config_file):
    assert parse([], {"ONELOOP_CONFIG": config_file("port: 1234")}).port == 1234


@pytest.fixture
def values(config_file):
    """A value other than the default for every option except --config, as the configuration holds it."""
    return {
        "served_model_name": ("mine",), "tokenizer": "t", "revision": "r", "load_format": "dummy", "dtype": "bfloat16",
        "model_impl": "transformers", "model_plugin": ("mine",),
        "quantization": "int8", "chat_template": config_file("x"), "generation_config": "none", "tool_parser": "hermes",
        "reasoning_parser": "qwen3", "device": "cpu", "max_model_len": 100,
        "max_num_seqs": 3, "max_num_batched_tokens": 200, "kv_cache_memory": 2**31,
        "kv_host_bytes": 2**30, "kv_disk": "/", "kv_disk_bytes": 2**32, "kv_cache_dtype": "float32",
        "kernels": "native", "max_num_encoder_tokens": 64,
            "encoder_cache_size": 128, "max_itl": 60.0, "target_ttft": 400.0,
        "gpu_memory_utilization": 0.5, "attention_backend": "triton",
        "enforce_eager": True,
        "num_kv_blocks": 9, "enable_prefix_caching": False, "scheduling_policy": "priority",
        "speculative_config": SpeculativeConfig.of({"method": "ngram"}), "speculative_method": "suffix",
        "speculative_model": "x/y",
        "num_speculative_tokens": 4,
        "stream_interval": 3,
        "enable_lora": True,
        "max_loras": 3,
        "max_cpu_loras": 9,
        "max_lora_rank": 24,
        "lora_experts": True,
        "lora_vocabulary": True,
        "lora_modules": ("a=b",), "lora_dir": "/", "lora_resolver": "/",
        "default_mm_loras": "{}",
        "threads": 2, "seed": 5, "host": "h", "port": 80, "uds": "s", "max_queue": 1,
        "max_queue_time": 1.5, "max_queued_tokens": 4, "max_num_seqs_per_key": 3, "request_timeout": 2.5,
        "max_tokens_per_minute_per_key": 9, "max_body_size": 4096, "strict_fields": True,
        "ping_interval": 0.5, "max_connections": 7, "max_connections_per_address": 6,
        "allowed_host": ("a.example",), "timeout_head": 1.0, "timeout_body": 2.0, "timeout_keep_alive": 3.0,
        "timeout_write": 4.0,
        "drain_timeout": 1.5, "log_level": "debug", "log_requests": True, "access_log": False,
            "model": ("m",), "max_loaded_models": 2, "enable_model_management": True,
        "api_key": ("k",), "api_key_file": config_file("k2"), "admin_api_key": "a", "cors_origin": ("https://a.example",),
        "cors_credentials": True, "max_stored_responses": 5, "max_stored_bytes": 4096,
        "batch_dir": "b", "max_batch_file_size": 7, "max_batch_files": 8, "max_batch_bytes": 9, "max_batch_requests": 10,
        "allow_special_tokens": True, "shared_prefix_cache": True, "dry_run": True,
        "runner": "generate", "convert": "embed", "pooler_config": "{}", "profile_dir": "/", "sleep_after": 0.5,
        "log_format": "json", "otlp_traces_endpoint": "http://localhost:4318",
        "ssl_certfile": config_file("c"), "ssl_keyfile": config_file("k"),
        "ssl_ca_certs": config_file("a"), "ssl_cert_reqs": 1, "tensor_parallel_size": 2, "data_parallel_size": 3,
        "pipeline_parallel_size": 4, "distributed_executor_backend": "ray",
        "enable_expert_distribution_metrics": True, "enable_expert_parallel": True, "expert_placement": "f.json",
        "embedding_model": "org/embedder",
        "speech_model": "whisper",
        "max_audio_size": 4096,
        "max_audio_seconds": 60.0,
        "enable_mm_embeds": True, "enable_prompt_embeds": True,
        "limit_mm_per_prompt": '{"image": 2}', "media_io_kwargs": "{}", "mm_processor_kwargs": "{}",
        "mm_processor_cache_gb": 0.5,
        "max_media_memory_gb": 2.5,
        "allowed_media_domains": ("a.example",),
        "allowed_local_media_path": "/", "media_fetch_timeout": 1.5,
        "max_media_size": 4096, "max_image_pixels": 9, "max_media_seconds": 1.5,
    }  # fmt: skip


def test_every_option_can_be_given_in_all_three_ways(values):
    fields = {spec.metadata["name"] or spec.name: spec.name for spec in dataclasses.fields(ServerConfig)}
    assert set(values) | {"config"} == set(fields)
    for name, value in values.items():
        text = value[0] if isinstance(value, tuple) else str(value)
        if name == "speculative_config":
            text = '{"method": "ngram"}'
        if isinstance(value, bool):
            flags = [flag_of(name) if value else "--no-" + name.replace("_", "-")]
        else:
            flags = [flag_of(name), text]
        needed = {
            "max_loaded_models": ["--model", "a", "--model", "b", "--kv-cache-memory", "1GiB"],
            "cors_credentials": ["--cors-origin", "https://a.example"],
            "speculative_model": ["--speculative-method", "draft_model"],
            "num_speculative_tokens": ["--speculative-method", "ngram"],
            "ssl_keyfile": ["--ssl-certfile", __file__],
            "ssl_ca_certs": ["--ssl-certfile", __file__],
            "ssl_cert_reqs": ["--ssl-certfile", __file__, "--ssl-ca-certs", __file__],
            "lora_modules": ["--enable-lora"],
            "lora_dir": ["--enable-lora"],
            "default_mm_loras": ["--enable-lora"],
            "lora_resolver": ["--enable-lora"],
            "distributed_executor_backend": ["-pp", "2"],
        }.get(name, [])
        assert getattr(parse(flags + needed, {}), fields[name]) == value
        assert getattr(parse(needed, {variable_of(name): text}), fields[name]) == value


def test_the_file_takes_yaml_types_and_both_spellings(config_file):
    path = config_file(
        "enable_prefix_caching: false\nserved-model-name: [a, b]\nkv-cache-memory: 1GiB\ndrain-timeout: 5\nseed:\n"
    )
    config = parse(["--config", path], {})
    assert config.enable_prefix_caching is False
    assert config.served_names == ("a", "b")
    assert config.kv_cache_bytes == 2**30
    assert config.drain_timeout == 5.0
    assert config.seed is None


def test_the_file_and_a_program_may_say_an_object(config_file):
    path = config_file("speculative-config: {method: ngram, num_speculative_tokens: 3}")
    said = SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": 3})
    assert parse(["--config", path], {}).speculative_config == said
    given = {"method": "ngram", "num_speculative_tokens": 3}
    assert from_keywords({"speculative_config": given}).speculative_config == said


# Options of `oneloop serve` that mean nothing to a program: it has no port, clients, keys or second model.
SERVER_ONLY = {
    "served_model_name", "embedding_model", "speech_model", "max_loaded_models", "enable_model_management",
    "host", "port", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "max_body_size", "strict_fields",
    "max_stored_responses", "max_stored_bytes", "max_connections", "max_connections_per_address",
    "allowed_host", "timeout_head", "timeout_body", "timeout_keep_alive", "timeout_write", "batch_dir", "max_batch_file_size",
    "max_batch_files", "max_batch_bytes", "max_batch_requests", "ping_interval", "request_timeout", "drain_timeout", "api_key",
    "api_key_file", "admin_api_key", "shared_prefix_cache", "cors_origin", "cors_credentials", "log_level", "log_format",
    "log_requests", "otlp_traces_endpoint", "access_log", "profile_dir", "dry_run", "max_media_memory_gb", "max_queue",
    "max_queued_tokens", "max_num_seqs_per_key", "max_tokens_per_minute_per_key", "max_queue_time",
}  # fmt: skip


def test_a_program_can_give_every_option_of_serve_that_is_not_about_serving(values):
    fields = {spec.metadata["name"] or spec.name: spec.name for spec in dataclasses.fields(ServerConfig)}
    needed = {
        "speculative_model": {"speculative_method": "draft_model"},
        "num_speculative_tokens": {"speculative_method": "ngram"},
        "distributed_executor_backend": {"pipeline_parallel_size": 2},
        **{name: {"enable_lora": True} for name in values if name.startswith("lora_")},
        "default_mm_loras": {"enable_lora": True},
    }
    values["distributed_executor_backend"] = "uni"  # `from_keywords` says why it is not ray
    for name in set(values) - SERVER_ONLY:
        assert getattr(from_keywords({name: values[name], **needed.get(name, {})}), fields[name]) == values[name]
    for name in SERVER_ONLY - {"served_model_name"}:  # which vLLM's programs have, to no effect
        with pytest.raises(ConfigError, match="unknown option"):
            from_keywords({name: values[name]})


@pytest.mark.parametrize("name", ["limit_mm_per_prompt", "media_io_kwargs", "mm_processor_kwargs", "pooler_config"])
def test_a_program_and_a_file_may_give_an_object_where_a_flag_takes_json(name, config_file):
    said = parse([flag_of(name), '{"image": 1}'], {})
    assert getattr(from_keywords({name: {"image": 1}}), name) == getattr(said, name)
    assert getattr(parse(["--config", config_file(f"{name}: {{image: 1}}")], {}), name) == getattr(said, name)


def test_a_repeated_served_name_collects_and_the_first_is_first():
    config = parse(["--served-model-name", "a", "b", "--served-model-name", "a", "--port", "1"], {})
    assert config.served_names == ("a", "b")
    assert parse(["--model", "x/y"], {}).served_names == ("x/y",)


def test_the_tool_parser_has_another_servers_flag_too():
    assert parse(["--tool-call-parser", "hermes"], {}).tool_parser == "hermes"


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1KiB", 1024), ("2GiB", 2**31), ("2g", 2 * 10**9), ("1.5 MB", 1_500_000), ("7B", 7)],
)
def test_sizes_are_read_with_their_units(text, size):
    assert parse_size(text) == size


REFUSALS = [
    (["--prot", "80"], {}, ["--prot", "did you mean --port"]),
    (["--speculative-config", '{"method": "ngran"}'], {}, ["--speculative-config", "did you mean ngram"]),
    (["--num-speculative-tokens", "3"], {}, ["--num-speculative-tokens", "--speculative-method"]),
    (["--speculative-method", "draft_model"], {}, ["--speculative-model NAME must be used together"]),
    (["--spec-model", "x/y"], {}, ["--speculative-model NAME must be used together"]),
    (["--spec-method", "ngram", "--speculative-config", '{"method": "ngram"}'], {}, ["have the same meaning"]),
    (["--no-prefix-caching"], {}, ["--no-prefix-caching"]),
    (["--no-enable-prefix-cachin"], {}, ["did you mean --no-enable-prefix-caching"]),
    (["serve"], {}, ["serve"]),
    (["--port"], {}, ["--port"]),
    (["--port", "http"], {}, ["--port", "'http'", "whole number"]),
    (["--port", "65536"], {}, ["--port", "65536", "65535"]),
    (["--ping-interval", "nan"], {}, ["--ping-interval", "nan"]),
    (["--ping-interval", "-1"], {}, ["--ping-interval"]),
    (["--drain-timeout", "inf"], {}, ["--drain-timeout", "inf"]),
    (["--dtype", "flaot32"], {}, ["--dtype", "flaot32", "did you mean float32"]),
    (["--kv-cache-memory", "lots"], {}, ["--kv-cache-memory", "lots", "size"]),
    (["--ssl-cert-reqs", "3"], {}, ["--ssl-cert-reqs", "3"]),
    (["--seed", str(2**63)], {}, ["--seed"]),
    (["--model", ""], {}, ["--model", "empty"]),
    ([], {"ONELOOP_PROT": "80"}, ["ONELOOP_PROT", "did you mean ONELOOP_PORT"]),
    (["owner/name"], {}, ["unexpected argument 'owner/name'", "(oneloop serve MODEL) or --model"]),
    (["--hepl"], {}, ["unknown option --hepl (did you mean --help?)"]),
    ([], {"ONELOOP_MAX_QUEUE": "0"}, ["ONELOOP_MAX_QUEUE", "0"]),
    ([], {"ONELOOP_LOG_REQUESTS": "maybe"}, ["ONELOOP_LOG_REQUESTS", "maybe"]),
    (["--kv-cache-memory", "1GiB", "--num-kv-blocks", "8"], {}, ["--kv-cache-memory", "--num-kv-blocks"]),
    (["--kv-cache-memory", "1GiB"], {"ONELOOP_NUM_KV_BLOCKS": "8"}, ["--kv-cache-memory", "--num-kv-blocks"]),
    (["--max-num-seqs", "8", "--max-num-batched-tokens", "8"], {}, ["--max-num-seqs", "--max-num-batched-tokens"]),
    (["--model", "m.gguf", "--load-format", "safetensors"], {}, ["--load-format", "m.gguf"]),
    (["--model", "m.gguf", "--load-format", "dummy"], {}, ["--load-format", "m.gguf"]),
    (["--model", ".", "--load-format", "gguf"], {}, ["--load-format", "folder"]),
    (["--model", "m.gguf", "--revision", "main"], {}, ["--revision", "m.gguf"]),
    (["--chat-template", "/no/such/file"], {}, ["--chat-template", "/no/such/file"]),
    (["--config", "/no/such/file"], {}, ["--config", "/no/such/file"]),
    (["--api-key-file", "/no/such/file"], {}, ["--api-key-file", "/no/such/file"]),
    (["--cors-origin", "https://a.example/"], {}, ["--cors-origin", "https://a.example/", "slash"]),
    (["--cors-origin", "a.example"], {}, ["--cors-origin", "a.example"]),
    (["--cors-origin", "null"], {}, ["--cors-origin", "null"]),
    (["--cors-origin", "https://A.example"], {}, ["--cors-origin", "lower case"]),
    (["--cors-origin", "*", "--cors-origin", "https://a.example"], {}, ["--cors-origin *"]),
    (["--cors-origin", "*", "--cors-credentials"], {}, ["--cors-credentials", "--cors-origin"]),
    (["--cors-credentials"], {}, ["--cors-credentials", "--cors-origin"]),
    ([], {"ONELOOP_API_KEY": ""}, ["ONELOOP_API_KEY", "empty"]),
    ([], {"ONELOOP_API_KEYS": "k"}, ["ONELOOP_API_KEYS", "did you mean ONELOOP_API_KEY"]),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "environ", "words"), REFUSALS, ids=[" ".join([*a, *e]) for a, e, _ in REFUSALS])
def test_what_cannot_be_honoured_is_refused_by_name(argv, environ, words):
    with pytest.raises(ConfigError) as refused:
        parse(argv, environ)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        ([], {"ONELOOP_NO": "1"}),
        (["--block-size", "16"], {}),
        (["--compilation-config", "{}"], {}),
        (["--temprature", "1"], {}),
    ],
)
def test_no_option_is_suggested_that_is_only_a_little_alike(argv, environ):
    with pytest.raises(ConfigError) as refused:
        parse(argv, environ)
    assert "did you mean" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 80", ["prot", "did you mean port"]),
        ("config: other.yaml", ["config"]),
        ("port: [1, 2]", ["port", "not a number"]),
        ("port: true", ["port"]),
        ("host: {a: 1}", ["host"]),
        ("- port", ["option: value"]),
        ("port: [", ["not YAML"]),
    ],
)
def test_a_file_is_checked_like_flags(config_file, text, words):
    with pytest.raises(ConfigError) as refused:
        parse(["--config", config_file(text)], {})
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(flag):
    code = (
        "import sys, atexit, runpy\n"
        f"atexit.register(lambda: print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules]))\n"
        f"sys.argv = ['oneloop', {flag!r}]\n"
        "runpy.run_module('server', run_name='__main__')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "HEAVY []"
    assert ("oneloop serve --help" in ended.stdout) == (flag == "--help")


def helped(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(["--help", *words], {})
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)) - {"--help", "--version"}


def test_a_star_is_no_name_of_a_model():
    alone, named = (
        parse(["--model", "a/b", "--served-model-name", "*"], {}),
        parse(["--served-model-name", "x", "*"], {}),
    )
    assert (alone.served_names, alone.takes_any_name) == (("a/b",), True)
    assert (named.served_names, named.takes_any_name) == (("x",), True)
    several = parse(["--model", "a/b", "--model", "c/d", "--served-model-name", "*"], {})
    assert [each.served_names for each in several.each_model()] == [("a/b",), ("c/d",)]
    assert several.takes_any_name
    assert not parse([], {}).takes_any_name


def test_help_lists_the_options_that_most_people_use(capsys):
    assert set(options_by_name()) >= COMMON
    assert flags_in(helped(capsys)) == {flag_of(name) for name in COMMON}


def test_help_fits_a_screen(capsys):
    assert len(overview().splitlines()) <= 40
    assert max(map(len, overview().splitlines())) <= 110
    assert set(COMMANDS) == {line.split()[0] for line in overview().splitlines() if line.startswith("  ")}
    assert len(helped(capsys).splitlines()) < len(helped(capsys, "all").splitlines()) / 3


def test_help_of_a_group_lists_its_options(capsys):
    found = flags_in(helped(capsys, "images"))
    assert found == {flag_of(name) for name, opt in options_by_name().items() if opt.metadata["group"] == MEDIA}


def test_help_of_an_unknown_group_names_those_there_are():
    with pytest.raises(
        ConfigError, match="--help kernels: there is no such group; use all, model, engine, images, http, logging"
    ):
        parse(["--help", "kernels"], {})


def test_help_all_names_every_option_and_its_variable(capsys):
    text = helped(capsys, "all")
    for spec in dataclasses.fields(ServerConfig):
        assert flag_of(spec.metadata["name"] or spec.name) in text
        assert variable_of(spec.metadata["name"] or spec.name) in text


def test_the_version_is_the_package_version(capsys):
    with pytest.raises(SystemExit):
        parse(["--version"], {})
    assert capsys.readouterr().out.strip() == f"oneloop {__version__} from {ROOT}"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__


def test_a_bad_option_ends_the_program_with_2_and_one_line():
    ended = subprocess.run(
        [sys.executable, "-m", "server", "--max-modle-len", "5"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == ["oneloop: unknown option --max-modle-len (did you mean --max-model-len?)"]


def test_a_variable_that_the_kernels_read_is_no_option_and_no_mistake():
    assert parse([], {"ONELOOP_ISA": "portable"}) == parse([], {})


def test_help_says_what_kind_of_value_every_option_takes(capsys):
    text = " ".join(helped(capsys, "all").split())
    assert "--gpu-memory-utilization FRACTION" in text
    assert "--ping-interval SECONDS" in text
    assert " TEXT " not in text  # which would say nothing


def test_choices_are_those_that_the_engine_knows():
    assert set(get_args(KVCacheDtype)) == {"auto", *CACHE_TYPES}
    assert set(get_args(Dtype)) == {"auto", *ELEMENT_BYTES}
    assert set(get_args(SchedulingPolicy)) == set(POLICIES)


def test_the_engine_is_asked_for_every_option_of_its_own_by_the_users_words():
    config = parse(["--threads", "3", "--kv-cache-memory", "2MiB", "--model-plugin", "x", "--seed", "7"], {})
    engine = EngineConfig.of(config, end_token_ids=frozenset({5}))
    assert (engine.num_threads, engine.kv_cache_bytes, engine.model_plugins, engine.seed) == (3, 2 << 20, ("x",), 7)
    assert engine.end_token_ids == {5}
    assert all(getattr(engine, spec.name) == getattr(config, spec.name) for spec in dataclasses.fields(EngineOptions))


@pytest.mark.parametrize("word", ["--num-threads", "--kv-cache-bytes"])
def test_only_the_users_words_are_flags(word):
    with pytest.raises(ConfigError, match="unknown option"):
        parse([word, "1"], {})


def test_several_models_are_one_after_another_called_as_they_are_given_or_as_somebody_wants():
    config = parse(["--model", "a/b", "--model", "c", "--max-model-len", "99"], {})
    assert (config.model, config.models, config.served_names) == ("a/b", ("a/b", "c"), ("a/b",))
    assert [(each.model, each.served_names, each.max_model_len) for each in config.each_model()] == [
        ("a/b", ("a/b",), 99), ("c", ("c",), 99),
    ]  # fmt: skip
    named = parse(["--model", "a/b", "--model", "c", "--served-model-name", "x", "y"], {})
    assert [each.served_names for each in named.each_model()] == [("x",), ("y",)]
    assert [parse([], {"ONELOOP_MODEL": "m"}).model, from_keywords({"model": "m"}).model] == ["m", "m"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--model", "a", "--model", "a"], "two models have the name a"),
        (["--model", "a", "--model", "b", "--served-model-name", "x"], "2 --model and 1 --served-model-name"),
        (["--model", "a", "--model", "b", "--tokenizer", "t"], "--tokenizer applies to one model, but there are 2"),
        (["--model", "a", "--model", "b", "--enable-lora"], "--enable-lora applies to one model"),
        (["--model", "a", "--model", "b", "--max-loaded-models", "2"], "needs --kv-cache-memory"),
        (["--model", "a", "--model", "b", "--embedding-model", "b"], "is also a name of --model"),
        (["--max-loaded-models", "2"], "exceeds the number of --model"),
    ],
)
def test_what_contradicts_several_models_is_refused(flags, reason):
    with pytest.raises(ConfigError, match=reason):
        parse(flags, {})


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "add --pipeline-parallel-size"),
        (["-pp", "2", "-dp", "2"], "use the replicas of oneloop ray"),
        (["-pp", "2", "--embedding-model", "e"], "serve that model by a separate process"),
        (["-pp", "2", "--model", "a", "--model", "b"], "one model uses all hosts"),
        (["-pp", "2", "--sleep-after", "9"], "its stages cannot be unloaded"),
    ],
)
def test_what_contradicts_stages_in_processes_of_their_own_is_refused(flags, reason):
    with pytest.raises(ConfigError, match=reason):
        parse(["--distributed-executor-backend", "ray", *flags], {})


def test_what_is_answered_by_one_model_takes_no_several():
    config = parse(["--model", "a", "--model", "b"], {})
    with pytest.raises(ConfigError, match="a file of requests supports one model only"):
        config.of_one_model("a file of requests")
