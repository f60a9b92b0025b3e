"""A model of given dimensions with random weights in the stored formats, made on the device without a checkpoint."""

from typing import Any

import torch

from compressed_spec.cache import Cache
from compressed_spec.models.deepseek_v4.config import parse_config
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.modules import Linear
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.models.deepseek_v4.quantized import QuantizedKernels, quantize_modules
from compressed_spec.models.deepseek_v4.weight_plan import Piece, StorageFormat

BLOCK = (128, 128)
# Linear maps that upstream stores in FP8; the others stay as they are.
_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj")


def random_flash(
    raw: dict[str, Any], dtype: torch.dtype, kernels: QuantizedKernels, device: torch.device, *, seed: int = 0
) -> DeepseekV4:
    """A model of this config.json, with an MTP head, experts in FP4 and its large linear maps in FP8."""
    config = parse_config(raw)
    with torch.device("meta"):
        model = DeepseekV4(config, draft_head=DraftHeadKind.MTP, dtype=dtype)
    sources = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            leaf = name.rsplit(".", 1)[-1]
            fp8 = leaf in _FP8 and "compressor" not in name
            sources[f"{name}.weight"] = (
                Piece(
                    tensor=name,
                    format=StorageFormat.FP8 if fp8 else StorageFormat.PLAIN,
                    scale=name if fp8 else None,
                    block=BLOCK if fp8 else None,
                ),
            )
        if name.endswith(".ffn"):
            packed = (Piece(tensor=name, format=StorageFormat.FP4, scale=name),)
            sources |= {f"{name}.experts.{stack}": packed for stack in ("w13", "w2")}
    quantize_modules(model, sources, lambda _: torch.float8_e8m0fnu, kernels)
    random = torch.Generator(device=device).manual_seed(seed)
    state = {
        name: _random(name, tensor, config.n_routed_experts, device, random)
        for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(state, strict=True, assign=True)
    return model.to(device).eval().requires_grad_(False)


def _random(
    name: str, like: torch.Tensor, num_experts: int, device: torch.device, random: torch.Generator
) -> torch.Tensor:
    """Values of a sensible size: products of unit inputs have unit outputs, about."""
    shape, leaf = tuple(like.shape), name.removesuffix(".weight").rsplit(".", 1)[-1]

    def integers(low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=dtype, device=device, generator=random)

    if like.dtype == torch.float8_e4m3fn:
        codes = integers(0, 256, torch.uint8)
        return codes.masked_fill_((codes & 0x7F) > 0x77, 0x38).view(like.dtype)  # at most 240, root mean square 60
    if like.dtype == torch.int8:
        return integers(-128, 128, torch.int8)
    if like.dtype == torch.float8_e8m0fnu:
        # Codes' root mean square is about 60 (E4M3) or 3 (E2M1); the widths here differ little enough for one scale.
        exponent = 127 - 12 if leaf == "scale" else 127 - 8
        return torch.full(shape, exponent, dtype=torch.uint8, device=device).view(like.dtype)
    if like.dtype == torch.int64:
        ids = torch.rand((shape[0], num_experts), device=device, generator=random)
        return ids.topk(shape[1], dim=1).indices
    noise = torch.randn(shape, device=device, generator=random)
    if "norm" in leaf:
        noise = 1 + 0.1 * noise
    elif leaf.startswith("hc_"):
        noise = noise * (shape[-1] ** -0.5 if leaf.endswith("_fn") else 0.5)
    elif leaf == "bias":
        noise = 0.1 * noise
    elif leaf not in ("embed", "attn_sink", "ape"):
        noise = noise * shape[-1] ** -0.5
    return noise.to(like.dtype)


def filled_cache(model: DeepseekV4, batch_size: int, max_length: int, max_nodes: int) -> Cache:
    """A cache full of random state, whose rows may be taken to hold any number of tokens."""
    cache = model.new_cache(
        batch_size=batch_size, max_length=max_length, max_nodes=max_nodes, prefill_chunk=1, max_draft_nodes=1
    )
    for pool in cache.pools.values():
        pool.normal_()
    return cache
