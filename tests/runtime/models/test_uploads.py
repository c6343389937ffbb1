"""Numbers of a checkpoint on their way to a GPU are those that an array of the host's would have brought there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from runtime.models import uploads as uploads_module
from runtime.models.reading import as_torch
from runtime.models.uploads import Uploads

CUDA = torch.device("cuda")


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
        assert uploads.num_slabs == 1


@pytest.mark.gpu
def test_what_is_small_or_has_long_rows_goes_another_way():
    with Uploads(CUDA) as uploads:
        assert uploads.begin((1 << 10, 64), torch.bfloat16) is None
        assert uploads.begin((2, uploads_module._SLAB_BYTES), torch.bfloat16) is None
        assert uploads.num_slabs == 0
