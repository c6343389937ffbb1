"""Command `oneloop quantize MODEL OUT --scheme w4a16|fp8|w8a8`: write a quantised model as a compressed-tensors folder. With
--calibrate FILE, GPTQ rounds the matrices using activations of that text, which 4-bit weights need."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.config.command_line import CommandParser
from server.config.server_options import ConfigError
from server.models.tokenizer import Tokenizer
from server.process.terminal import StartupDisplay, size_of

SCHEMES = ("w4a16", "fp8", "w8a8")
_TEXT_TOKENS = 512  # of a piece of the text, which the model reads by itself


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """Arguments of a quantisation. `text`: calibration text, or None."""

    model: str
    revision: str | None
    out: Path
    scheme: str
    text: str | None
    max_tokens: int

    def pieces(self, tokenizer: Tokenizer, max_model_len: int) -> list[list[int]]:
        """Return the token ids of the calibration text in pieces of at most `max_model_len` tokens. Only the first `max_tokens`
        tokens of the text are used."""
        if self.text is None:
            return []
        ids = tokenizer.encode(self.text)[: self.max_tokens]
        size = min(_TEXT_TOKENS, max_model_len)
        return [ids[begin : begin + size] for begin in range(0, len(ids), size)]


Run = Callable[[QuantizeJob, StartupDisplay], Mapping[str, Any]]


def main(argv: Sequence[str], run: Run) -> int:
    """Quantise the model. Return the exit code: 0, or 1 if the model cannot be read or the folder cannot be written. Raises
    ConfigError for unknown options. `run`: does the work; raises ValueError."""
    args = _parser().parse_args(argv)
    text = None
    if args.calibrate is not None:
        try:
            text = Path(args.calibrate).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--calibrate {args.calibrate} cannot be read: {error}") from None
        if not text.strip():
            raise ConfigError(f"--calibrate {args.calibrate} is empty")
    if args.calibration_tokens < 1:
        raise ConfigError("--calibration-tokens must be at least 1")
    job = QuantizeJob(args.model, args.revision, Path(args.out), args.scheme, text, args.calibration_tokens)
    display = StartupDisplay(sys.stderr)
    try:
        found = run(job, display)
    except ValueError as error:
        display.finish()
        print(f"oneloop quantize: {error}", file=sys.stderr)
        return 1
    display.finish()
    print(json.dumps(found) if args.json else report(job, found))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(prog="oneloop quantize", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, .gguf file, hub id or built-in alias")
    add("out", metavar="OUT", help="output folder; must not exist")
    add(
        "--scheme",
        choices=SCHEMES,
        required=True,
        help="w4a16: four bits in groups of 128 columns; fp8: E4M3, one scale per row; w8a8: int8, one scale per row",
    )
    add("--calibrate", metavar="FILE", help="text file for calibration: rounding minimises the error on it")
    add(
        "--calibration-tokens",
        type=int,
        default=32768,
        metavar="N",
        help="maximum tokens of the calibration text (default: 32768)",
    )
    add("--revision", metavar="REV", help="branch, tag or commit on the hub")
    add("--json", action=argparse.BooleanOptionalAction, default=False, help="print JSON")
    return parser


def report(job: QuantizeJob, found: Mapping[str, Any]) -> str:
    before, after = found["bytes_before"], found["bytes_after"]
    lines = [
        f"{job.out}: {size_of(after)}, of {size_of(before)} in 16 and 32 bits; {found['num_quantised']} matrices in {job.scheme}"
        + (f", {found['num_calibrated']} of them calibrated" if found["num_calibrated"] else ""),
    ]
    if not found["num_calibrated"]:  # by a text more is lost of numbers, and less of what they give
        lines.append(f"  mean relative rounding error of a matrix: {found['mean_loss']:.1%}")
    others = [name for name in found["left"] if name != "lm_head"]
    if others:
        lines.append(
            f"  not quantised: {', '.join(others[:6])}" + (f" and {len(others) - 6} more" if others[6:] else "")
        )
    lines.append(f"  serve it: oneloop serve {job.out}")
    return "\n".join(lines)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of `tokenizer` into `folder`. Used if the model is a single file. Raises OSError."""
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.named_tokens}
    match tokenizer.chat_template:
        case str(template):
            config["chat_template"] = template
        case Mapping() as templates:
            config["chat_template"] = [{"name": name, "template": each} for name, each in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
