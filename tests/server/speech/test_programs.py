"""Transcripts for programs and at the command line: `LLM.transcribe` and `oneloop transcribe`, with a tiny random Whisper."""

from __future__ import annotations

import json

import pytest

from server.cli import transcribe
from server.llm.llm import LLM
from tests.server.speech.tiny import RATE, tone, wav
from tests.server.speech.whisper import written

OPTIONS = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    written(folder)
    return folder


def test_programs_give_files_bytes_and_samples(folder, tmp_path):
    sound = tone(2.0)
    path = tmp_path / "a.wav"
    path.write_bytes(wav(sound))
    wanted = {"language": "en", "temperature": 0.5, "use_tqdm": False}
    with LLM(str(folder), **OPTIONS) as llm:
        of_path, of_bytes, of_samples, of_pair = llm.transcribe(
            [path, path.read_bytes(), sound, (sound, RATE)], **wanted, timestamps=True
        )
        assert of_path.duration == of_bytes.duration == of_samples.duration == of_pair.duration == 2.0
        assert of_path.srt.startswith("1\n00:00:0")
        with pytest.raises(ValueError, match="audio 1: "):
            llm.transcribe([path, b"nothing"], **wanted)
        found = llm.transcribe([b"nothing", path], **wanted, return_exceptions=True)
        assert [isinstance(each, ValueError) for each in found] == [True, False]


def test_the_command_writes_files_and_fails_for_what_it_cannot_read(folder, tmp_path, capsys):
    (tmp_path / "a.wav").write_bytes(wav(tone(1.0)))
    (tmp_path / "b.mp3").write_bytes(b"nothing")
    (tmp_path / "notes.txt").write_text("no audio")
    options = ["--model", str(folder), "--device", "cpu", "--dtype", "float32", "--num-kv-blocks", "256"]
    assert transcribe.main([str(tmp_path), "--format", "json", "--language", "en", *options]) == 1
    assert json.loads((tmp_path / "a.wav.json").read_text())["duration"] == 1.0
    assert "b.mp3" in capsys.readouterr().err
    assert not (tmp_path / "notes.txt.json").exists()


@pytest.mark.parametrize("argv", [[], ["missing.wav"], ["--format", "docx"], ["--port", "1", "a.wav"]])
def test_wrong_commands_are_refused(argv, capsys):
    assert transcribe.main(argv) == 2
    assert capsys.readouterr().err.startswith("oneloop: ")
