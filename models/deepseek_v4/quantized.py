"""Modules that keep FP8 and FP4 weights as they are stored; the products decode them.

They take the place of a model's own where the checkpoint has such tensors. `wo_a` is left out, because attention uses
it by group; upstream keeps it in BF16 as well.

T = nodes, D = model width, E = experts, F = expert width, O = output width, I = input width
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from compressed_spec.kernels.dequantize import FP4_GROUP
from compressed_spec.kernels.fp4_experts import PackedExperts, fp4_experts
from compressed_spec.kernels.fp8_linear import FP8Weight, fp8_linear
from compressed_spec.kernels.moe import Routing, swiglu
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.models.deepseek_v4.block import Gate, MoE
from compressed_spec.models.deepseek_v4.modules import Linear
from compressed_spec.models.deepseek_v4.weight_plan import Piece, StorageFormat

_E8M0_MOST = 128  # the largest scale byte that a bfloat16 product takes: a scale of 2


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedKernels:
    """Products over stored weights (see `kernels.fp8_linear` and `kernels.fp4_experts`), and what lies between them:
    the router, and the activation of the shared expert.
    """

    linear: Callable[[torch.Tensor, FP8Weight], torch.Tensor]
    experts: Callable[[torch.Tensor, Routing, PackedExperts, float, torch.Tensor], torch.Tensor]
    route: Callable[[Gate, torch.Tensor, torch.Tensor], Routing]
    swiglu: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def quantized_kernels(device: torch.device) -> QuantizedKernels:
    """Triton's on a GPU, plain torch elsewhere."""
    return triton_kernels() if device.type == "cuda" else torch_kernels()


def torch_kernels() -> QuantizedKernels:
    """Plain torch."""
    fast = numerics_named("fast")
    return QuantizedKernels(
        linear=fp8_linear,
        experts=fp4_experts,
        route=lambda gate, x_TD, tokens_T: gate(x_TD, tokens_T),
        swiglu=lambda gate, up, limit: swiglu(gate, up, limit, fast),
    )


def triton_kernels() -> QuantizedKernels:
    """Triton's, for a GPU or its interpreter."""
    from compressed_spec.kernels import fp4_experts_triton, fp8_linear_triton, route_triton

    def route(gate: Gate, x_TD: torch.Tensor, tokens_T: torch.Tensor) -> Routing:
        return route_triton.route(
            F.linear(x_TD.to(gate.weight.dtype), gate.weight),
            None if gate.hash_routed else gate.bias,
            gate.get_buffer("tid2eid") if gate.hash_routed else None,
            tokens_T,
            num_chosen=gate.topk,
            scaling=gate.scaling,
        )

    return QuantizedKernels(
        linear=fp8_linear_triton.fp8_linear,
        experts=fp4_experts_triton.fp4_experts,
        route=route,
        swiglu=route_triton.swiglu,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """The two buffers that hold what was one parameter."""

    codes: str
    scale: str


class QuantizedLinear(nn.Module):
    """A product whose matrix is FP8: buffers `codes` float8_e4m3fn `[O, I]` and `scale`, one a block."""

    def __init__(self, like: nn.Linear, block: tuple[int, int], scale: torch.dtype, kernels: QuantizedKernels) -> None:
        super().__init__()
        self.block, self.kernels = block, kernels
        rows, cols = like.out_features, like.in_features
        device = like.weight.device
        grid = (-(-rows // block[0]), -(-cols // block[1]))
        self.register_buffer("codes", torch.empty((rows, cols), dtype=torch.float8_e4m3fn, device=device))
        self.register_buffer("scale", torch.empty(grid, dtype=scale, device=device))

    @property
    def stored(self) -> FP8Weight:
        return FP8Weight(codes=self.get_buffer("codes"), scale=self.get_buffer("scale"), block=self.block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.linear(x, self.stored)


class QuantizedExperts(nn.Module):
    """A layer's experts, stacked, packed FP4: buffers `w13`, `w2` int8 and `w13_scale`, `w2_scale` E8M0."""

    def __init__(self, num: int, width: int, inner: int, device: torch.device) -> None:
        super().__init__()
        for name, rows, cols in (("w13", 2 * inner, width), ("w2", width, inner)):
            codes = torch.empty((num, rows, cols // 2), dtype=torch.int8, device=device)
            scale = torch.empty((num, rows, cols // FP4_GROUP), dtype=torch.float8_e8m0fnu, device=device)
            self.register_buffer(name, codes)
            self.register_buffer(f"{name}_scale", scale)

    @property
    def packed(self) -> PackedExperts:
        return PackedExperts(**{name: self.get_buffer(name) for name in ("w13", "w13_scale", "w2", "w2_scale")})


class QuantizedMoE(nn.Module):
    """A mixture of experts, its routed experts packed; gate and shared expert are the original's."""

    def __init__(self, like: MoE, kernels: QuantizedKernels) -> None:
        super().__init__()
        self.limit, self.kernels = like.limit, kernels
        self.gate, self.shared_experts = like.gate, like.shared_experts
        num, width, inner = like.experts.w2.shape
        self.experts = QuantizedExperts(num, width, inner, like.experts.w2.device)

    def route(self, x_TD: torch.Tensor, tokens_T: torch.Tensor) -> Routing:
        """Which experts each node takes."""
        return self.kernels.route(self.gate, x_TD, tokens_T)

    def forward(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        shared = self.shared_experts
        hidden_TF = self.kernels.swiglu(shared.w1(x_TD), shared.w3(x_TD), self.limit)
        return self.kernels.experts(x_TD, routing, self.experts.packed, self.limit, shared.w2(hidden_TF))


def quantize_modules(
    model: nn.Module,
    sources: Mapping[str, tuple[Piece, ...]],
    scale_dtype: Callable[[str], torch.dtype],
    kernels: QuantizedKernels,
) -> dict[str, StoredNames]:
    """Replace the modules of a model (on the meta device) whose weights are stored quantised.

    sources: of each parameter (see `weight_plan`). scale_dtype: of a stored scale, by name. Returns the parameters
    that are now held by two buffers.
    """
    stored = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear) and not name.endswith(".wo_a"):
            piece = sources[f"{name}.weight"][0]
            if piece.format is StorageFormat.FP8:
                assert piece.block is not None
                assert piece.scale is not None
                model.set_submodule(name, QuantizedLinear(module, piece.block, scale_dtype(piece.scale), kernels))
                stored[f"{name}.weight"] = StoredNames(codes=f"{name}.codes", scale=f"{name}.scale")
    # Shared experts may have been replaced within a layer's experts by now, so these are found afterwards.
    for name, module in list(model.named_modules()):
        if isinstance(module, MoE) and all(_is_fp4(sources[f"{name}.experts.{stack}"]) for stack in ("w13", "w2")):
            model.set_submodule(name, QuantizedMoE(module, kernels))
            stored |= {
                f"{name}.experts.{stack}": StoredNames(
                    codes=f"{name}.experts.{stack}", scale=f"{name}.experts.{stack}_scale"
                )
                for stack in ("w13", "w2")
            }
    return stored


def _is_fp4(pieces: tuple[Piece, ...]) -> bool:
    return all(piece.format is StorageFormat.FP4 for piece in pieces)


def check_fp4_scale(name: str, scale: torch.Tensor) -> None:
    """Raise ValueError for scales above 2, which the packed products do not take."""
    if scale.dtype == torch.float8_e8m0fnu and int(scale.view(torch.uint8).max()) > _E8M0_MOST:
        raise ValueError(f"{name} holds a scale above 2, which packed products do not take: load it dequantised")


def raw_regions(piece: Piece, codes: torch.Tensor, scale: torch.Tensor) -> Iterator[torch.Tensor]:
    """Where a piece's codes and scales go in a parameter's two buffers."""
    for buffer in (codes, scale):
        yield buffer if piece.expert is None else buffer[piece.expert, piece.row_start : piece.row_stop]
