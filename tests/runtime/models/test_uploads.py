"""Numbers of a checkpoint on their way to a GPU are those that an array of the host's would have brought there."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from runtime.models import uploads as uploads_module
from runtime.models.load import load_model
from runtime.models.reading import as_torch
from runtime.models.uploads import Uploads
from runtime.weights.fetch import resolve
from tests.runtime.models.paged import Paged

CUDA = torch.device("cuda")
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 1024,
    "moe_intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pieces_from_several_threads_arrive_whole(dtype):
    wanted = torch.randn(3001, 1100, generator=torch.Generator().manual_seed(0)).to(dtype)
    with Uploads(CUDA) as uploads, ThreadPoolExecutor(5) as threads:
        for _ in range(3):  # on memory that the device may still be busy with
            upload = uploads.begin(tuple(wanted.shape), dtype)
            starts = range(0, len(wanted), upload.max_rows // 4)
            stops = [min(len(wanted), start + upload.max_rows // 4) for start in starts]

            def read(start: int, stop: int, upload=upload) -> None:
                with upload.rows(start, stop) as rows:
                    as_torch(rows).copy_(wanted[start:stop])

            list(threads.map(read, starts, stops))
            assert torch.equal(upload.whole.cpu(), wanted)
            del upload


@pytest.mark.gpu
def test_slabs_are_used_again_and_given_back_after_a_read_that_fails():
    with Uploads(CUDA) as uploads:
        upload = uploads.begin((1 << 11, 1 << 10), torch.bfloat16)
        with pytest.raises(OSError, match="broken"), upload.rows(0, 4):
            raise OSError("broken")
        for start in range(0, 64, 4):
            with upload.rows(start, start + 4) as rows:
                rows[...] = 0x3F80
        assert upload.whole[:64].eq(1).all()
        assert len(uploads._slabs) == 1


@pytest.mark.gpu
def test_what_is_small_or_has_long_rows_goes_another_way():
    with Uploads(CUDA) as uploads:
        assert uploads.begin((1 << 10, 64), torch.bfloat16) is None
        assert uploads.begin((2, uploads_module._SLAB_BYTES), torch.bfloat16) is None
        assert len(uploads._slabs) == 0


@pytest.mark.gpu
@torch.inference_mode()
def test_a_model_with_experts_is_the_same_whichever_way_its_numbers_come(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    files, ids, found = resolve(str(tmp_path), None, lambda progress: None), list(range(40)), []
    for min_bytes in (uploads_module._MIN_BYTES, 1 << 40):
        monkeypatch.setattr(uploads_module, "_MIN_BYTES", min_bytes)
        model = load_model(
            files, dtype="bfloat16", load_format="dummy", seed=0, progress=lambda progress: None, device="cuda"
        )
        with torch.device("cuda"):
            found.append(Paged(model, 1, 64).step({0: ids})[0].float())
    assert torch.nn.functional.cosine_similarity(*found).min() > 0.9999
    assert found[0].std() > 0
