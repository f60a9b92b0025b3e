"""The whole model over packed rows in dense form, from the parameters of a `DeepseekV4`: what it is trained with.

Same function as `DeepseekV4.score`, several times faster with gradients on a CPU, because rows are chains from
position 0.

B = rows, L = tokens a row, T = B L, M = residual streams, D = model width, K = experts a token
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from compressed_spec.kernels.norm import rms_norm
from compressed_spec.models.deepseek_v4.block import Block, Gate
from compressed_spec.models.deepseek_v4.config import AttentionKind, LayerSpec
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.rope import rotation
from compressed_spec.training.autograd import GroupedExperts, Sinkhorn
from compressed_spec.training.dense_attention import (
    Geometry,
    Weights,
    chained_attention,
    compressed_attention,
    sliding_attention,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a mixing site hands to its block: the normed input `[T, D]`, and how its output joins the streams."""

    streams_TMD: torch.Tensor
    x_TD: torch.Tensor
    post_TM: torch.Tensor
    comb_MMT: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Passed:
    """One forward: the streams after each layer that ran, the indexers' loss, tokens an expert got (by gate)."""

    streams: list[torch.Tensor]
    index_loss: torch.Tensor
    loads: dict[str, torch.Tensor] = field(default_factory=dict)


def _enter(
    streams_TMD: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normed input, `post_TM` and mixing logits `[M, M, T]` of a site."""
    m = streams_TMD.shape[1]
    flat = streams_TMD.flatten(1)
    mixed = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(mixed[:, :m] * scale[0] + base[:m]) + hc_eps
    post = 2.0 * torch.sigmoid(mixed[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    logits = (mixed[:, 2 * m :] * scale[2] + base[2 * m :]).T.contiguous().view(m, m, -1)
    x_TD = sum(pre[:, j, None] * streams_TMD[:, j] for j in range(m))
    assert isinstance(x_TD, torch.Tensor)
    return rms_norm(x_TD, norm_weight, norm_eps), post, logits


def _leave(
    y_TD: torch.Tensor, streams_TMD: torch.Tensor, post_TM: torch.Tensor, comb_MMT: torch.Tensor
) -> torch.Tensor:
    """The next streams."""
    m = streams_TMD.shape[1]
    mixed = []
    for k in range(m):
        out = post_TM[:, k, None] * y_TD
        for j in range(m):
            out = out + comb_MMT[j, k].unsqueeze(-1) * streams_TMD[:, j]
        mixed.append(out)
    return torch.stack(mixed, dim=1)


def _leave_enter(
    y_TD: torch.Tensor,
    streams_TMD: torch.Tensor,
    post_TM: torch.Tensor,
    comb_MMT: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    streams_TMD = _leave(y_TD, streams_TMD, post_TM, comb_MMT)
    return streams_TMD, *_enter(streams_TMD, fn, scale, base, norm_weight, norm_eps, hc_eps)


def _shared_expert(
    x_TD: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor, limit: float
) -> torch.Tensor:
    gate, up = F.linear(x_TD, w1), F.linear(x_TD, w3)
    return F.linear(F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit), w2)


def _collapse(
    streams_TMD: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """The normed single stream before the vocabulary head."""
    flat = streams_TMD.flatten(1)
    mixed = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(mixed * scale + base) + hc_eps
    x_TD = (pre.unsqueeze(-1) * streams_TMD).sum(1)
    return rms_norm(x_TD, norm_weight, norm_eps)


class DenseForward:
    """`compile`: whether torch.compile fuses the pieces (not for tests: it takes minutes).

    `weights` maps each matrix to what the forward reads, by default the parameter itself; fake quantisation puts other
    tensors there.
    """

    def __init__(self, model: DeepseekV4, length: int, *, compile: bool = False) -> None:
        self.model, self.config, self.length = model, model.config, length
        self.weights: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        wrap: Callable[[Any], Any] = torch.compile(dynamic=False, fullgraph=True) if compile else lambda f: f
        self._enter, self._leave, self._leave_enter = wrap(_enter), wrap(_leave), wrap(_leave_enter)
        self._shared, self._collapse = wrap(_shared_expert), wrap(_collapse)
        self._sliding, self._compressed, self._chained = (
            wrap(sliding_attention),
            wrap(compressed_attention),
            wrap(chained_attention),
        )
        self._spec = LayerSpec(kind=AttentionKind.SLIDING, ratio=0, hash_routed=False)

    def rope(self, kind: AttentionKind, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        name = "rope_main" if kind is AttentionKind.SLIDING else "rope_compress"
        turned = rotation(self.model.get_buffer(name), torch.arange(self.length) + shift)
        return turned.cos_NP, turned.sin_NP

    def geometry(self, spec: LayerSpec) -> Geometry:
        csa = spec.kind is AttentionKind.CSA
        return Geometry(
            length=self.length,
            window=self.config.sliding_window,
            num_heads=self.config.num_attention_heads,
            groups=self.config.o_groups,
            eps=self.config.rms_norm_eps,
            ratio=spec.ratio,
            index_heads=self.config.index_n_heads if csa else 0,
            index_topk=self.config.index_topk if csa else 0,
        )

    def under(self, prefix: str) -> Weights:
        """Weights below a prefix, without it."""
        return {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}

    def _site_weights(self, prefix: str, site: str) -> tuple[torch.Tensor, ...]:
        parts = (f"hc_{site}_fn", f"hc_{site}_scale", f"hc_{site}_base", f"{site}_norm.weight")
        return tuple(self.weights[prefix + part] for part in parts)

    def _sinkhorn(self, logits_MMT: torch.Tensor) -> torch.Tensor:
        comb: torch.Tensor = Sinkhorn.apply(logits_MMT, self.config.hc_sinkhorn_iters, self.config.hc_eps)
        return comb

    def _moe(
        self, prefix: str, block: Block, x_TD: torch.Tensor, tokens_T: torch.Tensor, passed: Passed | None
    ) -> torch.Tensor:
        w = self.weights
        gate = block.ffn.gate
        assert isinstance(gate, Gate)
        scores_TE = F.softplus(F.linear(x_TD, w[f"{prefix}ffn.gate.weight"])).sqrt()
        if gate.hash_routed:
            experts_TK = gate.get_buffer("tid2eid")[tokens_T]
        else:
            experts_TK = (scores_TE.detach() + w[f"{prefix}ffn.gate.bias"]).topk(gate.topk, dim=-1).indices
            if passed is not None:
                passed.loads[f"{prefix}ffn.gate.bias"] = torch.bincount(
                    experts_TK.flatten(), minlength=scores_TE.shape[1]
                )
        weights_TK = scores_TE.gather(1, experts_TK)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True) * gate.scaling
        routed_TD: torch.Tensor = GroupedExperts.apply(
            x_TD,
            weights_TK,
            experts_TK,
            w[f"{prefix}ffn.experts.w13"],
            w[f"{prefix}ffn.experts.w2"],
            self.config.swiglu_limit,
        )
        shared = (w[f"{prefix}ffn.shared_experts.w{i}.weight"] for i in (1, 2, 3))
        shared_TD: torch.Tensor = self._shared(x_TD, *shared, self.config.swiglu_limit)
        return routed_TD + shared_TD

    def _half(self, entered: tuple[torch.Tensor, ...], streams_TMD: torch.Tensor) -> Site:
        x_TD, post_TM, logits_MMT = entered
        return Site(streams_TMD=streams_TMD, x_TD=x_TD, post_TM=post_TM, comb_MMT=self._sinkhorn(logits_MMT))

    def _block(
        self,
        prefix: str,
        block: Block,
        streams_TMD: torch.Tensor,
        tokens_T: torch.Tensor,
        attend: Callable[[torch.Tensor], torch.Tensor],
        passed: Passed | None,
    ) -> torch.Tensor:
        eps = (self.config.rms_norm_eps, self.config.hc_eps)
        entered = self._enter(streams_TMD, *self._site_weights(prefix, "attn"), *eps)
        site = self._half(entered, streams_TMD)
        streams_TMD, *entered = self._leave_enter(
            attend(site.x_TD), site.streams_TMD, site.post_TM, site.comb_MMT, *self._site_weights(prefix, "ffn"), *eps
        )
        site = self._half(tuple(entered), streams_TMD)
        fed_TD = self._moe(prefix, block, site.x_TD, tokens_T, passed)
        result: torch.Tensor = self._leave(fed_TD, site.streams_TMD, site.post_TM, site.comb_MMT)
        return result

    def __call__(self, tokens_BL: torch.Tensor, *, select: bool = True, skip: frozenset[int] = frozenset()) -> Passed:
        """Streams `[T, M, D]` after each layer. select: real indexer choice. skip: layers to leave out."""
        tokens_T = tokens_BL.flatten()
        embedded = F.embedding(tokens_T, self.weights["embed.weight"])
        streams_TMD = embedded.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        passed = Passed(streams=[], index_loss=embedded.new_zeros(()))
        for i, (block, spec) in enumerate(zip(self.model.layers, self.config.layers, strict=True)):
            if i in skip:
                passed.streams.append(streams_TMD)
                continue
            assert isinstance(block, Block)

            def attend(x_TD: torch.Tensor, spec: LayerSpec = spec, i: int = i) -> torch.Tensor:
                w, (cos, sin), geo = self.under(f"layers.{i}.attn."), self.rope(spec.kind), self.geometry(spec)
                output: torch.Tensor
                if spec.kind is AttentionKind.SLIDING:
                    output, _ = self._sliding(x_TD, w, cos, sin, geo)
                else:
                    output, loss = self._compressed(x_TD, w, cos, sin, geo, torch.tensor(select))
                    passed.index_loss = passed.index_loss + loss
                return output

            streams_TMD = self._block(f"layers.{i}.", block, streams_TMD, tokens_T, attend, passed)
            passed.streams.append(streams_TMD)
        return passed

    def hidden(self, streams_TMD: torch.Tensor, prefix: str = "") -> torch.Tensor:
        """What the vocabulary head reads `[T, D]`: of the target, or of the draft head (prefix "mtp.0.")."""
        parts = ("hc_head_fn", "hc_head_scale", "hc_head_base", "norm.weight")
        w = [self.weights[prefix + part] for part in parts]
        result: torch.Tensor = self._collapse(streams_TMD, *w, self.config.rms_norm_eps, self.config.hc_eps)
        return result

    def draft(
        self, streams_TMD: torch.Tensor, next_tokens: list[torch.Tensor], passed: Passed | None
    ) -> list[torch.Tensor]:
        """The draft head's streams at each chain step, all chains at once; chain t starts from stream t.

        next_tokens: the token each step is told, `[B, L]`: t + 1, then t + 2, ...
        """
        head, w, eps, prefix = self.model.mtp_head, self.weights, self.config.rms_norm_eps, "mtp.0."
        assert head is not None, "this model has no draft head"
        geo, attn = self.geometry(self._spec), self.under("mtp.0.attn.")
        results: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        for step, tokens_BL in enumerate(next_tokens):
            tokens_T = tokens_BL.flatten()
            embedded = rms_norm(F.embedding(tokens_T, w["embed.weight"]), w["mtp.0.enorm.weight"], eps)
            fused = F.linear(rms_norm(streams_TMD, w["mtp.0.hnorm.weight"], eps), w["mtp.0.h_proj.weight"])
            fused = fused + F.linear(embedded, w["mtp.0.e_proj.weight"]).unsqueeze(1)
            cos, sin = self.rope(AttentionKind.SLIDING, step)

            def attend(x_TD: torch.Tensor, step: int = step, cos: Any = cos, sin: Any = sin) -> torch.Tensor:
                output: torch.Tensor
                if step == 0:
                    output, own = self._sliding(x_TD, attn, cos, sin, geo)
                else:
                    blank = rows[0].new_zeros(rows[0].shape)
                    earlier = [*rows[1:], *[blank] * (len(next_tokens) - 1 - step)]
                    earlier_TSE = torch.stack(earlier, dim=1) if earlier else blank.unsqueeze(1)[:, :0]
                    output, own = self._chained(x_TD, attn, cos, sin, rows[0], earlier_TSE, torch.tensor(step), geo)
                rows.append(own)
                return output

            streams_TMD = self._block(prefix, head, fused, tokens_T, attend, passed if step == 0 else None)
            results.append(streams_TMD)
        return results
