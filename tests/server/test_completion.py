"""Completion: what each shell offers, asked of the shell itself where it is here."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from server.cli import completion
from server.config.command_line import COMMANDS
from server.config.option import flags
from server.config.server_options import ConfigError


@pytest.fixture(params=completion.SHELLS)
def script(request, capsys) -> tuple[str, str]:
    assert completion.main([request.param]) == 0
    return request.param, capsys.readouterr().out


def run(shell: str, script: str, tmp_path, then: str) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(script)
    ended = subprocess.run([shell, "-c", f"source {path}\n{then}"], capture_output=True, text=True, check=True)
    assert not ended.stderr
    return ended.stdout.split()


def bash(tmp_path, script: str, *words: str) -> list[str]:
    quoted = " ".join(f"'{word}'" for word in words)
    then = f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _oneloop; echo "${{COMPREPLY[@]}}"'
    return run("bash", script, tmp_path, then)


def test_every_option_and_command_is_in_every_script(script):
    shell, text = script
    for flag in flags():
        for name in flag.names:
            assert (f"-l {name[2:]} " if shell == "fish" else name) in text
    assert " ".join(COMMANDS) in text


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ser"], ["serve"]), (["serve", "--enable-pre"], ["--enable-prefix-caching"]),
        (["--no-access"], ["--no-access-log"]), (["--dtype", "bf"], ["bfloat16"]),
        (["serve", "--log-format", ""], ["text", "json"]), (["completion", ""], list(completion.SHELLS)),
        (["doctor", "--"], ["--json", "--verbose"]), (["chat", "--ur"], ["--url"]), (["--port", ""], []),
    ],
)  # fmt: skip
def test_bash_offers_what_fits(tmp_path, capsys, words, offered):
    completion.main(["bash"])
    assert bash(tmp_path, capsys.readouterr().out, "oneloop", *words) == offered


def test_fish_offers_what_fits(tmp_path, capsys):
    completion.main(["fish"])
    script = capsys.readouterr().out
    assert "bfloat16" in run("fish", script, tmp_path, 'complete -C "oneloop serve --dtype bf"')
    assert run("fish", script, tmp_path, 'complete -C "oneloop completion "') == sorted(completion.SHELLS)


def test_zsh_reads_it(tmp_path, capsys):
    completion.main(["zsh"])
    script = "autoload -U compinit; compinit -u -D\n" + capsys.readouterr().out
    assert run("zsh", script, tmp_path, "echo $_comps[oneloop]") == ["_oneloop"]


def test_another_shell_is_refused_and_none_is_explained(capsys):
    with pytest.raises(ConfigError, match="did you mean zsh"):
        completion.main(["zish"])
    assert completion.main([]) == 2
    assert "source <(oneloop completion bash)" in capsys.readouterr().err
    assert completion.main(["--help"]) == 0
