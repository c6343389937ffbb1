"""`tiers`: our server for real, on a CPU, with a small KV cache; what is read from its metrics."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from loadtests.__main__ import main
from loadtests.address import Address
from loadtests.tiers import transfers
from tests.loadtests.test_commands import last_json
from tests.loadtests.test_engine import TINY

METRICS = """# TYPE oneloop:kv_offload_total_bytes counter
oneloop:kv_offload_total_bytes_total{model_name="m",transfer_type="CPU_to_GPU"} 4096.0
oneloop:kv_offload_total_bytes_total{model_name="m",transfer_type="GPU_to_CPU"} 1e+06
oneloop:kv_offload_total_time_total{model_name="m",transfer_type="GPU_to_CPU"} 0.5
oneloop:kv_offload_used_bytes{model_name="m",tier="host"} 7.0
"""


@pytest.fixture
def options(tmp_path) -> list[str]:
    shape = tmp_path / "tiny"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 2048}))
    sizes = {"--prompt-tokens": 128, "--pool-tokens": 1200, "--rounds": 1, "--conversations": 3, "--turns": 2}
    sizes |= {"--words": 9, "--output-tokens": 2, "--host-bytes": "4MiB", "--vocab-size": 259}
    given = [str(each) for pair in sizes.items() for each in pair]
    return ["tiers", "--model-shape", str(shape), "--logs", str(tmp_path / "logs"), *given]


@pytest.mark.nightly
def test_one_command_measures_each_tier(options, capsys):
    main([*options, "--", "--device", "cpu", "--dtype", "float32", "--threads", "1"])  # may compute: reading is as slow
    _, record = last_json(capsys)
    assert record["failure"] is None
    figures = record["figures"]
    assert {f"ttft_ms.{source}" for source in ("computed", "device", "host", "disk")} <= figures.keys()
    assert {"gb_per_s.GPU_to_CPU", "gb_per_s.CPU_to_disk", "gb_per_s.plain_copies_to_host"} <= figures.keys()
    for name in ("plain", "host"):
        assert figures[f"conversations.{name}.out_tok_per_s"] > 0
    assert [run["ok"] for run in record["runs"]] == [6, 6]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--pool-tokens", "1151"], "must be at least --prompt-tokens"),
        (["--rounds", "0"], "must be at least 1"),
        (["--vocab-size", "258"], "vocabulary size 258"),
        (["--model-shape", "/no/such"], "no config.json"),
    ],
)
def test_tiers_refuses_before_it_starts_anything(options, args, reason, capsys):
    assert main([*options, *args]) == 2
    assert reason in capsys.readouterr().err


def test_copies_are_read_by_direction():
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        Thread(target=server.serve_forever).start()
        try:
            address = Address.parse(f"http://127.0.0.1:{server.server_address[1]}")
            assert transfers(address) == {"CPU_to_GPU": (4096.0, 0.0), "GPU_to_CPU": (1e6, 0.5)}
        finally:
            server.shutdown()
