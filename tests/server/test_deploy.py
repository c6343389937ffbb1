"""What `server/deploy/` and the Dockerfile say of the server is so: options, variables, routes, folders, times; and the tools that
they are for take them, where those are installed."""

from __future__ import annotations

import configparser
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.api.routes import ROUTES
from server.config.command_line import COMMANDS, command_of
from server.config.parse import parse
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError
from server.http.auth import needs_admin

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "server" / "deploy"
KUBERNETES = ("kubernetes.yaml", "kubernetes-sidecar.yaml")
IMAGE = {"ONELOOP_HOST": "0.0.0.0"}  # what the Dockerfile sets; a test below holds that


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def pods(name: str) -> Iterator[dict[str, Any]]:
    for document in documents(name):
        if document["kind"] == "Deployment":
            yield document["spec"]["template"]["spec"]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    found = [each for each in (*pod.get("initContainers", ()), *pod["containers"]) if each["name"] == "oneloop"]
    assert len(found) == 1
    return found[0]


def unit(name: str) -> dict[str, dict[str, list[str]]]:
    """Sections, keys, values in order: a key may come several times."""

    class Several(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            if isinstance(value, list) and isinstance(self.get(key), list):
                self[key].extend(value)
            else:
                super().__setitem__(key, value)

    parser = configparser.RawConfigParser(dict_type=Several, strict=False, comment_prefixes=("#",), delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / name).read_text())
    return {section: {key: value.split("\n") for key, value in parser.items(section)} for section in parser.sections()}


def variables(entry: dict[str, Any]) -> dict[str, str]:
    """Of a container of Kubernetes; a secret is some text."""
    return {each["name"]: each.get("value", f"secret-of-{each['name']}") for each in entry.get("env", ())}


def started(words: list[str], environ: dict[str, str]) -> ServerConfig:
    """What the server reads of a command line and variables. Raises ConfigError."""
    command, options = command_of(words)
    assert command == "serve"
    return parse(options, environ)


def commands() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Every command line that starts a server, with the variables there."""
    services = documents("compose.yaml")[0]["services"]
    for name, service in services.items():
        yield f"compose.yaml {name}", service["command"], IMAGE
    for name in KUBERNETES:
        for pod in pods(name):
            entry = container(pod)
            yield name, entry["args"], IMAGE | variables(entry)
    service = unit("oneloop.service")["Service"]
    program, *words = shlex.split(service["ExecStart"][0])
    assert program.endswith("/oneloop")
    yield "oneloop.service", words, {}


@pytest.mark.parametrize(("name", "words", "environ"), [pytest.param(*each, id=each[0]) for each in commands()])
def test_the_server_takes_every_command_line(name, words, environ, tmp_path):
    if "ONELOOP_UDS" in environ:  # whose folder is the pod's
        environ = environ | {"ONELOOP_UDS": str(tmp_path / "api.sock")}
    config = started(words, environ)
    assert config.drain_timeout == 30.0
    assert config.host == ("127.0.0.1" if config.uds or name == "oneloop.service" else "0.0.0.0")


def options() -> set[str]:
    found = set()
    for spec in dataclasses.fields(ServerConfig):
        name = (spec.metadata["name"] or spec.name).replace("_", "-")
        found |= {f"--{name}", f"--no-{name}", *spec.metadata["aliases"]}
    return found


OF_OTHERS = {
    "--build", "--config", "--from-literal", "--now", "--profile", "--providers", "--unix-socket",
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.*")), ids=lambda path: path.name)
def test_routes_variables_and_options_that_a_file_names_are_there(path):
    text = path.read_text()
    paths = set(re.findall(r"(?<![\w./])/(?:health|v1|metrics|dashboard|ping|invocations)\b[\w/]*", text))
    assert paths <= {route.path for route in ROUTES}
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - OF_OTHERS
    variables = set(re.findall(r"\bONELOOP_[A-Z_]+\b(?!=tcp)", text))
    assert flags | {"--" + name.removeprefix("ONELOOP_").lower().replace("_", "-") for name in variables} <= options()


def test_prometheus_scrapes_the_service_with_the_key_that_the_server_has():
    [monitor] = documents("kubernetes-servicemonitor.yaml")
    [service] = [each for each in documents("kubernetes.yaml") if each["kind"] == "Service"]
    [pod] = pods("kubernetes.yaml")
    [endpoint] = monitor["spec"]["endpoints"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    [admin_key] = [each for each in container(pod)["env"] if each["name"] == "ONELOOP_ADMIN_API_KEY"]
    assert needs_admin(endpoint["path"], user_key=True, admin_key=True)
    assert endpoint["authorization"] == {"credentials": admin_key["valueFrom"]["secretKeyRef"]}


@pytest.mark.parametrize("name", KUBERNETES)
def test_no_annotation_asks_to_be_scraped_where_metrics_need_a_key(name):
    """What reads such annotations has no key."""
    has_key = any("ONELOOP_ADMIN_API_KEY" in variables(container(pod)) for pod in pods(name))
    assert not (has_key and "prometheus.io/scrape:" in (DEPLOY / name).read_text())


@pytest.mark.parametrize("name", KUBERNETES)
def test_probes_ask_routes_that_answer_them_and_ports_that_there_are(name):
    for pod in pods(name):
        entry = container(pod)
        probes = {kind: entry[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
        asked = {}
        for kind, probe in probes.items():
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] in [port["name"] for port in entry["ports"]]
                asked[kind] = probe["httpGet"]["path"]
            else:
                program, command, what = probe["exec"]["command"]
                assert (program, command in COMMANDS) == ("oneloop", True)
                asked[kind] = f"/{command}/{what}"
        # A server that loads, or drains, is not ready, and is well: only its death is a reason to start another.
        assert asked == {"startup": "/health/ready", "liveness": "/health/live", "readiness": "/health/ready"}
        assert set(asked.values()) <= {route.path for route in ROUTES}


@pytest.mark.parametrize("name", KUBERNETES)
def test_there_is_time_for_the_drain_and_nobody_is_root(name):
    for pod in pods(name):
        entry = container(pod)
        drain_s = 30
        before = entry.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert pod["terminationGracePeriodSeconds"] >= drain_s + int(before[1]) + 15
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert {"memory"} <= entry["resources"]["limits"].keys()
        mounted = {mount["mountPath"] for mount in entry["volumeMounts"]}
        assert {"/cache", "/tmp"} <= mounted  # the rest cannot be written to
        assert entry["securityContext"]["readOnlyRootFilesystem"] is True
        volumes = {volume["name"] for volume in pod["volumes"]}
        for each in (*pod.get("initContainers", ()), *pod["containers"]):
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes


@pytest.mark.parametrize("name", KUBERNETES)
def test_services_select_the_pods_and_claims_are_made(name):
    parts = documents(name)
    labels = [part["spec"]["template"]["metadata"]["labels"] for part in parts if part["kind"] == "Deployment"]
    claims = {part["metadata"]["name"] for part in parts if part["kind"] == "PersistentVolumeClaim"}
    for part in parts:
        if part["kind"] == "Service":
            assert part["spec"]["selector"] in labels
    wanted = [volume["persistentVolumeClaim"]["claimName"] for pod in pods(name) for volume in pod["volumes"]
              if "persistentVolumeClaim" in volume]  # fmt: skip
    assert set(wanted) == claims


OF_A_SERVICE = {"ONELOOP_PORT": "tcp://10.0.0.1:8000", "ONELOOP_SERVICE_HOST": "10.0.0.1", "ONELOOP_SERVICE_PORT": "8000",
                "ONELOOP_SERVICE_PORT_HTTP": "8000", "ONELOOP_PORT_8000_TCP": "tcp://10.0.0.1:8000",
                "ONELOOP_PORT_8000_TCP_ADDR": "10.0.0.1"}  # fmt: skip


@pytest.mark.parametrize("variable", OF_A_SERVICE)
def test_variables_that_kubernetes_sets_for_a_service_are_told_apart_from_options(variable):
    with pytest.raises(ConfigError, match=f"^{variable} was set by Kubernetes.*enableServiceLinks"):
        parse([], {variable: OF_A_SERVICE[variable]})
    assert parse([], {"ONELOOP_PORT": "8001"}).port == 8001


@pytest.mark.parametrize("name", KUBERNETES)
def test_no_pod_gets_such_variables(name):
    assert [pod["enableServiceLinks"] for pod in pods(name)] == [False]


def test_the_sidecar_listens_where_its_application_asks():
    [pod] = pods("kubernetes-sidecar.yaml")
    entry, [app] = container(pod), pod["containers"]
    path = variables(entry)["ONELOOP_UDS"]
    assert path in " ".join(app["args"])
    folder = {mount["name"]: mount["mountPath"] for mount in entry["volumeMounts"]}
    assert {"name": "socket", "mountPath": folder["socket"]} in app["volumeMounts"]
    assert Path(path).parent == Path(folder["socket"])
    assert entry["restartPolicy"] == "Always"


# --- the image -------------------------------------------------------------------------------------------------------


def stages() -> list[list[str]]:
    """The instructions of each stage of the Dockerfile, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    instructions = [line for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines() if line]
    found: list[list[str]] = []
    for instruction in instructions:
        if instruction.startswith("FROM "):
            found.append([])
        found[-1].append(instruction)
    return found


def test_the_volume_is_a_folder_that_was_made_for_the_user_who_runs():
    """A VOLUME at a path that is not there yet is made by root, whom the user below cannot follow."""
    last = stages()[-1]
    position = {word: next(index for index, line in enumerate(last) if line.startswith(word)) for word in
                ("USER", "VOLUME", "ENV", "ENTRYPOINT")}  # fmt: skip
    volume = last[position["VOLUME"]].split()[1]
    made = next(index for index, line in enumerate(last) if f"install -d -o oneloop -g oneloop {volume}" in line)
    assert made < position["USER"] < position["VOLUME"]
    uid = last[position["USER"]].split()[1]
    assert f"useradd --uid {uid} " in last[made]
    kept = dict(word.split("=", 1) for word in last[position["ENV"]].split()[1:])
    assert all(kept[name].startswith(volume) for name in ("XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR"))
    assert {name: value for name, value in kept.items() if name.startswith("ONELOOP_")} == IMAGE
    for pod in (pod for name in KUBERNETES for pod in pods(name)):
        assert str(pod["securityContext"]["runAsUser"]) == uid


def test_what_is_copied_into_the_image_is_there_and_the_program_is_installed():
    copied = [
        line.split()[1:] for stage in stages() for line in stage if line.startswith("COPY") and "--from" not in line
    ]
    ignored = (ROOT / ".dockerignore").read_text().split()
    for *sources, _ in copied:
        assert all((ROOT / source).exists() and source not in ignored for source in sources)
    assert not {
        "server",
        "runtime",
        "ops",
        "csrc",
        "loadtests",
        "oneloop.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    } & set(ignored)
    assert 'oneloop = "oneloop:main"' in (ROOT / "pyproject.toml").read_text()


def test_the_images_torch_is_the_one_that_the_package_asks_for():
    wanted = re.search(r'"(torch[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert wanted is not None
    assert f"'{wanted[1]}'" in (ROOT / "Dockerfile").read_text()


def test_the_image_has_what_its_routes_need():
    extras = re.search(r"pip install '/src\[([^]]+)\]'", (ROOT / "Dockerfile").read_text())
    assert extras is not None
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"batches", "media"} == set(extras[1].split(",")) <= set(declared)


# --- systemd ---------------------------------------------------------------------------------------------------------


def test_the_unit_keeps_what_the_server_writes_and_gives_it_time():
    service = unit("oneloop.service")["Service"]
    assert service["Type"] == ["notify"]
    assert int(service["TimeoutStopSec"][0]) >= 45
    assert "2" in service["RestartPreventExitStatus"]  # ending.EXIT_BAD_OPTIONS
    cached = dict(word.split("=", 1) for word in service["Environment"][0].split())
    assert set(cached) == {"XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR"}
    assert all(value.startswith(f"%C/{service['CacheDirectory'][0]}") for value in cached.values())
    # A socket that systemd opened is the place; --host or --port beside it would be refused.
    assert not re.search(r"--(host|port|uds)\b", service["ExecStart"][0])
    assert "Accept" not in unit("oneloop.socket")["Socket"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path):
    for name in ("oneloop.service", "oneloop.socket"):
        text = (DEPLOY / name).read_text().replace("/opt/oneloop/bin/oneloop", "/bin/true")
        (tmp_path / name).write_text(text)
    units = [str(tmp_path / name) for name in ("oneloop.service", "oneloop.socket")]
    checked = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True)
    complaints = [line for line in checked.stderr.splitlines() if str(tmp_path) in line or "oneloop." in line]
    assert not complaints


# --- proxies, and tools that may not be here ---------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_nginx_takes_its_configuration(tmp_path):
    text = (DEPLOY / "nginx.conf").read_text().replace("listen 443 ssl", "listen 127.0.0.1:8443")
    text = re.sub(r"^\s*ssl_certificate.*$", "", text, flags=re.MULTILINE)  # which are the user's
    places = " ".join(f"{each}_temp_path {tmp_path};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    main = f"pid {tmp_path}/pid; error_log stderr; events {{}} http {{ access_log off; {places} {text} }}"
    (tmp_path / "main.conf").write_text(main)
    checked = subprocess.run(["nginx", "-t", "-p", str(tmp_path), "-c", "main.conf"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.skipif(shutil.which("caddy") is None, reason="needs caddy")
def test_caddy_takes_its_configuration():
    command = ["caddy", "adapt", "--config", str(DEPLOY / "Caddyfile"), "--adapter", "caddyfile"]
    checked = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HOME": "/nonexistent"})
    assert checked.returncode == 0, checked.stderr
    assert "/health/ready" in checked.stdout


def test_traefiks_file_is_yaml_and_asks_the_right_server():
    [document] = documents("traefik.yaml")
    balancer = document["http"]["services"]["oneloop"]["loadBalancer"]
    assert balancer["healthCheck"]["path"] == "/health/ready"
    assert [server["url"] for server in balancer["servers"]] == ["http://127.0.0.1:8000"]
