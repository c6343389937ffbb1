"""The TOML file of servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests import servers
from loadtests.address import AddressRefused
from loadtests.servers import BadServersFile, read_servers

EXAMPLE = Path(servers.__file__).parent / "servers.example.toml"
NAMES = ("GGUF_Q4", "GGUF_BF16", "HF_FP32", "LLAMA_SERVER", "LCP_PY", "VLLM_PY", "HF_CLI")
ENVIRONMENT = {name: f"/at/{name}" for name in NAMES}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "servers.toml"
    path.write_text(text)
    return path


def test_the_example_is_whole_given_its_environment():
    found = {server.name: server for server in read_servers(EXAMPLE, environment=ENVIRONMENT)}
    llama_cpp = ["llama.cpp Q4_1", "llama.cpp bf16", "llama-cpp-python Q4_1"]
    assert list(found) == ["oneloop", *llama_cpp, "vLLM-CPU fp32", "transformers fp32"]
    assert found["oneloop"].command[0] == "python"
    assert found["llama.cpp Q4_1"].command[:3] == ["/at/LLAMA_SERVER", "-m", "/at/GGUF_Q4"]
    assert found["transformers fp32"].model == "/at/HF_FP32"
    assert len({server.port for server in found.values()}) == 6
    for server in found.values():
        assert str(server.port) in server.command


def test_only_the_servers_asked_for_need_their_variables():
    assert [server.name for server in read_servers(EXAMPLE, ["oneloop"], {})] == ["oneloop"]
    with pytest.raises(BadServersFile, match="LLAMA_SERVER is not set"):
        read_servers(EXAMPLE, ["llama.cpp Q4_1"], {})


def test_variables_are_expanded_everywhere_and_may_have_a_default(tmp_path):
    path = written(
        tmp_path,
        '[[server]]\nname="a"\nport=1\ncommand="${X} --y \'${Y:-two words}\'"\n'
        'env={A="${X}/b"}\nextra_body={k=["${X}", 1]}',
    )
    [server] = read_servers(path, environment={"X": "run"})
    assert (server.command, server.env, server.extra_body) == (
        ["run", "--y", "two words"],
        {"A": "run/b"},
        {"k": ["run", 1]},
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no \\[\\[server"),
        ("[[server", "servers.toml"),
        ("[[server]]\nport=1", "needs a name"),
        ('[[server]]\nname="a"\nport=1\n[[server]]\nname="a"\nport=2', "same name"),
        ('[[server]]\nname="a"\nport=1\nprot=2', "unknown key prot"),
        ('[[server]]\nname="a"\nport="1"', "wrong type"),
        ('[[server]]\nname="a"\nport=true', "wrong type"),
        ('[[server]]\nname="a"', "either port or base_url"),
        ('[[server]]\nname="a"\nport=1\nbase_url="http://127.0.0.1:1"', "either port or base_url"),
        ('[[server]]\nname="a"\nport=1\nshare=0', "share"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, reason):
    with pytest.raises(BadServersFile, match=reason):
        read_servers(written(tmp_path, text))


def test_an_unknown_name_in_only_is_named(tmp_path):
    with pytest.raises(BadServersFile, match="no server b; there are a"):
        read_servers(written(tmp_path, '[[server]]\nname="a"\nport=1'), ["b"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadServersFile, match="No such file"):
        read_servers(tmp_path / "none.toml")


def test_a_server_elsewhere_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(AddressRefused):
        read_servers(written(tmp_path, '[[server]]\nname="a"\nbase_url="http://192.0.2.1:8000"'))


def test_a_server_may_take_some_workloads_only(tmp_path):
    [server] = read_servers(written(tmp_path, '[[server]]\nname="a"\nport=1\nworkloads=["c1"]'))
    assert server.takes("c1")
    assert not server.takes("c4")
