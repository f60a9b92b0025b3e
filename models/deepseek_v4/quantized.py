"""Modules that keep FP8 and FP4 weights as they are stored; the products decode them.

They take the place of a model's own where the checkpoint has such tensors.

T = nodes, D = model width, E = experts, F = expert width, O = output width, I = input width
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from compressed_spec.kernels.dequantize import FP4_GROUP
from compressed_spec.kernels.fp8_linear import FP8Weight, fp8_grouped_linear, fp8_linear
from compressed_spec.kernels.moe import Routing, swiglu
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.kernels.stored_experts import StoredExperts, stored_experts
from compressed_spec.models.deepseek_v4.block import Experts, Gate, MoE
from compressed_spec.models.deepseek_v4.modules import Linear
from compressed_spec.models.deepseek_v4.weight_plan import Piece, StorageFormat

_E8M0_MOST = 128  # the largest scale byte that a bfloat16 product takes: a scale of 2


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedKernels:
    """Products over stored weights (see `kernels.fp8_linear` and `kernels.stored_experts`), and what lies between them:
    the router, and the activation of the shared expert.
    """

    linear: Callable[[torch.Tensor, FP8Weight], torch.Tensor]
    grouped: Callable[[torch.Tensor, FP8Weight], torch.Tensor]
    experts: Callable[[torch.Tensor, Routing, StoredExperts, float, torch.Tensor], torch.Tensor]
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
        grouped=fp8_grouped_linear,
        experts=stored_experts,
        route=lambda gate, x_TD, tokens_T: gate(x_TD, tokens_T),
        swiglu=lambda gate, up, limit: swiglu(gate, up, limit, fast),
    )


def triton_kernels() -> QuantizedKernels:
    """Triton's, for a GPU or its interpreter."""
    from compressed_spec.kernels import fp8_linear_triton, route_triton, stored_experts_triton

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
        grouped=fp8_linear_triton.fp8_grouped_linear,
        experts=stored_experts_triton.stored_experts,
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

    def grouped(self, x_TGD: torch.Tensor) -> torch.Tensor:
        """See `Linear.grouped`."""
        return self.kernels.grouped(x_TGD, self.stored)


class QuantizedExperts(nn.Module):
    """A layer's experts, stacked, as in `StoredExperts`: buffers `w13`, `w2` and their scales."""

    def __init__(self, like: Experts, block: tuple[int, int] | None, scale_dtype: torch.dtype) -> None:
        super().__init__()
        self.block = block
        (num, width, inner), device = like.w2.shape, like.w2.device
        # Gate and up have blocks of their own.
        for name, halves, rows, cols in (("w13", 2, inner, width), ("w2", 1, width, inner)):
            if block is None:
                codes = torch.empty((num, halves * rows, cols // 2), dtype=torch.int8, device=device)
                grid = (halves * rows, cols // FP4_GROUP)
            else:
                codes = torch.empty((num, halves * rows, cols), dtype=torch.float8_e4m3fn, device=device)
                grid = (halves * -(-rows // block[0]), -(-cols // block[1]))
            self.register_buffer(name, codes)
            self.register_buffer(f"{name}_scale", torch.empty((num, *grid), dtype=scale_dtype, device=device))

    @property
    def packed(self) -> StoredExperts:
        buffers = {name: self.get_buffer(name) for name in ("w13", "w13_scale", "w2", "w2_scale")}
        return StoredExperts(**buffers, block=self.block)


class QuantizedMoE(nn.Module):
    """A mixture of experts, its routed experts packed; gate and shared expert are the original's."""

    def __init__(
        self, like: MoE, block: tuple[int, int] | None, scale_dtype: torch.dtype, kernels: QuantizedKernels
    ) -> None:
        super().__init__()
        self.limit, self.kernels = like.limit, kernels
        self.gate, self.shared_experts = like.gate, like.shared_experts
        self.experts = QuantizedExperts(like.experts, block, scale_dtype)

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
        if isinstance(module, Linear):
            piece = sources[f"{name}.weight"][0]
            if piece.format is StorageFormat.FP8:
                assert piece.block is not None
                assert piece.scale is not None
                model.set_submodule(name, QuantizedLinear(module, piece.block, scale_dtype(piece.scale), kernels))
                stored[f"{name}.weight"] = StoredNames(codes=f"{name}.codes", scale=f"{name}.scale")
    # Shared experts may have been replaced within a layer's experts by now, so these are found afterwards.
    for name, module in list(model.named_modules()):
        if not isinstance(module, MoE):
            continue
        pieces = [piece for stack in ("w13", "w2") for piece in sources[f"{name}.experts.{stack}"]]
        first = pieces[0]
        if first.scale is not None and all((p.format, p.block) == (first.format, first.block) for p in pieces):
            model.set_submodule(name, QuantizedMoE(module, first.block, scale_dtype(first.scale), kernels))
            stored |= {
                f"{name}.experts.{stack}": StoredNames(
                    codes=f"{name}.experts.{stack}", scale=f"{name}.experts.{stack}_scale"
                )
                for stack in ("w13", "w2")
            }
    return stored


def check_fp4_scale(name: str, scale: torch.Tensor) -> None:
    """Raise ValueError for scales above 2, which the packed products do not take."""
    if scale.dtype == torch.float8_e8m0fnu and int(scale.view(torch.uint8).max()) > _E8M0_MOST:
        raise ValueError(f"{name} holds a scale above 2, which packed products do not take: load it dequantised")


def raw_regions(piece: Piece, codes: torch.Tensor, scale: torch.Tensor) -> Iterator[torch.Tensor]:
    """Where a piece's codes and scales go in a parameter's two buffers."""
    if piece.expert is None:
        yield from (codes, scale)
        return
    yield codes[piece.expert, piece.row_start : piece.row_stop]
    # Of FP4 every row has its scales; a block of FP8 rows begins anew with each piece.
    rows = 1 if piece.block is None else piece.block[0]
    first, count = -(-piece.row_start // rows), -(-(piece.row_stop - piece.row_start) // rows)
    yield scale[piece.expert, first : first + count]
