"""`python -m tests.equality.perplexities`: what fewer bits cost SmolLM2-135M-Instruct in perplexity, as a table; of the layouts
that others publish, each matrix by itself.

Its numbers are those of the built-in GGUF file, which are of four bits already (Q4_1, groups of 32): the first row is them in
float32. The text is Python's own documentation of its topics (`pydoc_data.topics`, of the Python that runs this): every other topic
is read for the perplexity, the others for calibration; pieces of 512 tokens. Weights are read as numbers, so that what is
measured is the rounding of weights, or of keys and values, alone."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import gguf
import torch
from torch import Tensor

from ops import StoredWeight
from runtime.config import WeightPolicy
from runtime.models.decoder import Decoder
from runtime.models.load import load_model, opened
from runtime.quantize.inputs import read_text
from runtime.quantize.model import quantize
from runtime.quantize.schemes import SCHEMES
from runtime.weights.fetch import ModelFiles, resolve
from server.models.tokenizer import Tokenizer
from tests.runtime.weights import published, smollm2

PIECE = 512


def silent(progress) -> None:
    pass


def pieces(tokenizer: Tokenizer, names: Sequence[str], count: int) -> list[list[int]]:
    ids = [token for name in names for token in tokenizer.encode(topics[name])]
    return [ids[begin : begin + PIECE] for begin in range(0, count * PIECE, PIECE)]


def loaded(files: ModelFiles) -> Decoder:
    return load_model(
        files, dtype="float32", load_format="auto", seed=0, progress=silent, weights=WeightPolicy("float32")
    )


def perplexity(decoder: Decoder, texts: Sequence[Sequence[int]], kv_cache_dtype: str | None = None) -> float:
    total = count = 0.0
    for ids in texts:
        logits = read_text(decoder, ids, kv_cache_dtype).float()
        total += float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    return math.exp(total / count)


def eight_bits(weight: Tensor) -> Tensor:
    """As a CPU's kernels keep what they have no blocks of: 127 steps to the largest of each 32 of a row."""
    grouped = weight.unflatten(1, (-1, 32))
    scale = (grouped.abs().amax(2, keepdim=True) / 127).half().float().clamp(min=1e-30)
    return ((grouped / scale).round() * scale).flatten(1)


def ggml(kind: str) -> Callable[[Tensor], Tensor]:
    """What numbers are worth when the gguf package has written them in such blocks."""
    written = gguf.GGMLQuantizationType[kind]
    return lambda weight: torch.from_numpy(
        gguf.quants.dequantize(gguf.quants.quantize(weight.float().numpy(), written), written)
    )


def dialect(name: str) -> Callable[[Tensor], Tensor]:
    """What numbers are worth when published.py has written them so."""
    random = torch.Generator().manual_seed(0)
    return lambda weight: published.DIALECTS[name].write("w", weight, random)[1]


WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nf4, double quantised (bitsandbytes)": dialect("bitsandbytes, nf4"),
    "the same in eight bits, as a CPU keeps it": lambda weight: eight_bits(dialect("bitsandbytes, nf4")(weight)),
    "fp4 (bitsandbytes)": dialect("bitsandbytes, fp4"),
    "NVFP4": dialect("modelopt, nvfp4"),
    "MXFP4": dialect("mxfp4-pack-quantized"),
    "int4 in groups of 32 (torchao)": dialect("torchao, int4"),
    **{kind: ggml(kind) for kind in ("Q4_0", "Q5_0", "Q5_1", "Q8_0")},
}


def rewritten(files: ModelFiles, decoder: Decoder, write: Callable[[Tensor], Tensor]) -> Decoder:
    """With the matrices of layers so written."""
    spec = decoder.spec
    matrices = {f"{linear.name}.weight" for linear in spec.linears() if linear.name != spec.head.name}
    with opened(
        spec, files, dtype="float32", load_format="auto", seed=0, device="cpu", policy=WeightPolicy("float32")
    ) as reader:
        for name, stored in reader.read(silent):
            if name in matrices:
                assert isinstance(stored, StoredWeight)
                decoder.load_parameter(name, StoredWeight.dense(write(stored.weight)))
    return decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pieces", type=int, default=6, help="of the text that is read (default: 6)")
    parser.add_argument("--calibration-pieces", type=int, default=12, help="of the text to calibrate by (default: 12)")
    args = parser.parse_args()
    files = smollm2.files()
    assert files.gguf is not None
    tokenizer, names = Tokenizer.from_gguf(files.gguf.metadata), sorted(topics)
    texts, calibration = (
        pieces(tokenizer, names[::2], args.pieces), pieces(tokenizer, names[1::2], args.calibration_pieces)
    )  # fmt: skip
    plain = loaded(files)
    exact = perplexity(plain, texts)

    def row(name: str, found: float) -> None:
        print(f"| {name} | {found:.2f} | {found / exact - 1:+.1%} |", flush=True)

    print("| | perplexity | |\n|---|---|---|")
    row("float32", exact)
    for kv_cache_dtype in ("fp8", "int8_per_token_head"):
        row(f"KV cache in {kv_cache_dtype}", perplexity(plain, texts, kv_cache_dtype))
    for name, write in WRITTEN.items():
        row(name, perplexity(rewritten(files, plain, write), texts))
    del plain
    for scheme in SCHEMES:
        for given in ([], calibration) if scheme == "w4a16" else ([],):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "model"
                quantize(files, out, scheme, given, silent)
                written = loaded(resolve(str(out), None, silent))
                row(scheme + (", calibrated" if given else ""), perplexity(written, texts))


if __name__ == "__main__":
    main()
