"""Command `oneloop transcribe talk.mp3 --format srt`: converts audio files to text or subtitles.

The transcript of one file goes to standard output. Transcripts of several files, or of folders, are written next to the files,
or to --output-dir. Several files are transcribed at a time. An unreadable file fails alone. Imports follow option checks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from server.cli.batch import LISTENING
from server.config.command_line import CommandParser, add_options
from server.config.option import options_by_name
from server.config.parse import config_of
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError
from server.http import logs

if TYPE_CHECKING:
    from server.llm.llm import LLM
    from server.llm.speech import TranscriptionOutput

FORMATS = ("text", "srt", "vtt", "json")
SUFFIXES = frozenset(
    {".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".mp4", ".webm", ".aac", ".mkv", ".mov", ".avi"}
)
INTERRUPTED = 130

HELP = """usage: oneloop transcribe FILE… --model MODEL [options]

Transcribe audio files, or all audio files in folders. The model is a speech model, such as Whisper.

  --format FORMAT     text, srt, vtt or json (default: text)
  --output-dir DIR    folder for the transcripts (default: standard output for one file, otherwise next to the files)
  --language CODE     language of the speech, such as en (default: detected)
  --prompt TEXT       text whose names and style the transcript follows
  --translate         translate into English
  options             of model, engine and logging, as in oneloop --help

The exit code is 0 only if every file was transcribed.
"""


@dataclass(frozen=True, slots=True)
class TranscribeJob:
    """Arguments of a transcription. `folder`: folder of the transcripts; None writes as `HELP` describes."""

    files: Sequence[Path]
    format: str
    folder: Path | None
    language: str | None
    prompt: str | None
    translate: bool
    config: ServerConfig

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> TranscribeJob:
        """Parse the command's arguments. Raises ConfigError."""
        parser = CommandParser(
            prog="oneloop transcribe", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )
        parser.add_argument("paths", nargs="*")
        parser.add_argument("--format", choices=FORMATS, default="text")
        for name in ("--output-dir", "--language", "--prompt"):
            parser.add_argument(name, default=None)
        parser.add_argument("--translate", action="store_true", default=False)
        add_options(parser, options_by_name())
        given = parser.read(argv)
        paths = given.pop("paths", ())
        own = {name: given.pop(name, None) for name in ("format", "output_dir", "language", "prompt", "translate")}
        if not paths:
            raise ConfigError("the command is: oneloop transcribe FILE… --model MODEL [options]")
        for word in argv:
            if (flag := word.partition("=")[0]) in LISTENING:
                raise ConfigError(f"{flag} applies to oneloop serve only")
        files = [file for path in paths for file in _files(Path(path))]
        folder = Path(own["output_dir"]) if own["output_dir"] else None
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"--output-dir {folder}: no such folder")
        config = config_of(given, environ).of_one_model("audio")
        return cls(files, own["format"], folder, own["language"], own["prompt"], own["translate"], config)

    def written(self, file: Path, text: str) -> None:
        """Write `text`, the transcript of `file`. Raises OSError."""
        if self.folder is None and len(self.files) == 1:
            print(text.rstrip("\n"))
            return
        suffix = ".txt" if self.format == "text" else f".{self.format}"
        ((self.folder or file.parent) / (file.name + suffix)).write_text(text, encoding="utf-8")

    def shown(self, output: TranscriptionOutput) -> str:
        """Return the text of a transcript in the requested format."""
        if self.format == "json":
            from msgspec.json import encode, format

            body = {
                "text": output.text,
                "language": output.language,
                "duration": output.duration,
                "segments": output.segments,
            }
            return format(encode(body).decode(), indent=2) + "\n"
        return {"srt": output.srt, "vtt": output.vtt}.get(self.format, output.text + "\n")


def _files(path: Path) -> list[Path]:
    """Return `path` if it is a file, or the audio files in that folder, as a list. Raises ConfigError."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder")
    found = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    if not found:
        raise ConfigError(f"{path} has no audio files ({', '.join(sorted(SUFFIXES))})")
    return found


def main(argv: Sequence[str]) -> int:
    """Transcribe files. Return the exit code: 0 if every file was transcribed, 1 if not, 2 for invalid options."""
    if "--help" in argv or "-h" in argv:
        print(HELP, end="")
        return 0
    try:
        job = TranscribeJob.parse(argv, os.environ)
    except ConfigError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 2
    logs.begin(job.config.log_level, job.config.log_format)
    from server.llm.llm import LLM
    from server.models.lifecycle import LoadError

    try:
        with LLM.of(job.config) as llm:
            return run(job, llm)
    except (LoadError, ValueError, RuntimeError) as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("oneloop: interrupted", file=sys.stderr)
        return INTERRUPTED


def run(job: TranscribeJob, llm: LLM) -> int:
    """Transcribe the files of `job`. Return the exit code. Raises ValueError if the model or an option is unsuitable."""
    found = llm.transcribe(
        job.files,
        language=job.language,
        task="translate" if job.translate else "transcribe",
        prompt=job.prompt,
        timestamps=job.format != "text",
        return_exceptions=True,
        use_tqdm=None,
    )
    failed = 0
    for file, output in zip(job.files, found, strict=True):
        error: Exception | None = output if isinstance(output, ValueError) else None
        if not isinstance(output, ValueError):
            try:
                job.written(file, job.shown(output))
            except (ValueError, OSError) as reason:
                error = reason
        if error is not None:
            failed += 1
            print(f"oneloop: {file}: {error}", file=sys.stderr)
    return 1 if failed else 0
