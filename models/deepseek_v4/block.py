"""One decoder block: attention and mixture of experts, each between a collapse and an expansion of the streams.

T = nodes, M = residual streams, D = model width, E = experts, F = expert width
"""

from dataclasses import dataclass

import torch
from torch import nn

from compressed_spec.kernels.hyper_connection import MixWeights, collapse, expand
from compressed_spec.kernels.moe import Routing, gathered_experts, route, routed_experts, router_scores, swiglu
from compressed_spec.kernels.moe_part import some_experts
from compressed_spec.models.deepseek_v4.attention import Attention, AttentionRound, Listed, Projected
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config, LayerSpec
from compressed_spec.models.deepseek_v4.modules import HyperConnected, Linear, Norm, Precision
from compressed_spec.models.deepseek_v4.rope import Rotation
from compressed_spec.parallel import ParallelGroup


class Gate(nn.Module):
    """The router: by score with a selection bias, or by a table of token ids (hash-routed layers)."""

    def __init__(self, config: DeepseekV4Config, hash_routed: bool, precision: Precision) -> None:
        super().__init__()
        self.topk, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.numerics = precision.numerics
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, dtype=precision.wide))
        self.hash_routed = hash_routed
        if hash_routed:
            self.register_buffer("tid2eid", torch.empty(config.vocab_size, self.topk, dtype=torch.int64))
        else:
            self.bias = nn.Parameter(torch.empty(config.n_routed_experts, dtype=precision.wide))

    def forward(self, x_TD: torch.Tensor, tokens_T: torch.Tensor) -> Routing:
        scores_TE = router_scores(x_TD, self.weight, self.numerics)
        if self.hash_routed:
            experts_TK = self.get_buffer("tid2eid")[tokens_T]
        else:
            experts_TK = (scores_TE + self.bias).topk(self.topk, dim=-1).indices
        return route(scores_TE, experts_TK, self.scaling)


class SharedExperts(nn.Module):
    """The expert that every token takes; w1 = gate, w3 = up, w2 = down."""

    def __init__(self, config: DeepseekV4Config, precision: Precision) -> None:
        super().__init__()
        self.limit, self.numerics = config.swiglu_limit, precision.numerics
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size, precision)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size, precision)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size, precision)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.w2(swiglu(self.w1(x_TD), self.w3(x_TD), self.limit, self.numerics))
        return output


class Experts(nn.Module):
    """The weights of this process's routed experts, stacked: w13 is gate then up."""

    def __init__(self, config: DeepseekV4Config, dtype: torch.dtype, group: ParallelGroup) -> None:
        super().__init__()
        num, width, inner = group.part(config.n_routed_experts), config.hidden_size, config.moe_intermediate_size
        self.w13 = nn.Parameter(torch.empty(num, 2 * inner, width, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(num, width, inner, dtype=dtype))


class MoE(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(self, config: DeepseekV4Config, hash_routed: bool, precision: Precision, group: ParallelGroup) -> None:
        super().__init__()
        self.limit, self.numerics = config.swiglu_limit, precision.numerics
        self.group, self.own = group, group.span(config.n_routed_experts)
        self.gate = Gate(config, hash_routed, precision)
        self.experts = Experts(config, precision.dtype, group)
        self.shared_experts = SharedExperts(config, precision)

    def route(self, x_TD: torch.Tensor, tokens_T: torch.Tensor) -> Routing:
        """Which experts each node takes."""
        routing: Routing = self.gate(x_TD, tokens_T)
        return routing

    def forward(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        w13_EFD, w2_EDF = self.experts.w13, self.experts.w2
        if self.group.size == 1:
            return self._with_shared(x_TD, routed_experts(x_TD, routing, w13_EFD, w2_EDF, self.limit, self.numerics))
        own_TD = some_experts(x_TD, routing, self.own, w13_EFD, w2_EDF, self.limit, self.numerics)
        return self._with_shared(x_TD, self.group.all_reduce(own_TD))

    def few(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """`forward` of few nodes, in operations whose shapes do not depend on the routing; in one process."""
        routed_TD = gathered_experts(x_TD, routing, self.experts.w13, self.experts.w2, self.limit, self.numerics)
        return self._with_shared(x_TD, routed_TD)

    def _with_shared(self, x_TD: torch.Tensor, routed_TD: torch.Tensor) -> torch.Tensor:
        shared_TD: torch.Tensor = self.shared_experts(x_TD)
        return (routed_TD + shared_TD.to(routed_TD.dtype)).to(x_TD.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """Before attention's rows are written: its products, and how its output will join the streams."""

    projected: Projected
    mix: MixWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """After attention: the streams, the experts' input and routing, and how their output will join the streams."""

    streams_TMD: torch.Tensor
    x_TD: torch.Tensor
    routing: Routing
    mix: MixWeights


class Block(HyperConnected):
    """One layer of the stack.

    `enter`, `attend` and `few` are functions of tensors alone.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        spec: LayerSpec,
        layer: int,
        compressed_layer: int,
        precision: Precision,
        group: ParallelGroup,
    ) -> None:
        super().__init__(config, precision)
        self.attn_norm = Norm(config.hidden_size, config.rms_norm_eps, precision)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps, precision)
        self.add_site("attn")
        self.add_site("ffn")
        self.attn = Attention(config, spec, layer, compressed_layer, precision, group)
        self.ffn = MoE(config, spec.hash_routed, precision, group)

    def forward(self, streams_TMD: torch.Tensor, tokens_T: torch.Tensor, here: AttentionRound) -> torch.Tensor:
        """The streams after this layer; writes the nodes' rows."""
        entered = self.enter(streams_TMD, here.rotation, here.phase_T)
        listed = self.attn.write(entered.projected, here)
        attended = self.attend(streams_TMD, entered, listed, here.rotation, tokens_T)
        return self._leave(self.ffn(attended.x_TD, attended.routing), attended)

    def few(self, streams_TMD: torch.Tensor, tokens_T: torch.Tensor, here: AttentionRound) -> torch.Tensor:
        """`forward` of few nodes as one function of tensors (here.scratch is a `LayerScratch`).

        For compiling: uncompiled, it moves far more memory.
        """
        entered = self.enter(streams_TMD, here.rotation, here.phase_T)
        listed = self.attn.write(entered.projected, here)
        attended = self.attend(streams_TMD, entered, listed, here.rotation, tokens_T)
        return self._leave(self.ffn.few(attended.x_TD, attended.routing), attended)

    def enter(self, streams_TMD: torch.Tensor, rotation: Rotation, phase_T: torch.Tensor | None) -> Entered:
        mix = self.mix("attn", streams_TMD)
        x_TD = self.attn_norm(collapse(streams_TMD, mix.pre_TM))
        return Entered(projected=self.attn.project(x_TD, rotation, phase_T), mix=mix)

    def attend(
        self,
        streams_TMD: torch.Tensor,
        entered: Entered,
        listed: Listed,
        rotation: Rotation,
        tokens_T: torch.Tensor,
    ) -> Attended:
        attended_TD = self.attn.attend(entered.projected.q_THD, listed, rotation)
        streams_TMD = expand(attended_TD, streams_TMD, entered.mix, self.precision.numerics)
        mix = self.mix("ffn", streams_TMD)
        x_TD = self.ffn_norm(collapse(streams_TMD, mix.pre_TM))
        return Attended(streams_TMD=streams_TMD, x_TD=x_TD, routing=self.ffn.route(x_TD, tokens_T), mix=mix)

    def _leave(self, fed_TD: torch.Tensor, attended: Attended) -> torch.Tensor:
        return expand(fed_TD, attended.streams_TMD, attended.mix, self.precision.numerics)
