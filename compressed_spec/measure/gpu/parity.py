"""Every kernel on the device against float64 and against torch in the same precision.

T = nodes, D = width, H = heads, R = pool rows, W = window, K = entries listed
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from compressed_spec.kernels import (
    attention,
    attention_triton,
    commit,
    commit_triton,
    compress,
    compress_triton,
    coupled_triton,
    expert_tiles,
    expert_tiles_triton,
    fp8_linear,
    fp8_linear_triton,
    fp8_rows,
    hyper_connection,
    hyper_connection_triton,
    indexer,
    indexer_triton,
    norm,
    norm_rope_triton,
    rope,
    route_triton,
    stored_experts,
    stored_experts_triton,
)
from compressed_spec.kernels.moe import Routing
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.measure.gpu.scale import Scale
from compressed_spec.noise import seed_tensor
from compressed_spec.sampling import select_tokens

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """One comparison. error, torch_error: largest distance to float64 of the kernel and of torch. allowed: of error.

    For kernels that must be exact, `error` counts the numbers that differ.
    """

    op: str
    dtype: str
    error: float
    torch_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


def parities(scale: Scale, device: torch.device) -> Iterator[Parity]:
    """All ops, in the run's dtype."""
    torch.manual_seed(0)
    products = (_fp8_linear, _fp4_experts, _attention, _packed_attention, _norm_rope, _streams, _pooling, _index_scores)
    for check in (*products, _routing, _selection, _fp8_rows, _tiles, _commit, _tokens):
        yield from check(scale, device)


def _compare(op: str, ours: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], inputs: Tensors) -> Parity:
    """Inputs in the run's dtype; in float64 the plain version is exact."""
    exact = plain(**{name: x.double() if x.is_floating_point() else x for name, x in inputs.items()})
    actual, same = ours(**inputs), plain(**inputs)
    dtype = torch.promote_types(next(x.dtype for x in inputs.values() if x.is_floating_point()), torch.float16)
    error, reference = ((x.double() - exact).abs().max().item() for x in (actual, same))
    rounding = torch.finfo(dtype).eps * exact.abs().max().item()
    if not torch.isfinite(actual).all():
        error = float("inf")
    return Parity(op=op, dtype=str(dtype)[6:], error=error, torch_error=reference, allowed=2 * reference + rounding)


def _equal(op: str, actual: torch.Tensor, expected: torch.Tensor) -> Parity:
    differing = float((actual != expected).sum())
    return Parity(op=op, dtype=str(actual.dtype)[6:], error=differing, torch_error=0.0, allowed=0.0)


def _fp8_linear(scale: Scale, device: torch.device) -> Iterator[Parity]:
    width, out = scale.raw["hidden_size"], scale.raw["q_lora_rank"]
    codes = torch.randint(0, 120, (out, width), dtype=torch.uint8, device=device)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, device=device) << 7
    grid = (-(-out // 128), -(-width // 128))
    stored = torch.randint(110, 120, grid, dtype=torch.uint8, device=device)
    for name, scales in (("e8m0", stored.view(torch.float8_e8m0fnu)), ("f32", torch.rand(grid, device=device))):
        weight = fp8_linear.FP8Weight(codes=codes.view(torch.float8_e4m3fn), scale=scales, block=(128, 128))
        for rows in (3, 70):
            yield _compare(
                f"fp8_linear/{name}/{rows} rows",
                lambda x, w=weight: fp8_linear_triton.fp8_linear(x, w),
                lambda x, w=weight: fp8_linear.fp8_linear(x, w),
                {"x": torch.randn(rows, width, device=device).to(scale.dtype)},
            )


def _fp4_experts(scale: Scale, device: torch.device) -> Iterator[Parity]:
    width, inner = scale.raw["hidden_size"], scale.raw["moe_intermediate_size"]
    experts, chosen = min(scale.raw["n_routed_experts"], 16), scale.raw["num_experts_per_tok"]

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(116, 121, shape, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)

    packed = stored_experts.StoredExperts(
        w13=codes(experts, 2 * inner, width // 2),
        w13_scale=scales(experts, 2 * inner, width // 32),
        w2=codes(experts, width, inner // 2),
        w2_scale=scales(experts, width, inner // 32),
    )
    for rows in (3, 100):
        picks = torch.rand(rows, experts, device=device).topk(chosen, dim=1).indices
        weights = torch.rand(rows, chosen, device=device)

        def plain(x: torch.Tensor, picks: torch.Tensor = picks, weights: torch.Tensor = weights) -> torch.Tensor:
            wide = torch.promote_types(x.dtype, torch.float32)
            routing = Routing(experts_TK=picks, weights_TK=weights.to(wide))
            return stored_experts.stored_experts(x, routing, packed, 10.0)

        def ours(x: torch.Tensor, picks: torch.Tensor = picks, weights: torch.Tensor = weights) -> torch.Tensor:
            routing = Routing(experts_TK=picks, weights_TK=weights)
            return stored_experts_triton.stored_experts(x, routing, packed, 10.0)

        x_TD = torch.randn(rows, width, device=device).to(scale.dtype)
        yield _compare(f"fp4_experts/{rows} rows", ours, plain, {"x": x_TD})


def _attention(scale: Scale, device: torch.device) -> Iterator[Parity]:
    heads, width, window = scale.raw["num_attention_heads"], scale.raw["head_dim"], scale.raw["sliding_window"]
    for nodes, listed in ((2, 8 * window), (40, window)):
        rows_TW = torch.randint(-1, 300, (nodes, window), device=device)
        rows_TK = torch.randint(-1, 500, (nodes, listed), device=device)

        def ours(lists: tuple[torch.Tensor, torch.Tensor] = (rows_TW, rows_TK), **x: torch.Tensor) -> torch.Tensor:
            return attention_triton.sparse_attention(x["q"], x["window"], lists[0], x["entries"], lists[1], x["sink"])

        def plain(lists: tuple[torch.Tensor, torch.Tensor] = (rows_TW, rows_TK), **x: torch.Tensor) -> torch.Tensor:
            return attention.sparse_attention(x["q"], x["window"], lists[0], x["entries"], lists[1], x["sink"])

        inputs = {
            "q": torch.randn(nodes, heads, width, device=device).to(scale.dtype),
            "window": torch.randn(300, width, device=device).to(scale.dtype),
            "entries": torch.randn(500, width, device=device).to(scale.dtype),
            "sink": torch.randn(heads, device=device),
        }
        yield _compare(f"sparse_attention/{nodes} nodes, {listed} entries", ours, plain, inputs)


def _packed_attention(scale: Scale, device: torch.device) -> Iterator[Parity]:
    """Over FP8 rows."""
    heads, rotated, width = scale.raw["num_attention_heads"], scale.raw["qk_rope_head_dim"], scale.raw["head_dim"]
    if (width - rotated) % fp8_rows.GROUP:
        width = rotated + fp8_rows.GROUP
    pools = [fp8_rows.encode_rows(torch.randn(rows, width, device=device), rotated) for rows in (300, 500)]
    for nodes in (2, 40):
        window, entries = (
            torch.randint(-1, len(pool), (nodes, scale.raw["sliding_window"]), device=device) for pool in pools
        )

        def ours(
            q: torch.Tensor, sink: torch.Tensor, rows: torch.Tensor = window, more: torch.Tensor = entries
        ) -> torch.Tensor:
            return attention_triton.sparse_attention(q, pools[0], rows, pools[1], more, sink, rotated)

        def plain(
            q: torch.Tensor, sink: torch.Tensor, rows: torch.Tensor = window, more: torch.Tensor = entries
        ) -> torch.Tensor:
            return attention.sparse_attention(q, pools[0], rows, pools[1], more, sink, rotated)

        q_THD = torch.randn(nodes, heads, width, device=device).to(scale.dtype)
        inputs = {"q": q_THD, "sink": torch.randn(heads, device=device)}
        yield _compare(f"sparse_attention/{nodes} nodes, FP8 rows", ours, plain, inputs)


def _norm_rope(scale: Scale, device: torch.device) -> Iterator[Parity]:
    heads, width = scale.raw["num_attention_heads"], scale.raw["head_dim"]
    angles = torch.randn(9, scale.raw["qk_rope_head_dim"] // 2, device=device)
    inputs = {
        "x": torch.randn(9, heads, width, device=device).to(scale.dtype),
        "weight": torch.rand(width, device=device),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    yield _compare(
        "norm_rope",
        lambda x, weight, cos, sin: norm_rope_triton.norm_rope(x, weight, 1e-6, cos, sin),
        lambda x, weight, cos, sin: rope.apply_rope(norm.rms_norm(x, weight, 1e-6), cos, sin),
        inputs,
    )


def _fp8_rows(scale: Scale, device: torch.device) -> Iterator[Parity]:
    """Rows stored in FP8 by the kernel are, byte for byte, those that simulated quantisation stores on a CPU."""
    rotated, width = 64, 512
    angles = torch.randn(9, rotated // 2, device=device)
    x_TD = torch.randn(9, width, device=device).to(torch.bfloat16)
    cos, sin = angles.cos(), angles.sin()
    packed = torch.empty((9, fp8_rows.row_bytes(width, rotated)), dtype=torch.uint8, device=device)
    norm_rope_triton.norm_rope(x_TD.unsqueeze(1), None, 1e-6, cos, sin, out_NX=packed)
    plain = norm_rope_triton.norm_rope(x_TD.unsqueeze(1), None, 1e-6, cos, sin).squeeze(1)
    yield _equal("fp8_rows", packed.cpu(), fp8_rows.encode_rows(plain.cpu(), rotated))


def _streams(scale: Scale, device: torch.device) -> Iterator[Parity]:
    width, streams = scale.raw["hidden_size"], scale.raw["hc_mult"]
    mixes, fast = (2 + streams) * streams, numerics_named("fast")
    settings: dict[str, Any] = {"iterations": scale.raw["hc_sinkhorn_iters"], "eps": 1e-6, "norm_eps": 1e-6}
    inputs = {
        "x": torch.randn(7, streams, width, device=device).to(scale.dtype),
        "output": torch.randn(7, width, device=device).to(scale.dtype),
        "fn": torch.randn(mixes, streams * width, device=device) * (streams * width) ** -0.5,
        "scale": torch.rand(3, device=device),
        "base": torch.randn(mixes, device=device),
    }

    def ours(x: torch.Tensor, output: torch.Tensor, **site: Any) -> torch.Tensor:
        mixed = hyper_connection_triton.mix_and_collapse(x, **site, **settings)
        expanded = hyper_connection_triton.expand(output, x, mixed.weights)
        return torch.cat((mixed.input_TD.unsqueeze(1), expanded), dim=1)

    def plain(x: torch.Tensor, output: torch.Tensor, **site: Any) -> torch.Tensor:
        weights = hyper_connection.mix_weights(x, **site, **settings, numerics=fast)
        expanded = hyper_connection.expand(output, x, weights, fast)
        return torch.cat((hyper_connection.collapse(x, weights.pre_TM).unsqueeze(1), expanded), dim=1)

    yield _compare("hyper_connection", ours, plain, inputs)


def _pooling(scale: Scale, device: torch.device) -> Iterator[Parity]:
    """Raw rows are float32 whatever the activations are."""
    width = scale.raw["head_dim"]
    for overlap, span in ((True, 8), (False, 128)):
        rows_CK = torch.randint(-1, 300, (5, span), device=device)

        def ours(buffer: torch.Tensor, rows: torch.Tensor = rows_CK, overlap: bool = overlap) -> torch.Tensor:
            return compress_triton.pool_windows(buffer, rows, overlap=overlap)

        def plain(buffer: torch.Tensor, rows: torch.Tensor = rows_CK, overlap: bool = overlap) -> torch.Tensor:
            return compress.pool_windows(buffer, rows, overlap=overlap)

        buffer_RD = torch.randn(300, width * (4 if overlap else 2), device=device)
        yield _compare(f"pool_windows/{span} tokens", ours, plain, {"buffer": buffer_RD})


def _index_scores(scale: Scale, device: torch.device) -> Iterator[Parity]:
    heads, width = scale.raw["index_n_heads"], scale.raw["index_head_dim"]
    spans = ((0, 3, 10, 70), (3, 5, 100, 200))
    extra_TX = torch.randint(300, 310, (5, 2), device=device)
    inputs = {
        "q": torch.randn(5, heads, width, device=device).to(scale.dtype),
        "weights": torch.rand(5, heads, device=device),
        "keys": torch.randn(310, width, device=device).to(scale.dtype),
    }
    seen_TN = indexer.index_scores(inputs["q"].float(), inputs["weights"], inputs["keys"], spans, extra_TX, 202) > -1e30

    def ours(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return indexer_triton.index_scores(q, weights, keys, spans, extra_TX, 202)[seen_TN]

    def plain(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return indexer.index_scores(q, weights.to(q.dtype), keys, spans, extra_TX, 202)[seen_TN]

    yield _compare("index_scores", ours, plain, inputs)


def _routing(scale: Scale, device: torch.device) -> Iterator[Parity]:
    experts, chosen = scale.raw["n_routed_experts"], scale.raw["num_experts_per_tok"]
    logits_TE, bias_E = torch.randn(40, experts, device=device), torch.randn(experts, device=device)
    tokens_T = torch.zeros(40, dtype=torch.int64, device=device)
    picks = route_triton.route(logits_TE, bias_E, None, tokens_T, num_chosen=chosen, scaling=1.5)
    scores_TE = torch.nn.functional.softplus(logits_TE.double()).sqrt()
    yield _equal("route", picks.experts_TK, (scores_TE + bias_E).topk(chosen, dim=-1).indices)


def _selection(scale: Scale, device: torch.device) -> Iterator[Parity]:
    """Scores with many ties."""
    scores_TN = torch.randint(0, 50, (9, 700), device=device).float()
    scores_TN[:, 600:] = -torch.inf
    ours, plain = (m.select_entries(scores_TN, scale.raw["index_topk"]) for m in (indexer_triton, indexer))
    yield _equal("select_entries", ours, plain)


def _tiles(scale: Scale, device: torch.device) -> Iterator[Parity]:
    num_experts = scale.raw["n_routed_experts"]
    experts_N = torch.randint(0, num_experts, (300,), device=device)
    ours, plain = (m.expert_tiles(experts_N, num_experts, 16) for m in (expert_tiles_triton, expert_tiles))
    yield _equal("expert_tiles/order", ours.order_N, plain.order_N)
    yield _equal("expert_tiles/expert", ours.expert_M, plain.expert_M)


def _commit(scale: Scale, device: torch.device) -> Iterator[Parity]:
    pool_LRD = torch.randn(3, 90, scale.raw["head_dim"], device=device).to(scale.dtype)
    lanes = [
        commit.Lane(kind=commit.RING, per_sequence=8, shift=-1, ratio=1, num_persistent=32),
        commit.Lane(kind=commit.ENTRIES, per_sequence=9, shift=0, ratio=4, num_persistent=36),
        commit.Lane(kind=commit.SINGLE, per_sequence=1, shift=0, ratio=1, num_persistent=4),
    ]
    path_BA = torch.tensor([[0, 2, 3, -1], [4, -1, -1, -1], [-1, -1, -1, -1]], device=device)
    position_T = torch.tensor([9, 10, 10, 11, 3], device=device)
    sequence_T, slot_T = torch.tensor([1, 1, 1, 1, 3], device=device), torch.arange(5, device=device)
    pools = [[pool_LRD.clone() for _ in lanes] for _ in range(2)]
    table = commit.lane_table(lanes, device)
    moves = commit_triton.commit_moves(path_BA, position_T, sequence_T, slot_T, table)
    commit_triton.commit_rows(commit_triton.pool_table(pools[0], range(3)), moves)
    commit.commit_rows(pools[1], range(3), commit.commit_moves(path_BA, position_T, sequence_T, slot_T, table))
    yield _equal("commit", torch.stack(pools[0]), torch.stack(pools[1]))


def _tokens(scale: Scale, device: torch.device) -> Iterator[Parity]:
    """The device's tokens are those of a CPU, from equal log probabilities."""
    vocab = min(scale.raw["vocab_size"], 20000)
    log_p_NV = torch.log_softmax(3 * torch.randn(8, vocab, dtype=torch.float64), dim=-1)
    seeds_N, positions_N = seed_tensor(range(8)), torch.arange(8) * 1000
    expected = select_tokens(log_p_NV, seeds_N, positions_N)
    ones_N = torch.ones(8, dtype=torch.float64, device=device)
    actual = coupled_triton.coupled_tokens(
        log_p_NV.to(device), ones_N, torch.zeros_like(ones_N), seeds_N.to(device), positions_N.to(device)
    )
    yield _equal("coupled_tokens", actual.cpu(), expected)
