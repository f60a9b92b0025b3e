"""Bytes a second of each kernel at V4-Flash's dimensions, against the device's own copy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from compressed_spec.kernels import (
    attention_triton,
    coupled_triton,
    fp8_linear_triton,
    hyper_connection_triton,
    indexer_triton,
    norm_rope_triton,
    stored_experts_triton,
)
from compressed_spec.kernels.fp8_linear import FP8Weight
from compressed_spec.kernels.moe import Routing
from compressed_spec.kernels.stored_experts import StoredExperts
from compressed_spec.measure.gpu.scale import Scale
from compressed_spec.measure.gpu.timing import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """seconds of one call; num_bytes that it must at least move; share of the copy bandwidth that they make."""

    kernel: str
    nodes: int
    seconds: float
    num_bytes: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    kernel: str
    nodes: int
    num_bytes: int
    call: Callable[[], object]


def kernel_times(scale: Scale, bandwidth: float, device: torch.device) -> Iterator[KernelTime]:
    """A round of 8 nodes, and rounds of the largest batch with 1 and 8 nodes a tree."""
    torch.manual_seed(0)
    largest = scale.batches[-1]
    for batch, size in ((1, 8), (largest, 1), (largest, 8)):
        for make in (_fp8, _experts, _attention, _indexer, _streams, _query, _tokens):
            for work in make(scale, batch, size, device):
                took = seconds(work.call, device)
                yield KernelTime(
                    kernel=work.kernel,
                    nodes=work.nodes,
                    seconds=took,
                    num_bytes=work.num_bytes,
                    share=work.num_bytes / took / bandwidth,
                )


def _bytes(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _fp8(scale: Scale, batch: int, size: int, device: torch.device) -> Iterator[_Work]:
    raw, nodes = scale.raw, batch * size
    heads = raw["num_attention_heads"] * raw["head_dim"]
    maps = {
        "wq_a": (raw["q_lora_rank"], raw["hidden_size"]),
        "wq_b": (heads, raw["q_lora_rank"]),
        "wkv": (raw["head_dim"], raw["hidden_size"]),
        "wo_b": (raw["hidden_size"], raw["o_groups"] * raw["o_lora_rank"]),
        "shared_w1": (raw["moe_intermediate_size"], raw["hidden_size"]),
    }
    for name, (out, width) in maps.items():
        codes = torch.randint(0, 120, (out, width), dtype=torch.uint8, device=device)
        stored = torch.full((-(-out // 128), -(-width // 128)), 115, dtype=torch.uint8, device=device)
        weight = FP8Weight(
            codes=codes.view(torch.float8_e4m3fn), scale=stored.view(torch.float8_e8m0fnu), block=(128, 128)
        )
        x_TD = torch.randn(nodes, width, device=device).to(scale.dtype)
        out_bytes = nodes * out * x_TD.element_size()
        yield _Work(
            kernel=f"fp8_linear/{name}",
            nodes=nodes,
            num_bytes=_bytes(codes, stored, x_TD) + out_bytes,
            call=partial(fp8_linear_triton.fp8_linear, x_TD, weight),
        )


def _experts(scale: Scale, batch: int, size: int, device: torch.device) -> Iterator[_Work]:
    raw, nodes = scale.raw, batch * size
    num, width, inner = raw["n_routed_experts"], raw["hidden_size"], raw["moe_intermediate_size"]

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)

    def scales(*shape: int) -> torch.Tensor:
        return torch.full(shape, 119, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)

    packed = StoredExperts(
        w13=codes(num, 2 * inner, width // 2),
        w13_scale=scales(num, 2 * inner, width // 32),
        w2=codes(num, width, inner // 2),
        w2_scale=scales(num, width, inner // 32),
    )
    picks_TK = torch.rand(nodes, num, device=device).topk(raw["num_experts_per_tok"], dim=1).indices
    routing = Routing(experts_TK=picks_TK, weights_TK=torch.rand(picks_TK.shape, device=device))
    x_TD = torch.randn(nodes, width, device=device).to(scale.dtype)
    one = _bytes(packed.w13, packed.w13_scale, packed.w2, packed.w2_scale) // num
    yield _Work(
        kernel="fp4_experts",
        nodes=nodes,
        num_bytes=int(picks_TK.unique().numel()) * one + nodes * width * (x_TD.element_size() + 4),
        call=lambda: stored_experts_triton.stored_experts(x_TD, routing, packed, raw["swiglu_limit"]),
    )


def _attention(scale: Scale, batch: int, size: int, device: torch.device) -> Iterator[_Work]:
    """Nodes of a tree read their sequence's window and entries; these are counted once a tree."""
    raw, nodes = scale.raw, batch * size
    window, width, listed = raw["sliding_window"], raw["head_dim"], raw["index_topk"]
    pools = [torch.randn(batch * rows, width, device=device).to(scale.dtype) for rows in (window, 4 * listed)]
    tree_T = torch.arange(batch, device=device).repeat_interleave(size)
    rows_TW = tree_T.unsqueeze(1) * window + torch.arange(window, device=device)
    picks_BK = torch.rand(batch, 4 * listed, device=device).topk(listed, dim=1).indices.sort(dim=1).values
    rows_TK = tree_T.unsqueeze(1) * (4 * listed) + picks_BK[tree_T]
    q_THD = torch.randn(nodes, raw["num_attention_heads"], width, device=device).to(scale.dtype)
    sink_H = torch.randn(raw["num_attention_heads"], device=device)
    yield _Work(
        kernel="sparse_attention/csa",
        nodes=nodes,
        num_bytes=batch * (window + listed) * width * q_THD.element_size() + _bytes(q_THD, q_THD, rows_TW, rows_TK),
        call=lambda: attention_triton.sparse_attention(q_THD, pools[0], rows_TW, pools[1], rows_TK, sink_H),
    )


def _indexer(scale: Scale, batch: int, size: int, device: torch.device) -> Iterator[_Work]:
    """Scores of a context's entries and the choice among them; keys are counted once a tree."""
    raw, nodes, entries = scale.raw, batch * size, scale.context // 4
    heads, width = raw["index_n_heads"], raw["index_head_dim"]
    keys_RI = torch.randn(batch * entries, width, device=device).to(scale.dtype)
    first_B = torch.arange(batch, device=device) * size
    base_B = torch.arange(batch, device=device) * entries
    spans_B4 = torch.stack((first_B, first_B + size, base_B, torch.full_like(base_B, entries)), dim=1)
    base_T, count_T = base_B.repeat_interleave(size), torch.full((nodes,), entries, device=device)
    extra_TX = torch.full((nodes, 1), -1, device=device)
    q_THI, weights_TH = torch.randn(nodes, heads, width, device=device), torch.rand(nodes, heads, device=device)

    def call() -> torch.Tensor:
        scores_TN = indexer_triton.index_scores(q_THI, weights_TH, keys_RI, spans_B4, extra_TX, entries)
        return indexer_triton.select_rows(scores_TN, raw["index_topk"], base_T, count_T, extra_TX)

    # Scores are written once and read once at least.
    num_bytes = _bytes(keys_RI, q_THI, weights_TH) + 8 * nodes * entries
    yield _Work(kernel="indexer", nodes=nodes, num_bytes=num_bytes, call=call)


def _streams(scale: Scale, batch: int, size: int, device: torch.device) -> Iterator[_Work]:
    raw, nodes = scale.raw, batch * size
    streams, width = raw["hc_mult"], raw["hidden_size"]
    x_TMD = torch.randn(nodes, streams, width, device=device).to(scale.dtype)
    output_TD = torch.randn(nodes, width, device=device).to(scale.dtype)
    mixes = (2 + streams) * streams
    fn = torch.randn(mixes, streams * width, device=device) * (streams * width) ** -0.5
    factor, base = torch.rand(3, device=device), torch.randn(mixes, device=device)

    def call() -> torch.Tensor:
        mixed = hyper_connection_triton.mix_and_collapse(
            x_TMD, fn, factor, base, iterations=raw["hc_sinkhorn_iters"], eps=1e-6, norm_eps=1e-6
        )
        return hyper_connection_triton.expand(output_TD, x_TMD, mixed.weights)

    # The streams are read to be collapsed and to be expanded, and written once.
    num_bytes = 3 * x_TMD.nbytes + 2 * output_TD.nbytes + fn.nbytes
    yield _Work(kernel="hyper_connection", nodes=nodes, num_bytes=num_bytes, call=call)


def _query(scale: Scale, batch: int, size: int, device: torch.device) -> Iterator[_Work]:
    raw, nodes = scale.raw, batch * size
    q_THD = torch.randn(nodes, raw["num_attention_heads"], raw["head_dim"], device=device).to(scale.dtype)
    angles = torch.randn(nodes, raw["qk_rope_head_dim"] // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    yield _Work(
        kernel="norm_rope/query",
        nodes=nodes,
        num_bytes=2 * q_THD.nbytes + _bytes(cos, sin),
        call=lambda: norm_rope_triton.norm_rope(q_THD, None, 1e-6, cos, sin),
    )


def _tokens(scale: Scale, batch: int, size: int, device: torch.device) -> Iterator[_Work]:
    nodes = batch * size
    logits_TV = torch.randn(nodes, scale.raw["vocab_size"], device=device)
    ones_T = torch.ones(nodes, dtype=torch.float64, device=device)
    ids_T = torch.arange(nodes, device=device)
    yield _Work(
        kernel="coupled_tokens",
        nodes=nodes,
        num_bytes=logits_TV.nbytes,
        call=lambda: coupled_triton.coupled_tokens(logits_TV, ones_T, ones_T, ids_T, ids_T),
    )
