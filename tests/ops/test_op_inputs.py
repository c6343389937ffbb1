"""Where a token more of each row stands: Triton's kernel beside the reference."""

from __future__ import annotations

import pytest
import torch

from ops.inputs import reference, triton_unpack
from ops.inputs.reference import StepTensors
from tests.ops.places import DEVICES

MAX_ROWS, ENTRIES, BLOCK = 600, 7, 4


def tensors(device: str, num_tables: int) -> StepTensors:
    rng = torch.Generator().manual_seed(num_tables)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    names = "input_ids positions slot_mapping rows seq_lens sample_rows query_start_loc sample_positions logit_tokens last_ids"
    return StepTensors(
        **dict.fromkeys(names.split(), nothing),
        num_computed=torch.randint(0, ENTRIES * BLOCK - 3, (MAX_ROWS,), dtype=torch.int32, generator=rng).to(device),
        block_tables=torch.randint(0, 1 << 30, (num_tables, MAX_ROWS, ENTRIES), dtype=torch.int32, generator=rng).to(
            device
        ),
        num_state_tables=0,
        block_size=BLOCK,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_rows", "num_none"), [(1, 0), (1, 1), (5, 2), (255, 0), (256, 1), (257, 256), (600, 90)])
@pytest.mark.parametrize("num_tables", [1, 3])
def test_rows_stand_where_the_reference_has_them(device, num_rows, num_none, num_tables):
    to = tensors(device, num_tables)
    rows = torch.randperm(MAX_ROWS, generator=torch.Generator().manual_seed(num_rows))[:num_rows]
    rows[num_rows - num_none :] = -1
    for offset in range(3):
        args = to, rows.to(device), torch.tensor([offset], device=device)
        found, expected = triton_unpack.place_behind(*args), reference.place_behind(*args)
        for name, one, other in zip(found._fields, found, expected, strict=True):
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name
