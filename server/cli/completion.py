"""Command `oneloop completion bash|zsh|fish`: prints a shell script that completes commands, options and their values.

The script is generated from the option definitions. For options of sub-commands it completes names only."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from server.config.command_line import COMMANDS
from server.config.option import Flag, did_you_mean, flags
from server.config.server_options import ConfigError

SHELLS = ("bash", "zsh", "fish")
USAGE = (
    "usage: oneloop completion bash|zsh|fish\n\n"
    "Print a script that completes commands and options:\n"
    "  bash:  source <(oneloop completion bash)              in ~/.bashrc\n"
    "  zsh:   source <(oneloop completion zsh)               in ~/.zshrc, behind compinit\n"
    "  fish:  oneloop completion fish | source               in ~/.config/fish/config.fish\n"
)
_OWN = {
    "run": ("--system", "--file", "--url"),
    "chat": ("--system", "--file", "--url"),
    "complete": ("--url",),
    "batch": ("--resume",),
    "doctor": ("--json", "--verbose"),
    "models": ("--fit", "--json", "--verbose"),
    "pull": ("--revision",),
    "list": ("--json",),
    "show": ("--json",),
    "rm": ("--yes",),
    "ps": ("--json",),
    "stop": ("--all",),
    "launch": ("codex", "claude", "opencode", "aider", "openwebui", "--model", "--url", "--api-key", "--print"),
    "completion": SHELLS,
    "quantize": ("--scheme", "--calibrate", "--calibration-tokens", "--revision", "--json"),
    "ray": (
        "--replicas",
        "--min-replicas",
        "--max-replicas",
        "--target-ongoing-requests",
        "--gpus-per-replica",
        "--cpus-per-replica",
        "--ingress-replicas",
        "--ray-address",
    ),
    "lora": ("inspect", "--model", "--max-lora-rank", "--json"),
}
_NO_SERVER = (
    "pull",
    "list",
    "show",
    "rm",
    "bench",
    "models",
    "lora",
    "quantize",
    "doctor",
    "completion",
)  # which take none of the server's options


def main(argv: Sequence[str]) -> int:
    """Print the script and return the exit code. Raises ConfigError for an unknown shell."""
    if list(argv) in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if len(argv) != 1:
        print(USAGE, end="", file=sys.stderr)
        return 2
    (shell,) = argv
    if shell not in SHELLS:
        raise ConfigError(f"completion: {shell!r} is not one of {', '.join(SHELLS)}{did_you_mean(shell, SHELLS)}")
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](flags()), end="")
    return 0


def _bash(known: Sequence[Flag]) -> str:
    words = " ".join(name for flag in known for name in flag.names)
    values = "".join(
        f'    {"|".join(flag.names)}) COMPREPLY=($(compgen -W "{" ".join(flag.values)}" -- "$cur")); return;;\n'
        for flag in known
        if flag.values
    )
    files, folders, others = (
        "|".join(name for flag in known if flag.takes == takes and not flag.values for name in flag.names)
        for takes in ("file", "folder", "word")
    )
    own = "".join(f'    {command}) words="{" ".join(names)}";;\n' for command, names in _OWN.items())
    return f"""_oneloop() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}" words=""
  COMPREPLY=()
  case "$prev" in
{values}    {files}) COMPREPLY=($(compgen -f -- "$cur")); return;;
    {folders}) COMPREPLY=($(compgen -d -- "$cur")); return;;
    {others}) return;;
  esac
  if [[ $COMP_CWORD -eq 1 && "$cur" != -* ]]; then
    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)}" -- "$cur")); return
  fi
  case "$command" in
{own}  esac
  case "$command" in
    {"|".join(_NO_SERVER)}) ;;
    *) words="$words --help --version {words}";;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _oneloop oneloop
"""


def _zsh(known: Sequence[Flag]) -> str:
    lines = []
    for flag in known:
        for name in flag.names:
            spec = f"{name}[{_plain(flag.text)}]"
            if flag.takes is not None:
                action = {"file": "_files", "folder": "_files -/"}.get(flag.takes, " ")
                spec += f":value:{'(' + ' '.join(flag.values) + ')' if flag.values else action}"
            lines.append(f"    '*{spec}'")
    own = "".join(f"    {command}) args+=({' '.join(names)});;\n" for command, names in _OWN.items())
    specs = " \\\n".join(lines)
    return f"""#compdef oneloop
_oneloop() {{
  local -a args
  if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then
    compadd -- {" ".join(COMMANDS)}
    return
  fi
  case $words[2] in
{own}  esac
  (( $#args )) && compadd -- $args
  case $words[2] in
    {"|".join(_NO_SERVER)}) return;;
  esac
  _arguments -S \\
{specs} \\
    '*:file:_files'
}}
compdef _oneloop oneloop
"""


def _fish(known: Sequence[Flag]) -> str:
    lines = [f"complete -c oneloop -f -n __fish_use_subcommand -a '{' '.join(COMMANDS)}'"]
    for command, names in _OWN.items():
        seen = f"-n '__fish_seen_subcommand_from {command}'"
        lines += (
            f"complete -c oneloop {seen} -l {name[2:]}"
            if name.startswith("--")
            else f"complete -c oneloop -f {seen} -a {name}"
            for name in names
        )
    unless = f"-n 'not __fish_seen_subcommand_from {' '.join(_NO_SERVER)}'"
    for flag in known:
        for name in flag.names:
            line = f"complete -c oneloop {unless} -l {name[2:]} -d '{_plain(flag.text)}'"
            if flag.values:
                line += f" -x -a '{' '.join(flag.values)}'"
            elif flag.takes is not None:
                line += {"file": " -r -F", "folder": " -x -a '(__fish_complete_directories)'"}.get(flag.takes, " -x")
            lines.append(line)
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Return the first clause of `text`, without characters that are special to shells."""
    first = text.partition(";")[0].partition(" (default")[0]
    return "".join(char for char in first if char not in "'[]\\:$`\"")
