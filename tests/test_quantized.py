"""Weights kept as they are stored: the same model as the dequantised one, in less memory."""

from pathlib import Path

import pytest
import torch

from compressed_spec import TokenTree
from compressed_spec.models.deepseek_v4.load import load_model
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.quantized import QuantizedLinear, QuantizedMoE
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.testing.state import assert_near

PROMPT = [0, 17, 42, 5, 9, 30, 11, 8, 25]


def logits(model: DeepseekV4) -> torch.Tensor:
    """After a prompt, a committed tree, and another tree."""
    cache = model.new_cache(batch_size=1, max_length=64)
    model.prefill(cache, [PROMPT])
    tree = TokenTree(tokens=[7, 8, 9, 10], parents=[-1, 0, 0, 2])
    cache.commit(model.verify(cache, [tree]), [[0, 2, 3]])
    return model.verify(cache, [tree]).logits


@pytest.mark.parametrize(
    ("experts", "scale_dtype", "draft_head"),
    [
        ("fp4", "e8m0", "mtp"),
        ("fp4", "e8m0", "dspark"),
        ("fp8", "f32", "mtp"),
        pytest.param("fp8", "e8m0", "none", marks=pytest.mark.slow),
        ("bf16", "e8m0", "none"),
    ],
)
def test_is_the_dequantised_model(experts: str, scale_dtype: str, draft_head: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, experts=experts, scale_dtype=scale_dtype, draft_head=draft_head)  # type: ignore[arg-type]
    plain = load_model(folder, dtype="float64", progress=False)
    kept = load_model(folder, dtype="float64", progress=False, keep_quantized=True)
    assert_near(logits(kept), logits(plain), "logits")
    linears = sum(isinstance(module, QuantizedLinear) for module in kept.modules())
    packed = sum(isinstance(module, QuantizedMoE) for module in kept.modules())
    assert (linears > 0) == (experts != "bf16")
    assert (packed == len(kept.layers) + len(kept.mtp)) == (experts != "bf16")
    if experts != "bf16":
        assert all(isinstance(layer.attn.wo_a, QuantizedLinear) for layer in [*kept.layers, *kept.mtp])
    assert (weight_bytes(kept) < weight_bytes(plain)) == (experts != "bf16")


def weight_bytes(model: DeepseekV4) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def test_the_draft_head_is_the_dequantised_one(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    plain = load_model(folder, dtype="float64", progress=False).mtp_head
    kept = load_model(folder, dtype="float64", progress=False, keep_quantized=True).mtp_head
    assert plain is not None
    assert kept is not None
    assert isinstance(kept.e_proj, QuantizedLinear)
    width = plain.config.hidden_size
    streams_TMD, embedded_TD = torch.randn(3, 4, width).double(), torch.randn(3, width).double()
    assert_near(kept.fuse(streams_TMD, embedded_TD), plain.fuse(streams_TMD, embedded_TD), "fused")


def test_invariant_numerics_refuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_quantized"):
        load_model(make_tiny_checkpoint(tmp_path), numerics="invariant", keep_quantized=True, progress=False)
