"""Parameters under DeepSeek's names: norms, hyper-connections, and the precision each is kept in.

T = nodes, M = residual streams, D = model width
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from compressed_spec.kernels.hyper_connection import MixWeights, collapse, head_weights, mix_weights
from compressed_spec.kernels.norm import rms_norm
from compressed_spec.kernels.numerics import Numerics, numerics_named
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """`dtype` of matrices, activations and KV; `wide` of norms, mixing weights, gates, compressors and softmaxes.

    numerics: how the operations are carried out. fp8_rows: whether KV and entries are kept packed (`kernels.fp8_rows`).
    """

    dtype: torch.dtype
    numerics: Numerics = field(default_factory=partial(numerics_named, "fast"))
    fp8_rows: bool = False

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class Norm(nn.Module):
    """RMSNorm with a weight in the wide dtype."""

    def __init__(self, width: int, eps: float, precision: Precision) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=precision.wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Linear):
    """A product without bias, in the model's dtype or the wide one."""

    def __init__(self, in_features: int, out_features: int, precision: Precision, *, wide: bool = False) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=precision.wide if wide else precision.dtype)
        self.numerics = precision.numerics

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.numerics.linear(x, self.weight)

    def grouped(self, x_TGD: torch.Tensor) -> torch.Tensor:
        """One product a group `[T, G, O / G]`: the matrix' rows are the groups', one after the other."""
        return self.numerics.grouped_linear(x_TGD, self.weight.unflatten(0, (x_TGD.shape[1], -1)))


class HyperConnected(nn.Module):
    """Base of what collapses the residual streams: registers `hc_<site>_{fn,base,scale}` and applies them."""

    def __init__(self, config: DeepseekV4Config, precision: Precision) -> None:
        super().__init__()
        self.config, self.precision = config, precision

    def add_site(self, site: str) -> None:
        """Parameters of one mixing site: "attn", "ffn", or "head" (which only collapses)."""
        streams, width = self.config.hc_mult, self.config.hidden_size
        num_mixed = streams if site == "head" else (2 + streams) * streams
        num_scales = 1 if site == "head" else 3
        for part, size in (("fn", (num_mixed, streams * width)), ("base", (num_mixed,)), ("scale", (num_scales,))):
            self.register_parameter(f"hc_{site}_{part}", nn.Parameter(torch.empty(size, dtype=self.precision.wide)))

    def mix(self, site: str, streams_TMD: torch.Tensor) -> MixWeights:
        """Mixing weights of a block's site."""
        return mix_weights(
            streams_TMD,
            self.get_parameter(f"hc_{site}_fn"),
            self.get_parameter(f"hc_{site}_scale"),
            self.get_parameter(f"hc_{site}_base"),
            iterations=self.config.hc_sinkhorn_iters,
            eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
            numerics=self.precision.numerics,
        )

    def collapse_head(self, streams_TMD: torch.Tensor) -> torch.Tensor:
        """The streams as one, `[T, D]`, before the output norm."""
        weights_TM = head_weights(
            streams_TMD,
            self.get_parameter("hc_head_fn"),
            self.get_parameter("hc_head_scale"),
            self.get_parameter("hc_head_base"),
            eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
            numerics=self.precision.numerics,
        )
        return collapse(streams_TMD, weights_TM)
