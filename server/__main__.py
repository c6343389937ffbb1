"""The composition root: `python -m server`, also installed as `oneloop`, and its sub-commands `batch`
and `models`.

Reads the options, opens the port, and only then imports what is heavy. `load` is the one place where the server meets the
engine and the model's files; everywhere else it knows `runtime.api` alone. Imports inside functions are the point here:
`--help` and a typing error must not wait for them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from server.config import ConfigError, ServerConfig, log_level, parse

if TYPE_CHECKING:
    from runtime.config import EngineConfig
    from runtime.weights.fetch import ModelFiles
    from server.chat_format import ChatFormat
    from server.lifecycle import Served
    from server.process import Report
    from server.prompt import ChatTemplate
    from server.tokenizer import Tokenizer


logger = logging.getLogger("oneloop.load")


def main() -> int:
    """The exit code: 0 after a drain, 1 where nothing can be served, 2 for options that cannot be honoured."""
    started_s = time.monotonic()
    if sys.argv[1:2] == ["batch"]:
        from server import batch

        return batch.main(sys.argv[2:], load)
    if sys.argv[1:2] == ["models"]:
        return list_models(sys.argv[2:])
    try:
        config = parse(sys.argv[1:], os.environ)
    except ConfigError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 2
    try:
        sock = listen(config.host, config.port)
    except OSError as error:
        print(f"oneloop: cannot listen on {config.host}:{config.port}: {error.strerror}", file=sys.stderr)
        return 1
    with sock:
        return serve(config, sock, started_s)


def list_models(argv: list[str]) -> int:
    """Print the architectures that can be served, our own first; the exit code."""
    if argv:
        print(
            "usage: python -m server models\n\nList the architectures, as config.json names them, and what computes each."
        )
        return 0 if argv[0] in ("-h", "--help") else 2
    from runtime.models.implementation import supported

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    others = False
    for architecture, by in supported():
        others = others or by != "native"
        print(f"{architecture:40} {by}")
    if others:
        print(
            "What else transformers builds is tried when it is asked for. A config may still ask for what is not served: that "
            "is said when the model is loaded."
        )
    else:
        print("pip install 'oneloop[transformers]' for more, through the transformers package.")
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: clients may connect from now on, and are answered once there is somebody to do so.

    Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError:
        sock.close()
        raise
    return sock


def serve(config: ServerConfig, sock: socket.socket, started_s: float) -> int:
    """Serves on `sock` until a signal; the exit code. `started_s`: `time.monotonic()` when the process began."""
    import asyncio

    import uvloop

    from server.process import Process

    logging.basicConfig(format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", level=log_level(config))
    logging.getLogger("uvicorn.error").setLevel(max(log_level(config), logging.WARNING))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Process(config, sock, load, started_s).run())


async def load(config: ServerConfig, report: Report, cancel: Event) -> Served:
    """Files, tokenizer, engine. `cancel`, once set, ends a download.

    Raises LoadError."""
    import asyncio

    await asyncio.to_thread(import_engine)
    from runtime.config import PlanError
    from runtime.start import start_engine
    from runtime.weights.fetch import resolve
    from runtime.weights.rules import WeightsError
    from server.lifecycle import Served
    from server.process import LoadError
    from server.prompt import PromptError
    from server.sampling import SamplingDefaults
    from server.structured.compiler import Grammars
    from server.tokenizer import TokenizerError

    fetch = partial(resolve, progress=report, cancel=cancel)
    try:
        files = await asyncio.to_thread(fetch, config.model, config.revision, load_format=config.load_format)
        # The tokenizer first: it takes a fraction of a second, and an engine is not easily called back.
        tokenizer, template, chat_format = await asyncio.to_thread(load_text, config, files, fetch, report)
        # Beside the engine, which leaves the interpreter alone most of the time.
        ends = files.eos_token_ids | tokenizer.eos_token_ids | chat_format.stop_ids
        grammars = Grammars(tokenizer, ends)
        warming = asyncio.create_task(asyncio.to_thread(grammars.warm))
        engine = await start_engine(engine_config(config, tokenizer, chat_format), files, report)
        await warming
    except (WeightsError, TokenizerError, PromptError, PlanError) as error:
        raise LoadError(str(error)) from error
    if tokenizer.vocab_size > engine.model.vocab_size:
        await engine.close()
        raise LoadError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model only {engine.model.vocab_size}: "
            "they do not belong together"
        )
    wishes = files.generation_config if config.generation_config == "auto" else {}
    defaults = SamplingDefaults.from_generation_config(wishes)
    return Served(engine, tokenizer, template, defaults, config.served_names, chat_format, warm_grammars=grammars)


def import_engine() -> None:
    """In a thread: from then on importing its names costs the event loop nothing."""
    import runtime.start  # noqa: F401


def load_text(
    config: ServerConfig, files: ModelFiles, fetch: partial[ModelFiles], report: Report
) -> tuple[Tokenizer, ChatTemplate, ChatFormat]:
    """What turns text into ids and back, --tokenizer's or the model's own, with --chat-template's or the tokenizer's; and
    how the answers are read.

    Raises WeightsError, TokenizerError, PromptError, or LoadError for a parser there is not."""
    from runtime.api import LoadProgress
    from server.chat_format import ChatFormat
    from server.process import LoadError
    from server.prompt import ChatTemplate, PromptError
    from server.tokenizer import Tokenizer

    chosen = config.tokenizer
    if chosen is not None and Path(chosen).is_dir():
        tokenizer = Tokenizer.from_folder(chosen)
    else:
        source = files if chosen is None else fetch(chosen, None, load_format="dummy")
        report(LoadProgress("tokenizer"))
        gguf = source.gguf
        tokenizer = Tokenizer.from_folder(source.tokenizer_path) if gguf is None else Tokenizer.from_gguf(gguf.metadata)
    template = tokenizer.chat_template
    if config.chat_template is not None:
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"--chat-template {config.chat_template} cannot be read: {error}") from error
    compiled = ChatTemplate(template, tokenizer.named_tokens)
    try:
        chat_format = ChatFormat.choose(
            template, compiled, tokenizer, tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser
        )
    except ValueError as error:
        raise LoadError(str(error)) from error
    if compiled:
        logger.info("chats: %s", chat_format)
    return tokenizer, compiled, chat_format


def engine_config(config: ServerConfig, tokenizer: Tokenizer, chat_format: ChatFormat) -> EngineConfig:
    from runtime.config import EngineConfig

    return EngineConfig(
        device=config.device,
        dtype=config.dtype,
        quantization=config.quantization,
        load_format=config.load_format,
        model_impl=config.model_impl,
        model_plugins=config.model_plugin,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_mixed_tokens=config.max_num_mixed_tokens,
        kv_cache_bytes=config.kv_cache_memory,
        num_kv_blocks=config.num_kv_blocks,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_dtype=config.kv_cache_dtype,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        steps_in_flight=config.steps_in_flight,
        num_threads=config.threads,
        max_queue=config.max_queue,
        kernels=config.kernels,
        attention_backend=config.attention_backend,
        enforce_eager=config.enforce_eager,
        seed=config.seed,
        # A GGUF file names one end token; what its vocabulary marks as the end of a turn ends an answer too.
        # So does what begins somebody else's turn.
        end_token_ids=tokenizer.eos_token_ids | chat_format.stop_ids,
    )


if __name__ == "__main__":
    sys.exit(main())
