"""Each process loads its own slices: the right values, wherever they begin, and nothing of the others'."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import compressed_spec.models.deepseek_v4.weights as weights
from compressed_spec import load_model
from compressed_spec.kernels.dequantize import dequantize_fp8
from compressed_spec.models.deepseek_v4.checkpoint import open_checkpoint
from compressed_spec.models.deepseek_v4.load import empty_model
from compressed_spec.models.deepseek_v4.parallel_plan import split_of
from compressed_spec.models.deepseek_v4.slices import own_bytes, reads_of
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.models.deepseek_v4.weight_plan import plan_weights
from compressed_spec.parallel import ALONE, ParallelGroup

# wq_b has 192 rows, wo_a and wo_b's columns 384: of four parts most begin inside a block of 128.
ODD: dict[str, Any] = {"head_dim": 48, "o_lora_rank": 96, "o_groups": 4, "compress_ratios": (0, 4, 8)}
STORED: dict[str, dict[str, Any]] = {
    "fp4": {},
    "fp8": {"experts": "fp8", "scale_dtype": "f32"},
    "transformers": {"layout": "transformers"},
    "dspark": {"draft_head": "dspark"},
}


def loaded(folder: Path, group: ParallelGroup) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(folder)
    model = empty_model(checkpoint, dtype=torch.float32, group=group)
    weights.load_weights(model, checkpoint, device="cpu", progress=False, group=group)
    return model.state_dict()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_put_together_are_the_whole(stored: str, size: int, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, **ODD, **STORED[stored])
    whole = loaded(folder, ALONE)
    parts = [loaded(folder, ParallelGroup(rank=rank, size=size)) for rank in range(size)]
    for name, tensor in whole.items():
        split, mine = split_of(name), [part[name] for part in parts]
        if split is None:
            assert all(torch.equal(one, tensor) for one in mine), name
        else:
            assert torch.equal(torch.cat(mine, dim=split.dim), tensor), name


def test_parts_do_begin_inside_scale_blocks(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_checkpoint(tmp_path, **ODD))
    plan = plan_weights(checkpoint)
    inside = Counter(
        name.split(".", 2)[-1]
        for rank in range(4)
        for name, pieces in plan.sources.items()
        for read in reads_of(name, pieces, checkpoint, ParallelGroup(rank=rank, size=4))
        if any(read.offset)
    )
    assert {"attn.wq_b.weight", "attn.wo_a.weight", "attn.wo_b.weight"} <= inside.keys()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 300),
    data=st.data(),
    block=st.sampled_from([(128, 128), (32, 48), (1, 7)]),
)
def test_a_part_of_a_matrix_decodes_like_the_whole(
    rows: int, cols: int, data: st.DataObject, block: tuple[int, int]
) -> None:
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    bottom, right = data.draw(st.integers(top + 1, rows)), data.draw(st.integers(left + 1, cols))
    codes = torch.randn(rows, cols).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), -(-cols // block[1])) + 0.5
    part = dequantize_fp8(
        codes[top:bottom, left:right].contiguous(),
        scale[top // block[0] : -(-bottom // block[0]), left // block[1] : -(-right // block[1])],
        block,
        (top % block[0], left % block[1]),
    )
    assert torch.equal(part, dequantize_fp8(codes, scale, block)[top:bottom, left:right])


def test_only_own_slices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes taken from the files, counted at the library's door, are those that the plan says."""
    folder = make_tiny_checkpoint(tmp_path, **ODD)
    checkpoint = open_checkpoint(folder)
    num_read: Counter[str] = Counter()

    class Counting:
        def __init__(self, path: Path, **options: Any) -> None:
            self._file = real(path, **options)

        def get_slice(self, name: str) -> Any:
            file: Any = self._file

            class Slice:
                def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
                    tensor: torch.Tensor = file.get_slice(name)[index]
                    num_read[name] += tensor.nbytes
                    return tensor

            return Slice()

    real: Any = safe_open
    monkeypatch.setattr(weights, "safe_open", Counting)
    for rank in range(4):
        num_read.clear()
        loaded(folder, group := ParallelGroup(rank=rank, size=4))
        assert num_read.total() == own_bytes(plan_weights(checkpoint), checkpoint, group)
        experts = {int(name.split(".experts.")[1].split(".")[0]) for name in num_read if ".experts." in name}
        assert experts == {rank}
        whole = sum(info.nbytes for info in checkpoint.tensors.values())
        split = sum(checkpoint.tensors[name].nbytes for name in num_read) - num_read.total()
        assert 0 < split < whole - num_read.total()


def test_experts_of_others_may_be_broken(tmp_path: Path) -> None:
    """Rank 1's experts have scales of NaN: rank 0 never notices, rank 1 names the tensor."""
    folder = make_tiny_checkpoint(tmp_path, compress_ratios=(0, 4))
    shard = next(path for path in folder.glob("*.safetensors") if "layers.1.ffn.experts.3.w2.scale" in load_file(path))
    tensors = load_file(shard)
    broken = torch.full_like(tensors["layers.1.ffn.experts.3.w2.scale"].view(torch.uint8), 255)
    tensors["layers.1.ffn.experts.3.w2.scale"] = broken.view(torch.float8_e8m0fnu)
    save_file(tensors, shard)
    assert loaded(folder, ParallelGroup(rank=0, size=2))
    with pytest.raises(ValueError, match=r"layers\.1\.ffn\.experts\.3\.w2\.scale holds a scale that is not"):
        loaded(folder, ParallelGroup(rank=1, size=2))


def test_T36_fp4_that_would_be_cut_inside_a_group(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_checkpoint(tmp_path, compress_ratios=(0,)))
    plan = plan_weights(checkpoint)
    (piece,) = plan.sources["layers.0.attn.wo_b.weight"]
    expert = plan.sources["layers.0.ffn.experts.w2"][0]
    as_fp4 = dataclasses.replace(piece, format=expert.format, tensor=piece.tensor)
    info = dataclasses.replace(checkpoint.tensors[piece.tensor], dtype="I8", shape=(128, 24))
    cut = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, piece.tensor: info})
    with pytest.raises(ValueError, match=r"attn\.wo_b\.weight is FP4 and cannot be cut at column 24"):
        list(reads_of("layers.0.attn.wo_b.weight", (as_fp4,), cut, ParallelGroup(rank=1, size=2)))


def test_a_dry_run_reads_and_keeps_nothing(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, compress_ratios=(0, 4))
    checkpoint, group = open_checkpoint(folder), ParallelGroup(rank=1, size=2)
    model = empty_model(checkpoint, dtype=torch.float32, group=group)
    weights.load_weights(model, checkpoint, device="meta", progress=False, group=group)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_T36_invariant_numerics_hold_in_one_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Invariant numerics hold in one process only"):
        load_model(tmp_path, numerics="invariant", group=ParallelGroup(size=2))
