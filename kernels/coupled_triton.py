"""The target's own tokens by coupled noise, and the path that they take through the trees, without leaving the device.

`compressed_spec.noise`, `.sampling` and `.verifying` are the references: the noise has the same bits, being made of
integer operations and exactly rounded float64 ones. The kernel is compiled without fused multiply-adds for that.

N = nodes, V = vocabulary, T = nodes of all trees, B = trees, A = longest path
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
SQRT_HALF_BITS = tl.constexpr(0x3FE6A09E667F3BCD)
LN2 = tl.constexpr(0.6931471805599453)
CELL = tl.constexpr(2.0**-52)
ATANH_TERMS = tl.constexpr(10)
VOCAB_BLOCK = 512
BLOCKS_A_PROGRAM = 8


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * MULTIPLIER_1
    x = (x ^ (x >> 27)) * MULTIPLIER_2
    return x ^ (x >> 31)


@triton.jit
def _log(x):
    """`noise._log`, operation by operation."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 52
    m = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * 0.0 + 1.0 / (2 * ATANH_TERMS - 1)
    for k in tl.static_range(2, ATANH_TERMS + 1):
        series = series * z
        series = series + 1.0 / (2 * (ATANH_TERMS - k) + 1)
    return series * s * 2.0 + exponent.to(tl.float64) * LN2


@triton.jit
def gumbel(seed, position, token):
    """`noise.gumbel_noise` of int64 scalars and a block of int64 tokens."""
    golden = tl.full([1], GOLDEN, tl.uint64)
    key = _mix(_mix(seed.to(tl.uint64)) + (position.to(tl.uint64) + 1) * golden)
    bits = _mix(key ^ _mix((token.to(tl.uint64) + 1) * golden))
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * CELL
    return -_log(-_log(uniform))


@triton.jit
def best_tokens_kernel(
    p_scores,
    p_temperature,
    p_top,
    p_seed,
    p_position,
    p_value,
    p_token,
    V: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The best of a share of the vocabulary, the smallest token on a tie; NaN if a score is NaN or +inf."""
    node = tl.program_id(0).to(tl.int64)
    temperature, top = tl.load(p_temperature + node), tl.load(p_top + node)
    seed, position = tl.load(p_seed + node), tl.load(p_position + node)
    best = tl.full([BLOCK], float("-inf"), tl.float64)
    best_token = tl.full([BLOCK], V, tl.int64)
    broken = tl.zeros([BLOCK], tl.int32)
    for block in range(0, BLOCKS):
        token = (tl.program_id(1) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        score = tl.load(p_scores + node * V + token, mask=token < V, other=float("-inf")).to(tl.float64)
        broken += ((score != score) | (score == float("inf"))).to(tl.int32)
        value = score
        if temperature > 0:
            value = (score - top) / temperature + gumbel(seed, position, token)
        better = value > best
        best, best_token = tl.where(better, value, best), tl.where(better, token, best_token)
    value = tl.max(best, 0)
    token = tl.min(tl.where(best == value, best_token, V), 0)
    broken_any = tl.max(broken, 0) > 0
    out = node * SPLITS + tl.program_id(1)
    tl.store(p_value + out, tl.where(broken_any, float("nan"), value))
    tl.store(p_token + out, token)


@triton.jit
def join_tokens_kernel(p_value, p_token, p_chosen, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The best of all shares; -1 where one holds NaN, or all -inf."""
    node = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    value = tl.load(p_value + node * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    token = tl.load(p_token + node * SPLITS + split, mask=split < SPLITS, other=0)
    broken = tl.max((value != value).to(tl.int32), 0) > 0
    value = tl.where(value != value, float("-inf"), value)
    best = tl.max(value, 0)
    # Shares follow one another, so the smallest token of the best value is the earliest share's.
    first = tl.min(tl.where(value == best, token, 0x7FFFFFFFFFFFFFFF), 0)
    tl.store(p_chosen + node, tl.where(broken | (best == float("-inf")), -1, first))


def best_tokens_config(vocab: int) -> dict[str, int | bool]:
    """Shares of the vocabulary, and no fused multiply-adds."""
    return {
        "SPLITS": triton.cdiv(vocab, VOCAB_BLOCK * BLOCKS_A_PROGRAM),
        "BLOCK": VOCAB_BLOCK,
        "BLOCKS": BLOCKS_A_PROGRAM,
        "enable_fp_fusion": False,
    }


def coupled_tokens(
    scores_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    top_N: torch.Tensor,
    seeds_N: torch.Tensor,
    positions_N: torch.Tensor,
) -> torch.Tensor:
    """argmax((score - top) / temperature + g) at every node, argmax(score) at temperature 0; the smallest id on a tie.

    With `top_N` the row's maximum, that is the coupled choice from unfiltered logits (the law's normaliser shifts a row
    as a whole); with log probabilities, temperature 1 and top 0 it is `sampling.select_tokens` to the bit. -1 marks a
    row with NaN, +inf or nothing but -inf. scores: any float dtype. temperature, top: float64. seeds, positions: int64.
    """
    num_nodes, vocab = scores_NV.shape
    config = best_tokens_config(vocab)
    splits = config["SPLITS"]
    value_NS = torch.empty((num_nodes, splits), dtype=torch.float64, device=scores_NV.device)
    token_NS = seeds_N.new_empty((num_nodes, splits))
    chosen_N = seeds_N.new_empty(num_nodes)
    best_tokens_kernel[(num_nodes, splits)](
        scores_NV.contiguous(),
        temperature_N,
        top_N,
        seeds_N,
        positions_N,
        value_NS,
        token_NS,
        V=vocab,
        **config,
    )
    join_tokens_kernel[(num_nodes,)](value_NS, token_NS, chosen_N, SPLITS=splits, BLOCK=triton.next_power_of_2(splits))
    return chosen_N


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """path_BA: accepted nodes, flat, root first, -1 after the last. count_B: how many. next_token_B: what follows.

    All int64.
    """

    path_BA: torch.Tensor
    count_B: torch.Tensor
    next_token_B: torch.Tensor


@triton.jit
def walk_kernel(p_chosen, p_tokens, p_parents, p_first, p_path, p_count, p_next, longest, NODES: tl.constexpr):
    tree = tl.program_id(0)
    first, end = tl.load(p_first + tree), tl.load(p_first + tree + 1)
    node = first + tl.arange(0, NODES)
    token = tl.load(p_tokens + node, mask=node < end, other=-1)
    parent = tl.load(p_parents + node, mask=node < end, other=-2)
    here = first
    count = first * 0
    following = tl.load(p_chosen + first)
    for depth in range(0, longest):
        tl.store(p_path + tree * longest + depth, here)
        if here >= 0:
            count += 1
            following = tl.load(p_chosen + here)
            # The first child with the chosen token, as the host's walk takes it.
            child = tl.min(tl.where((parent == here) & (token == following), node, end), 0)
            here = tl.where(child < end, child, -1)
    tl.store(p_count + tree, count)
    tl.store(p_next + tree, following)


def walk_trees(
    chosen_T: torch.Tensor,
    tokens_T: torch.Tensor,
    parents_T: torch.Tensor,
    first_B1: torch.Tensor,
    *,
    longest: int,
    most_nodes: int,
) -> Walk:
    """`verifying.walk` of every tree: `chosen_T` is the target's own token after each node.

    parents_T: flat, -1 for roots. first_B1: first node of each tree, and T. longest: nodes of the longest path.
    most_nodes: of a tree.
    """
    num_trees = len(first_B1) - 1
    path_BA = chosen_T.new_empty((num_trees, longest))
    count_B, next_token_B = chosen_T.new_empty((2, num_trees)).unbind()
    walk_kernel[(num_trees,)](
        chosen_T,
        tokens_T,
        parents_T,
        first_B1,
        path_BA,
        count_B,
        next_token_B,
        longest,
        NODES=triton.next_power_of_2(most_nodes),
    )
    return Walk(path_BA=path_BA, count_B=count_B, next_token_B=next_token_B)
