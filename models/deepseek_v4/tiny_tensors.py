"""Random values for a tiny checkpoint's tensors, and their storage as block-scaled FP8 and packed FP4.

Shape suffixes: O output rows, I input columns, G = I / 32 groups, V vocabulary, D hidden size, K experts a token.
"""

import hashlib
from typing import Literal

import torch

from compressed_spec.kernels.dequantize import FP4_GROUP
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config
from compressed_spec.models.deepseek_v4.names import Shape

ScaleDtype = Literal["e8m0", "f32"]

_BLOCK = 128
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6
_SUCCESSOR_WEIGHT = 0.5  # how much of a head row is the embedding of the token that it should follow
_MARKOV_GAIN = 6.0  # logit by which a draft's Markov head favours the successor of a token, about


def random_tensor(name: str, shape: Shape, config: DeepseekV4Config, seed: int) -> torch.Tensor:
    """The value of one parameter: float32 (int64 for the token table), a function of seed, name and shape alone."""
    random = torch.Generator().manual_seed(_stream(seed, name))
    if name.endswith(".tid2eid"):
        scores_VE = torch.rand(shape[0], config.n_routed_experts, generator=random)
        return scores_VE.argsort(dim=1)[:, : shape[1]].contiguous()
    noise = torch.randn(shape, generator=random)
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf.startswith("hc_"):
        return _hyper_connection(leaf, noise, config)
    if leaf == "head":
        return _head(noise, config, seed)
    if leaf == "markov_w2":
        return _markov(name, noise, config, seed)
    if leaf in ("e_proj", "h_proj", "main_proj"):
        return _draft_projection(leaf, noise)
    if "norm" in leaf:
        return 1 + 0.1 * noise
    if leaf == "bias":
        return 0.1 * noise
    if leaf in ("embed", "attn_sink", "ape"):
        return noise
    gain = 0.7 if leaf in ("wo_b", "w2") else 1.0
    row_gain_O = torch.exp(0.3 * torch.randn(shape[-2], generator=random))  # rows differ in size, so scales do too
    return noise.mul(row_gain_O[:, None]).mul(gain * shape[-1] ** -0.5)


def store_fp8(weight_OI: torch.Tensor, scale_dtype: ScaleDtype) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes [O, I] and one scale per 128 x 128 block; a power of two (rounded up) in E8M0, exact in float32."""
    rows, cols = weight_OI.shape
    grid = torch.zeros(-(-rows // _BLOCK) * _BLOCK, -(-cols // _BLOCK) * _BLOCK)
    grid[:rows, :cols] = weight_OI
    largest = grid.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK)).abs().amax(dim=(1, 3))
    scale = largest.clamp(min=1e-12) / _E4M3_MAX
    if scale_dtype == "e8m0":
        scale = _power_of_two_above(scale)
    full = scale.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)[:rows, :cols]
    codes = (weight_OI / full).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scale.to(torch.float8_e8m0fnu) if scale_dtype == "e8m0" else scale


def store_fp4(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes packed two a byte, int8 [O, I / 2], low nibble first, and E8M0 scales [O, I / 32]."""
    groups = weight_OI.unflatten(1, (-1, FP4_GROUP))
    scale_OG = _power_of_two_above(groups.abs().amax(dim=2).clamp(min=1e-12) / _E2M1_MAX)
    scaled = (groups / scale_OG[:, :, None]).flatten(1)
    codes = torch.bucketize(scaled.abs(), torch.tensor(_E2M1_MIDPOINTS)) + 8 * (scaled < 0)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return packed, scale_OG.to(torch.float8_e8m0fnu)


def _stream(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")


def _power_of_two_above(values: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.ones_like(values), exponent - (mantissa == 0.5).to(exponent.dtype))


def _hyper_connection(leaf: str, noise: torch.Tensor, config: DeepseekV4Config) -> torch.Tensor:
    streams = config.hc_mult
    if leaf.endswith("_fn"):
        return noise.mul(noise.shape[-1] ** -0.5)
    if leaf.endswith("_scale"):
        return 0.5 + 0.1 * noise
    base = 0.5 * noise
    if leaf != "hc_head_base":
        base[2 * streams :] += 2 * torch.eye(streams).flatten()  # streams keep most of themselves
    return base


def _head(noise_VD: torch.Tensor, config: DeepseekV4Config, seed: int) -> torch.Tensor:
    """Rows that answer to the embedding of one other token, except that nothing leads to a stop token."""
    vocab, width = noise_VD.shape
    embed_VD = random_tensor("embed.weight", (vocab, width), config, seed)
    weight_V1 = _SUCCESSOR_WEIGHT * _may_follow(config)
    row_VD = weight_V1 * embed_VD[_predecessors(config, seed)] + (1 - weight_V1.square()).sqrt() * noise_VD
    return row_VD.mul(1.5 * width**-0.5)


def _markov(name: str, noise_VR: torch.Tensor, config: DeepseekV4Config, seed: int) -> torch.Tensor:
    """Rows that answer to the Markov embedding of the same token as the vocabulary head's."""
    embed_VR = random_tensor(name.replace("markov_w2", "markov_w1"), tuple(noise_VR.shape), config, seed)
    return _MARKOV_GAIN * _may_follow(config) * embed_VR[_predecessors(config, seed)] + 0.1 * noise_VR


def _predecessors(config: DeepseekV4Config, seed: int) -> torch.Tensor:
    """The token that each one is likely to follow."""
    return torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(_stream(seed, "successors")))


def _may_follow(config: DeepseekV4Config) -> torch.Tensor:
    """`[V, 1]`: 0 for stop tokens, 1 for others."""
    may_V1 = torch.ones((config.vocab_size, 1))
    may_V1[list(config.eos_token_ids)] = 0
    return may_V1


def _draft_projection(leaf: str, noise_OI: torch.Tensor) -> torch.Tensor:
    """Mostly the token itself, some of the target's stream."""
    rows, cols = noise_OI.shape
    mixed = noise_OI.mul(0.3 * cols**-0.5)
    return mixed + torch.eye(rows) if leaf == "e_proj" else mixed
