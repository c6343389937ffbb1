"""Entry point: `python -m server`, also installed as `oneloop`, and its sub-commands (`COMMANDS`).

It reads the options, opens the port, and only then imports heavy modules. Imports in functions keep `--help` fast."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.torch_import import defer_parts_of_torch
from server.config.command_line import command_of, overview
from server.config.parse import parse
from server.config.server_config import ServerConfig
from server.config.server_options import DEFAULT_HOST, ConfigError

if TYPE_CHECKING:
    from threading import Event

    from server.models.library import Report
    from server.models.lifecycle import Load

CLUSTER_LIMIT_S = 10.0  # for Ray's processes to end


def main() -> int:
    """Run the command in `sys.argv`. Return the exit code: 0 after a drain, 1 if serving fails, 2 for invalid options."""
    started_s = time.monotonic()
    defer_parts_of_torch()
    try:
        command, argv = command_of(sys.argv[1:])
        if command in _COMMANDS:
            return _COMMANDS[command](argv)
        config = parse(argv, os.environ)
        # Hundreds of modules that stay would be gone through again and again; `Process` turns it on once the model is there.
        gc.disable()
        try:
            check_early(config)
        except ConfigError as error:
            return refused(error, config)
        if config.dry_run:
            if config.embedding_model is not None or config.speech_model is not None:
                raise ConfigError("--dry-run supports one model only: leave out --embedding-model and --speech-model")
            from server.cli import dry_run
            from server.process.plan import dry_run as plan

            return dry_run.main(config, plan)
    except ConfigError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        try:
            config, sock = opened(config, stack)
        except OSError as error:
            where = f"{config.host}:{config.listen_port}" if config.uds is None else config.uds
            print(f"oneloop: cannot listen on {where}: {error.strerror or error}", file=sys.stderr)
            return 1
        except ConfigError as error:
            return refused(error, config)
        try:
            return serve(config, sock, started_s)
        except ConfigError as error:  # of what only shows when it is used, such as a folder
            return refused(error, config)


def refused(error: ConfigError, config: ServerConfig) -> int:
    """Report `error` in the format of --log-format. Return the exit code."""
    if config.log_format == "json":
        import logging

        from server.http import logs

        logs.begin(config.log_level, config.log_format)
        logging.getLogger("oneloop.process").error("%s", error)
    else:
        print(f"oneloop: {error}", file=sys.stderr)
    return 2


def opened(config: ServerConfig, stack: contextlib.ExitStack) -> tuple[ServerConfig, socket.socket]:
    """Return `config` and the listening socket. If a service manager passed a socket, `config` gets the address of that socket,
    which host checks and access rules use. Otherwise the socket is opened as `config` says. Raises OSError, ConfigError."""
    from server.process.listening import passed

    sock = passed(os.environ)
    if sock is None:
        return config, stack.enter_context(listening(config))
    stack.enter_context(sock)
    if config.uds is not None or config.port is not None or config.host != DEFAULT_HOST:
        raise ConfigError("the service manager has opened a socket already; leave out --host, --port and --uds")
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return dataclasses.replace(config, uds=name), sock
    return dataclasses.replace(config, host=name[0], port=name[1]), sock


def listening(config: ServerConfig) -> contextlib.AbstractContextManager[socket.socket]:
    """Context that opens the socket that `config` names. Raises OSError."""
    from server.process.listening import listen, listen_at

    return listen(config.host, config.listen_port) if config.uds is None else listen_at(Path(config.uds))


def check_early(config: ServerConfig) -> None:
    """Check the options as far as possible before importing the engine, which takes seconds. Raises ConfigError."""
    if config.device == "cuda":
        from runtime.platform.host import has_nvidia_driver

        if not has_nvidia_driver():
            raise ConfigError("--device cuda: no NVIDIA driver is installed (libcuda.so.1); use --device cpu")
    if config.distributed_executor_backend == "ray":
        from importlib.util import find_spec

        if find_spec("ray") is None:
            raise ConfigError("--distributed-executor-backend ray needs Ray: pip install 'oneloop[ray]'")
    from runtime.weights.names import check_name
    from runtime.weights.rules import WeightsError

    try:
        for model in (*config.models, *filter(None, (config.embedding_model, config.speech_model))):
            check_name(model)
    except WeightsError as error:
        raise ConfigError(str(error)) from None
    names = (config.tool_parser, config.reasoning_parser)
    sizes = (config.max_model_len, config.kv_cache_bytes, config.num_kv_blocks)
    try:
        if names != ("auto", "auto"):
            from server.models.chat_format import check_names

            check_names(*names)
        if config.pooler_config is not None:
            from server.models.pooling import PoolerConfig

            PoolerConfig.read(config.pooler_config)
        if config.lora_modules:
            from server.models.adapters import AdapterModule

            AdapterModule.all_of(config.lora_modules)
        if config.default_mm_loras is not None:
            from server.models.adapters import by_modality

            by_modality(config.default_mm_loras)
        if sizes != (None, None, None):
            from server.process.plan import check_sizes

            check_sizes(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None


# --- other commands, which use parts of the engine -----------------------------------------------------------------


def _in_cli(name: str, function: str = "main") -> Callable[[list[str]], int]:
    """Return the command implemented by `function` of the file `name` in `server/cli`, for commands that do not use the engine."""

    def run(argv: list[str]) -> int:
        code: int = getattr(import_module(f"{__package__}.cli.{name}"), function)(argv)
        return code

    return run


def bench(argv: list[str]) -> int:
    """Run a load test. Return the exit code."""
    from loadtests.__main__ import main as run

    return run(argv, prog="oneloop bench")


def _at_terminal(function: str) -> Callable[[list[str]], int]:
    """Return the command implemented by `function` of `server/cli/chat.py`. The command checks options as a server start does."""

    def run(argv: list[str]) -> int:
        code: int = getattr(import_module(f"{__package__}.cli.chat"), function)(argv, check_early)
        return code

    return run


def on_ray(argv: list[str]) -> int:
    """Serve on Ray. Return the exit code. Raises ConfigError."""
    from server.ray import command

    return command.main(argv, check_early)


def list_models(argv: list[str]) -> int:
    """Print the models that can be served by name, and the architectures. Return the exit code."""
    from server.cli import models

    def found() -> Any:
        from runtime.doctor.models import models as found

        return found()

    def fits() -> Any:
        from runtime.doctor.findings import fits

        return fits()

    return models.main(argv, found, fits)


class _Library:
    """Implementation of `server.models.library.Library`: the models on this disk."""

    def pull(self, name: str, revision: str | None, report: Report, cancel: Event) -> Path:
        from runtime.weights import library

        with _weights_errors():
            return library.pull(name, revision, report, cancel)

    def kept(self) -> list[dict[str, Any]]:
        from runtime.weights import library

        return [
            {
                "name": each.name, "bytes": each.num_bytes, "path": str(each.path), "modified": each.modified,
                "whole": each.is_whole,
            }
            for each in library.kept()
        ]  # fmt: skip

    def describe(self, name: str) -> dict[str, Any]:
        from runtime.doctor import models

        with _weights_errors():
            return models.describe(name)

    def remove(self, name: str) -> dict[str, Any]:
        from runtime.weights import library

        with _weights_errors():
            gone = library.remove(name)
        return {"name": gone.name, "bytes": gone.num_bytes}


@contextlib.contextmanager
def _weights_errors() -> Iterator[None]:
    """Context in which errors about a model's files become ValueErrors, which commands report."""
    from runtime.weights.rules import WeightsError

    try:
        yield
    except (WeightsError, OSError) as error:
        raise ValueError(str(error)) from error


def _of_library(function: str) -> Callable[[list[str]], int]:
    """Return the command implemented by `function` of `server/cli/library.py`."""

    def run(argv: list[str]) -> int:
        code: int = getattr(import_module(f"{__package__}.cli.library"), function)(argv, _Library())
        return code

    return run


def examine(argv: list[str]) -> int:
    """Check the hardware and dependencies of this machine. Return the exit code."""
    from server.cli import doctor

    def findings() -> Any:
        from runtime.doctor.findings import findings as found

        return found()

    return doctor.main(argv, findings)


def inspect_adapter(argv: list[str]) -> int:
    """Print the contents of an adapter's folder. Return the exit code. Raises ConfigError."""
    from server.cli import lora

    def inspect(folder: str, model: str | None, max_rank: int) -> dict[str, Any]:
        from runtime.lora.inspect import inspect
        from runtime.weights.rules import WeightsError

        try:
            return inspect(folder, model, max_rank)
        except WeightsError as error:
            raise ValueError(str(error)) from error

    return lora.main(argv, inspect)


def quantise(argv: list[str]) -> int:
    """Write a quantised model. Return the exit code. Raises ConfigError."""
    from server.cli import quantize
    from server.process.terminal import StartupDisplay

    def run(job: quantize.QuantizeJob, display: StartupDisplay) -> dict[str, Any]:
        from runtime.weights.fetch import resolve
        from runtime.weights.rules import WeightsError
        from server.models.tokenizer import Tokenizer
        from server.text.gguf import TokenizerError

        try:
            files = resolve(job.model, job.revision, display.report)
            gguf = files.gguf
            made = Tokenizer.from_folder(files.tokenizer_path) if gguf is None else Tokenizer.from_gguf(gguf.metadata)
            pieces = job.pieces(made, files.config.get("max_position_embeddings") or 512)
            from runtime.quantize.model import quantize as write  # imports torch, which takes seconds

            done = write(files, job.out, job.scheme, pieces, display.report)
            if gguf is not None:
                quantize.write_tokenizer(made, job.out)
        except (WeightsError, TokenizerError, OSError) as error:
            raise ValueError(str(error)) from error
        return done.facts

    return quantize.main(argv, run)


def print_help(argv: list[str]) -> int:
    """Print the list of commands. Return the exit code."""
    print(overview())
    return 0


_COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "batch": _in_cli("batch"), "transcribe": _in_cli("transcribe"),
    "run": _at_terminal("run"), "chat": _at_terminal("main"), "complete": _at_terminal("complete"),
    "completion": _in_cli("completion"), "health": _in_cli("health"), "bench": bench, "models": list_models,
    "lora": inspect_adapter, "quantize": quantise, "ray": on_ray, "doctor": examine, "help": print_help,
    "ps": _in_cli("servers", "ps"), "stop": _in_cli("servers", "stop"), "launch": _in_cli("launch"),
    "pull": _of_library("pull"), "list": _of_library("list_kept"), "show": _of_library("show"), "rm": _of_library("remove"),
}  # fmt: skip


# --- serving ------------------------------------------------------------------------------------------------------


def serve(config: ServerConfig, sock: socket.socket, started_s: float) -> int:
    """Serve on `sock` until a signal arrives. Return the exit code. `started_s`: `time.monotonic()` at the start of the process."""
    if config.device in ("auto", "cuda"):
        from runtime.preload import preload_device

        preload_device()

    import asyncio

    import uvloop

    from server.http import logs
    from server.process.ending import leave_within
    from server.process.load import load
    from server.process.serve import Process

    logs.begin(config.log_level, config.log_format)
    loading: Load = load
    with contextlib.ExitStack() as cluster:
        if config.distributed_executor_backend == "ray":
            from server.ray.stages import StageCluster  # ray, which is an extra

            loading = cluster.enter_context(StageCluster(config)).load
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            process = Process(config, sock, loading, started_s, library=_Library())
            code = runner.run(process.run())
            if config.distributed_executor_backend == "ray":
                leave_within(CLUSTER_LIMIT_S, code)
                cluster.close()  # or agents of a cluster that is ours outlive this process by a minute
            process.end(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
