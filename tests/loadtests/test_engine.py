"""The measuring itself: what is counted is what was defined. No figure's size is judged."""

from __future__ import annotations

import json

import pytest

from loadtests.engine.__main__ import main
from loadtests.engine.arguments import engine_config, parser
from loadtests.engine.breakdown import KernelRun, breakdown
from loadtests.engine.counted import spread
from loadtests.engine.workloads import MeasureError, throughput_workload
from runtime.api import HistogramData

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 256, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "vocab_size": 200,
    "tie_word_embeddings": True, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, list[dict[str, object]]]:
    """The exit code and the lines of a measurement; options of `argv` win over the small ones here."""
    small = ["--device", "cpu", "--prompt-tokens", "9", "--decode-tokens", "4", "--kv-cache-bytes", str(1 << 20)]
    code = main([*small, *map(str, argv)])
    lines = capsys.readouterr().out.splitlines()
    return code, [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.nightly
def test_every_figure_is_a_line_from_start_to_end(model, tmp_path, capsys):
    code, lines = run(
        capsys, "--model", model, "--batch", 1, 3, "--prefill", "2x20", "--ttft", 8, "--pool", "3x20",
        "--throughput", "--throughput-requests", 4,
        "--throughput-lengths", 3, 9, "--profile", tmp_path / "profile", "--profile-batch", 2,
    )  # fmt: skip
    assert code == 0
    assert [line["figure"] for line in lines] == [
        "start", "decode", "decode", "prefill", "pool", "ttft", "throughput", "end", "profile",
    ]  # fmt: skip
    start, one, three, prefill, pool, ttft, throughput, end, profile = lines
    assert {"import", "weights", "warm-up"} <= start["phases_s"].keys()
    assert (start["device"], start["max_num_seqs"], start["max_model_len"]) == ("cpu", 512, 256)
    assert sum(start["phases_s"].values()) <= start["start_engine_s"]
    assert (one["batch"], three["batch"], len(one["runs"]), len(ttft["runs"])) == (1, 3, 3, 10)
    assert sorted(prefill["runs"])[1] == prefill["tok_per_s"] > 0
    assert sorted(pool["runs"])[2] == pool["ms"]
    assert pool["tok_per_s"] == pytest.approx(60 / pool["ms"] * 1000)
    assert throughput["out_tokens"] == sum(throughput_workload(4, 3, 9, 200)[1])
    assert end["peak_rss_mib"] >= end["rss_mib"] > 0
    found = json.loads((tmp_path / "profile/decode-2.json").read_text())
    assert found["step_us"] == pytest.approx(found["busy_us"] + found["idle_us"])
    assert found["kernels"][0]["name"] in (tmp_path / "profile/decode-2.txt").read_text()
    assert profile["steps"] == found["steps"] > 0


def test_a_figure_that_cannot_be_taken_says_why_and_the_others_go_on(model, capsys):
    code, lines = run(capsys, "--model", model, "--max-num-seqs", 4, "--batch", 5, 2, "--prefill", "1x256", "--ttft", 8)
    assert code == 1
    errors = {line["figure"]: line["error"] for line in lines if "error" in line}
    assert errors == {
        "decode": "a batch of 5 is more than max-num-seqs 4",
        "prefill": "256 tokens and one are more than max-model-len 256",
    }
    assert [line["batch"] for line in lines if line["figure"] == "decode" and "ms" in line] == [2]


def test_a_batch_that_the_kv_cache_cannot_hold_at_a_time_is_no_figure(model, capsys):
    """A token is 256 bytes here, so there are 20 blocks of 16 tokens; a request of 104 tokens takes 7 of them."""
    code, lines = run(
        capsys, "--model", model, "--kv-cache-bytes", 20 * 16 * 256, "--prompt-tokens", 100, "--batch", 2, 4, "--profile", "/none",
        "--profile-batch", 4,
    )  # fmt: skip
    assert code == 1
    assert lines[0]["num_kv_blocks"] == 20
    fits, waits, profile = (line for line in lines if line["figure"] in ("decode", "profile"))
    assert fits["ms"] > 0
    assert "a batch of 4 did not decode together" in waits["error"]
    assert "error" in profile


def test_every_field_of_the_engine_s_configuration_is_an_option():
    given = vars(
        parser().parse_args(["--model", "m", "--enable-prefix-caching", "--dtype", "bfloat16", "--max-num-seqs", "7"])
    )
    config = engine_config(given, {"max_position_embeddings": 4096})
    assert (config.enable_prefix_caching, config.dtype, config.max_num_seqs) == (True, "bfloat16", 7)
    assert (config.max_model_len, config.load_format) == (4096, "dummy")
    untouched = engine_config(vars(parser().parse_args(["--model", "m"])), {"max_position_embeddings": 131_072})
    assert (untouched.enable_prefix_caching, untouched.max_model_len, untouched.max_num_seqs) == (False, 16_384, 512)


def test_the_throughput_workload_is_always_the_same():
    prompts, lengths = throughput_workload(256, 100, 1024, 151_936)
    assert (sum(map(len, prompts)), sum(lengths)) == (142_827, 133_966)
    assert {len(prompts), len(lengths)} == {256}
    assert all(0 <= token <= 10_000 for prompt in prompts for token in prompt)
    assert all(token < 50 for prompt in throughput_workload(3, 5, 9, 50)[0] for token in prompt)


def test_a_spread_is_of_what_came_between_two_readings():
    bounds = (0.001, 0.01)
    before, after = HistogramData(bounds, (10, 0, 0), 0.005), HistogramData(bounds, (100, 9, 1), 0.125)
    assert spread(before, after) == {
        "count": 100, "mean_s": pytest.approx(0.0012), "p50_s_at_most": 0.001, "p90_s_at_most": 0.001, "p99_s_at_most": 0.01,
    }  # fmt: skip
    assert spread(after, after) is None
    assert spread(None, after) is None


def step(at_us: float) -> list[KernelRun]:
    """60 us: 10 embedding, 5 idle, twice 20 of a layer that overlap by 10, 2 idle, 10 sampling, 3 idle."""
    return [
        KernelRun("embedding", at_us, 10), KernelRun("layer", at_us + 15, 20), KernelRun("layer", at_us + 25, 20),
        KernelRun("sample", at_us + 47, 10),
    ]  # fmt: skip


def test_a_breakdown_is_a_mean_over_whole_steps_whatever_stands_around_them():
    around = [KernelRun("copy", -5.0, 1.0), KernelRun("layer", 601.0, 20.0)]
    kernels = [kernel for index in range(10) for kernel in step(60.0 * index)] + around
    found = breakdown(kernels, num_steps=10)
    assert found["steps"] == 7  # ten marks, without the first two
    assert (found["step_us"], found["busy_us"], found["idle_us"], found["num_kernels"]) == (60, 50, 10, 4)
    assert found["kernels"] == [
        {"name": "layer", "count": 2, "us": 40, "share": pytest.approx(2 / 3)},
        {"name": "embedding", "count": 1, "us": 10, "share": pytest.approx(1 / 6)},
        {"name": "sample", "count": 1, "us": 10, "share": pytest.approx(1 / 6)},
    ]
    assert found["gaps"] == [
        {"after": "embedding", "before": "layer", "count": 1, "us": 5},
        {"after": "sample", "before": "embedding", "count": 1, "us": 3},
        {"after": "layer", "before": "sample", "count": 1, "us": 2},
    ]


def test_without_a_kernel_that_marks_a_step_everything_is_shared_among_them():
    found = breakdown([KernelRun("a", 10.0 * index, 5.0) for index in range(100)], num_steps=10)
    assert (found["steps"], found["num_kernels"], found["busy_us"]) == (10, 10, 50)


def test_a_profile_of_nothing_is_an_error():
    with pytest.raises(MeasureError, match="recorded no kernels"):
        breakdown([], 10)
