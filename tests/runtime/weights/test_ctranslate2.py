"""CTranslate2's model.bin: Whisper's tensors under the names of transformers, in each of its number formats; and files that lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from runtime.config import WeightPolicy
from runtime.models.implementation import describe
from runtime.models.load import load_model
from runtime.models.reading import planned_loads
from runtime.weights.ctranslate2 import MODEL_BIN, CTranslate2Checkpoint, is_ctranslate2
from runtime.weights.fetch import resolve
from runtime.weights.rules import WeightsError

SIZE, HEADS, INNER, VOCAB, MELS, POSITIONS, LENGTH = 64, 4, 96, 40, 16, 12, 20
KEPT = WeightPolicy("stored", keep_quantized=True)
TYPES = {"float32": 0, "int8": 1, "int16": 2, "float16": 4, "bfloat16": 5}


def variables() -> dict[str, np.ndarray]:
    """Two layers of each half, drawn."""
    rng = np.random.default_rng(3)

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    found: dict[str, np.ndarray] = {
        "encoder/conv1/weight": drawn(SIZE, MELS, 3), "encoder/conv1/bias": drawn(SIZE),
        "encoder/conv2/weight": drawn(SIZE, SIZE, 3), "encoder/conv2/bias": drawn(SIZE),
        "encoder/position_encodings/encodings": drawn(POSITIONS, SIZE),
        "decoder/position_encodings/encodings": drawn(LENGTH, SIZE),
        "decoder/embeddings/weight": drawn(VOCAB, SIZE),
        "encoder/num_heads": np.array(HEADS, np.int16), "decoder/num_heads": np.array(HEADS, np.int16),
    }  # fmt: skip
    for part, blocks in (("encoder", ("self_attention",)), ("decoder", ("self_attention", "attention"))):
        norms = [part]
        for number in range(2):
            layer = f"{part}/layer_{number}"
            norms += [f"{layer}/{each}" for each in (*blocks, "ffn")]
            qkv = {f"{layer}/self_attention/linear_0": 3, f"{layer}/self_attention/linear_1": 1}
            if part == "decoder":
                qkv |= {f"{layer}/attention/linear_{index}": times for index, times in enumerate((1, 2, 1))}
            for name, times in qkv.items():
                found |= {f"{name}/weight": drawn(times * SIZE, SIZE), f"{name}/bias": drawn(times * SIZE)}
            found |= {f"{layer}/ffn/linear_0/weight": drawn(INNER, SIZE), f"{layer}/ffn/linear_0/bias": drawn(INNER)}
            found |= {f"{layer}/ffn/linear_1/weight": drawn(SIZE, INNER), f"{layer}/ffn/linear_1/bias": drawn(SIZE)}
        for name in norms:
            found |= {f"{name}/layer_norm/gamma": drawn(SIZE), f"{name}/layer_norm/beta": drawn(SIZE)}
    return found


def as_stored(given: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """The variables as CTranslate2's converter quantises them."""
    stored = {}
    for name, values in given.items():
        is_matrix = name.endswith("/weight")
        if values.dtype != np.float32 or (kind in ("int8", "int16") and not is_matrix):
            stored[name] = values
        elif kind == "int8":
            scale = 127 / np.abs(values.reshape(len(values), -1)).max(axis=1)
            stored[name] = np.rint(values * scale.reshape(-1, *(1,) * (values.ndim - 1))).astype(np.int8)
            stored[f"{name}_scale"] = scale.astype(np.float32)
        elif kind == "int16":
            scale = np.float32(2**10 / np.abs(values).max())
            stored[name], stored[f"{name}_scale"] = np.rint(values * scale).astype(np.int16), np.array(scale)
        elif kind == "bfloat16":
            stored[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            stored[name] = values.astype(kind)
    return stored


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def written(stored: dict[str, np.ndarray], spec: str = "WhisperSpec") -> bytes:
    parts = [struct.pack("<I", 6), text(spec), struct.pack("<I", 3), struct.pack("<I", len(stored))]
    for name, values in stored.items():
        number = TYPES["bfloat16" if values.dtype == np.uint16 else str(values.dtype)]
        parts += [text(name), struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)]
        parts += [struct.pack("<BI", number, values.nbytes), values.tobytes()]
    alias = text("decoder/projection/weight") + text("decoder/embeddings/weight")
    return b"".join([*parts, struct.pack("<I", 1), alias])


def folder_of(folder: Path, kind: str) -> Path:
    (folder / MODEL_BIN).write_bytes(written(as_stored(variables(), kind)))
    (folder / "config.json").write_text(json.dumps({"alignment_heads": [[1, 0]], "suppress_ids": []}))
    tokens = [f"t{index}" for index in range(VOCAB - 2)] + ["<|endoftext|>", "<|startoftranscript|>"]
    (folder / "vocabulary.json").write_text(json.dumps(tokens))
    return folder


@pytest.mark.parametrize(
    ("kind", "error"), [("float32", 0), ("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 2e-2), ("int16", 2e-3)]
)
def test_every_tensor_is_there_under_its_name(kind, error, tmp_path):
    files = resolve(str(folder_of(tmp_path, kind)), None, lambda progress: None)
    assert (files.kind, files.eos_token_ids) == ("ctranslate2", {VOCAB - 2})
    assert files.stored_bytes == (tmp_path / MODEL_BIN).stat().st_size
    spec = describe(files.config, "native")
    plain = variables()
    with files.open_tensors("auto", {}, 0) as source:
        decoder, encoder = (
            {parameter.name: values for parameter, values in source.stream(loads, "float32", lambda progress: None)}
            for loads in (planned_loads(spec, source), planned_loads(spec.encoder.own, source))
        )
    for name, ours in {
        "decoder/layer_1/self_attention/linear_0/weight": "model.layers.3.self_attn.qkv_proj.weight",
        "decoder/layer_0/attention/linear_1/weight": "model.layers.1.cross_attn.kv_proj.weight",
        "decoder/embeddings/weight": "model.embed_tokens.weight",
    }.items():
        assert np.abs(decoder[ours] - plain[name]).max() <= error * np.abs(plain[name]).max()
    bias = decoder["model.layers.3.self_attn.qkv_proj.bias"]
    assert not bias[SIZE : 2 * SIZE].any()
    assert bias[2 * SIZE :].any()
    convolution = plain["encoder/conv1/weight"].transpose(0, 2, 1).reshape(SIZE, -1)
    assert np.abs(encoder["model.conv1.weight"] - convolution).max() <= error * np.abs(convolution).max()


def test_rows_of_eight_bits_stay_as_they_are(tmp_path):
    files = resolve(str(folder_of(tmp_path, "int8")), None, lambda progress: None)
    exact = resolve(str(folder_of(make(tmp_path / "exact"), "float32")), None, lambda progress: None)
    loaded = [
        load_model(each, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, weights=KEPT)
        for each in (files, exact)
    ]
    assert loaded[0].weights_bytes < loaded[1].weights_bytes / 2


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path):
    whole = written(as_stored(variables(), "float16"))
    path = tmp_path / MODEL_BIN
    for length in (0, 3, 9, 30, 200, len(whole) // 2, len(whole) - 90):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError):
            CTranslate2Checkpoint(path)


def test_bytes_that_changed_are_refused_or_read_and_never_crash(tmp_path):
    whole, path = bytearray(written(as_stored(variables(), "int8"))), tmp_path / MODEL_BIN
    rng = np.random.default_rng(1)
    refused = 0
    for place in rng.integers(0, 400, 60):
        broken = bytearray(whole)
        broken[place] ^= int(rng.integers(1, 256))
        path.write_bytes(broken)
        try:
            CTranslate2Checkpoint(path).close()
        except WeightsError:
            refused += 1
    assert refused > 0


def test_other_models_of_ctranslate2_are_refused_by_name(tmp_path):
    path = tmp_path / MODEL_BIN
    path.write_bytes(written({}, "TransformerSpec"))
    assert is_ctranslate2(tmp_path)
    with pytest.raises(WeightsError, match="a model of CTranslate2's TransformerSpec; WhisperSpec of formats 2 to 6"):
        CTranslate2Checkpoint(path)


def test_a_pickle_is_no_model_of_ctranslate2(tmp_path):
    (tmp_path / MODEL_BIN).write_bytes(b"\x80\x02}q\x00.")
    assert not is_ctranslate2(tmp_path)
