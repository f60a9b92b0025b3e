"""KV and entries packed as FP8: what simulated quantisation gives, on every path, and half the memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compressed_spec import generate, load_model
from compressed_spec.cache import Cache
from compressed_spec.kernels.fp8_rows import decode_rows
from compressed_spec.layout import pool_specs
from compressed_spec.models.deepseek_v4.attention import Attention
from compressed_spec.models.deepseek_v4.compressor import Compressor
from compressed_spec.models.deepseek_v4.kernel_path import KernelPath
from compressed_spec.models.deepseek_v4.layer_ops import LayerOps, torch_ops, triton_ops
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.testing.models import prefilled, random_model, random_text
from compressed_spec.testing.state import assert_near, assert_same_state, live_state, poison
from compressed_spec.tree import TokenTree

WIDTHS: dict[str, Any] = {"head_dim": 68, "qk_rope_head_dim": 4}
TREE = TokenTree(tokens=[3, 4, 5, 6, 7, 8], parents=[-1, 0, 0, 1, 1, 3])


def model_of(*, fp8: bool = True, path: LayerOps | None = None, **options: Any) -> DeepseekV4:
    model = random_model(options.pop("ratios", (0, 4, 8)), fp8_rows=fp8, **WIDTHS, **options)
    model.path = None if path is None else KernelPath(model, path)
    return model


def simulated(values_ND: torch.Tensor) -> torch.Tensor:
    """The reference's rounding (section 3.1), with the scale by logarithm and codes by search; the tail in bfloat16."""
    plain, tail = values_ND[:, :64].double(), values_ND[:, 64:].bfloat16().to(values_ND.dtype)
    scale = 2.0 ** torch.ceil(torch.log2(plain.abs().amax(1, keepdim=True).clamp(min=1e-4) / 448))
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = every[every.isfinite()].unique()
    nearest = every[((plain / scale).unsqueeze(-1) - every).abs().argmin(-1)]
    return torch.cat(((nearest * scale).to(values_ND.dtype), tail), dim=1)


def logits_and_cache(model: DeepseekV4) -> tuple[torch.Tensor, Cache]:
    cache = prefilled(model, [random_text(n, seed=n) for n in (15, 3)], max_length=48)
    cache.commit(model.verify(cache, [TREE, TREE]), [[0, 1, 3], [0]])
    poison(cache)
    cache.check_integrity()
    return model.verify(cache, [TREE, TREE]).logits, cache


def decoded(cache: Cache, row: int) -> dict[str, torch.Tensor]:
    """A row's state in numbers."""
    state = live_state(cache, row)
    for pool in pool_specs(cache.spec, cache.shape.max_length):
        if pool.packed:
            rows = state[pool.name]
            state[pool.name] = decode_rows(rows.flatten(0, 1), 68, 4).unflatten(0, rows.shape[:2])
    return state


@pytest.mark.parametrize("head", [DraftHeadKind.MTP, DraftHeadKind.DSPARK])
def test_is_simulated_quantisation(head: DraftHeadKind, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"draft_head": head, "num_draft_layers": 2 if head is DraftHeadKind.DSPARK else 1}
    logits_TV, cache = logits_and_cache(model_of(**options))
    unrounded_TV, _ = logits_and_cache(model_of(fp8=False, **options))

    def rounded(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(self: Any, *args: Any) -> torch.Tensor:
            values = original(self, *args)
            return simulated(values) if values.shape[1] == 68 else values

        return call

    monkeypatch.setattr(Attention, "kv", rounded(Attention.kv))
    monkeypatch.setattr(Compressor, "pool", rounded(Compressor.pool))
    expected_TV, beside = logits_and_cache(model_of(fp8=False, **options))
    assert_near(logits_TV, expected_TV, "logits")
    assert (logits_TV - unrounded_TV).abs().max() > 1e-4, "nothing was rounded"
    for row in range(2):
        assert_same_state(decoded(cache, row), live_state(beside, row), f"row {row}")


def test_the_kernels_path_keeps_the_same_bytes() -> None:
    logits_TV, cache = logits_and_cache(model_of())
    same_TV, beside = logits_and_cache(model_of(path=torch_ops()))
    assert_near(same_TV, logits_TV, "logits")
    for row in range(2):
        ours, theirs = live_state(beside, row), live_state(cache, row)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours if ours[name].dtype == torch.uint8)


@pytest.mark.parametrize("ratios", [(4,), pytest.param((4, 8), marks=pytest.mark.slow)])
def test_triton_keeps_the_same_numbers(ratios: tuple[int, ...]) -> None:
    """But where rounding in float32 falls on the other side of two codes' middle."""
    logits_TV, cache = logits_and_cache(model_of(ratios=ratios, dtype=torch.float32))
    same_TV, beside = logits_and_cache(model_of(ratios=ratios, dtype=torch.float32, path=triton_ops()))
    differing, num = 0, 0
    for row in range(2):
        ours, theirs = live_state(beside, row), live_state(cache, row)
        for name in ours:
            if ours[name].dtype == torch.uint8:
                differing, num = differing + int((ours[name] != theirs[name]).sum()), num + ours[name].numel()
    assert num > 2000
    assert differing < num / 1000
    assert_near(same_TV, logits_TV, "logits", 1e-4 if not differing else 1e-2)


@pytest.mark.parametrize(
    "path", [None, pytest.param("torch", marks=pytest.mark.slow), pytest.param("triton", marks=pytest.mark.slow)]
)
def test_speculation_is_lossless(path: str | None) -> None:
    ops = {None: None, "torch": torch_ops(), "triton": triton_ops()}[path]
    dtype = torch.float32 if path == "triton" else torch.float64
    model = model_of(path=ops, dtype=dtype)
    prompts = [random_text(13), [5]]
    plain, drafted = (
        generate(model, prompts, tree=tree, max_new_tokens=9, stop_token_ids=[]) for tree in ("off", "s3_k2_d6")
    )
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]


def test_snapshots_and_copies_keep_the_bytes() -> None:
    model = model_of(ratios=(4,))
    cache = prefilled(model, [random_text(9), [1]])
    snapshot = cache.snapshot([0])
    cache.fork(0, 1)
    other = model.new_cache(max_length=64)
    other.restore(snapshot)
    for name, rows in live_state(cache, 0).items():
        assert torch.equal(live_state(cache, 1)[name], rows)
        assert torch.equal(live_state(other, 0)[name], rows)


def test_memory_and_damage() -> None:
    packed, plain = (
        model_of(fp8=fp8, dtype=torch.bfloat16, ratios=(4,)).new_cache(max_length=64) for fp8 in (True, False)
    )
    assert packed.pools["window_kv"].nbytes * 1.6 < plain.pools["window_kv"].nbytes
    model = model_of(ratios=(4,))
    cache = prefilled(model, [random_text(9)])
    cache.pools["window_kv"][0, 3, 5] = 0x7F  # no number
    with pytest.raises(ValueError, match="not finite"):
        cache.check_integrity()


def test_the_option(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "wide", **WIDTHS)
    model = load_model(folder, progress=False, kv_dtype="fp8")
    assert model.new_cache().pools["window_kv"].dtype == torch.uint8
    with pytest.raises(ValueError, match="Unknown kv_dtype 'int8'"):
        load_model(folder, kv_dtype="int8")
    with pytest.raises(ValueError, match="compile=True"):
        load_model(folder, kv_dtype="fp8", compile=True)
    with pytest.raises(ValueError, match="multiple of 64"):
        load_model(make_tiny_checkpoint(tmp_path / "narrow"), kv_dtype="fp8")
