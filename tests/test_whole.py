"""Rounds that the device carries out by itself are the host's: drafts, texts, counts, state; nothing waits in them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton.runtime.jit
from torch.utils._python_dispatch import TorchDispatchMode

from compressed_spec import generate
from compressed_spec.cache import Cache
from compressed_spec.decode import Decoder
from compressed_spec.device_trees import RoundInputs
from compressed_spec.drafting.base import DraftPlan, DraftRequest
from compressed_spec.drafting.device_head import HeadDraft
from compressed_spec.drafting.dspark import DSparkDrafter
from compressed_spec.drafting.mtp import MTPDrafter
from compressed_spec.generate import make_requests
from compressed_spec.models.deepseek_v4.device_forward import DeviceForward
from compressed_spec.models.deepseek_v4.device_round import DeviceRound
from compressed_spec.models.deepseek_v4.kernel_path import KernelPath
from compressed_spec.models.deepseek_v4.layer_ops import LayerOps, torch_ops, triton_ops
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.noise import gumbel_noise, seed_tensor
from compressed_spec.proposing import Place
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.shaping.base import FixedShaper
from compressed_spec.testing.models import prefilled, random_model, random_text
from compressed_spec.testing.state import assert_same_state, live_state
from compressed_spec.tree import TreeShape, parse_tree
from compressed_spec.verifying import CoupledVerifier
from compressed_spec.whole import WholeRounds, whole_rounds

PROMPTS = [random_text(n, seed=n) for n in (15, 3, 30)]


def carried_model(
    ops: LayerOps,
    *,
    dtype: torch.dtype = torch.float64,
    ratios: Sequence[int] = (4, 8),
    head: DraftHeadKind = DraftHeadKind.MTP,
) -> DeepseekV4:
    """A model whose rounds the device carries out."""
    layers = 2 if head is DraftHeadKind.DSPARK else 1
    model = random_model(ratios, dtype=dtype, draft_head=head, num_draft_layers=layers)
    model.path = KernelPath(model, ops)
    return model


def drafts_of(model: DeepseekV4, cache: Cache, shape: TreeShape) -> HeadDraft:
    """What drafts for rows some of which are sampled."""
    drafter = MTPDrafter(model) if model.mtp_head is not None else DSparkDrafter(model)
    whole = whole_rounds(model, cache, drafter, FixedShaper(DraftPlan(shape=shape)))
    assert whole is not None
    assert whole.drafts is not None
    return whole.drafts[True]


def shape_of(text: str) -> TreeShape:
    shape = parse_tree(text)
    assert shape is not None
    return shape


@pytest.fixture
def num_whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the rounds that the device carried out."""
    counts = [0]
    original = WholeRounds.run

    def counted(self: WholeRounds, places: Sequence[Place]) -> Any:
        counts[0] += 1
        return original(self, places)

    monkeypatch.setattr(WholeRounds, "run", counted)
    return counts


def check_texts(model: DeepseekV4, tree: str, num_whole: list[int], count: int, **options: Any) -> None:
    """Texts and what was counted on the way, whole rounds or not."""
    path, model.path = model.path, None
    plain = generate(model, PROMPTS, tree=tree, max_new_tokens=count, stop_token_ids=[], batch_size=2, **options)
    num_whole[0], model.path = 0, path
    whole = generate(model, PROMPTS, tree=tree, max_new_tokens=count, stop_token_ids=[], batch_size=2, **options)
    assert num_whole[0] > 1
    for mine, theirs in zip(whole, plain, strict=True):
        assert mine.token_ids == theirs.token_ids
        for name in ("num_rounds", "num_draft_tokens", "num_accepted_tokens_per_pos", "acceptance_length"):
            assert getattr(mine.stats, name) == getattr(theirs.stats, name), name


@pytest.mark.parametrize(
    ("tree", "temperature"),
    [
        ("s3_k2_d6", 0.8),
        *(
            pytest.param(tree, t, marks=pytest.mark.slow)
            for tree in ("off", "s3_k1_d4", "s4_k3_d9")
            for t in (0.0, 1.0)
        ),
    ],
)
def test_texts_and_counts(tree: str, temperature: float, num_whole: list[int]) -> None:
    check_texts(carried_model(torch_ops()), tree, num_whole, 9, temperature=temperature)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", ["off", "s3_k2_d6", "s9_k1_d10"])
def test_texts_and_counts_of_blocks(tree: str, temperature: float, num_whole: list[int]) -> None:
    model = carried_model(torch_ops(), head=DraftHeadKind.DSPARK)
    check_texts(model, tree, num_whole, 11, temperature=temperature)


@pytest.mark.slow
@pytest.mark.parametrize("head", [DraftHeadKind.MTP, DraftHeadKind.DSPARK])
@pytest.mark.parametrize("tree", ["off", "s3_k1_d4", "s3_k2_d6"])
def test_texts_in_triton(tree: str, head: DraftHeadKind, num_whole: list[int]) -> None:
    check_texts(carried_model(triton_ops(), dtype=torch.float32, head=head), tree, num_whole, 9, temperature=0.8)


@pytest.mark.parametrize("head", [DraftHeadKind.MTP, DraftHeadKind.DSPARK])
@pytest.mark.parametrize("text", ["s1_k3_d3", "s3_k1_d4", "s4_k3_d9", "s9_k1_d10"])
def test_drafts_are_the_hosts(text: str, head: DraftHeadKind) -> None:
    """Of a batch with a greedy row, a warm one and one that only fills it up."""
    model, shape = carried_model(torch_ops(), head=head), shape_of(text)
    cache = prefilled(model, PROMPTS, max_length=64)
    drafter, draft = MTPDrafter if head is DraftHeadKind.MTP else DSparkDrafter, drafts_of(model, cache, shape)
    params = [SamplingParams(temperature=0.7, seed=5), SamplingParams(seed=6)]
    rows, roots, size = [2, 0], [4, 9], draft.num_nodes

    def noise(depth: int) -> torch.Tensor:
        positions = torch.tensor([cache.lengths[row] + depth for row in rows])
        return gumbel_noise(seed_tensor([p.seed for p in params]), positions, 48) * torch.tensor([[1.0], [0.0]])

    request = DraftRequest(
        cache=cache,
        rows=tuple(rows),
        roots=tuple(roots),
        shape=shape,
        max_depths=(9, 9),
        temperatures=tuple(p.temperature for p in params),
        noise=noise,
    )
    expected = drafter(model).propose(request)
    inputs = RoundInputs(
        rows_B=torch.tensor([*rows, -1]),
        tokens_T=torch.tensor([*roots, 0]).repeat_interleave(size),
        temperature_T=torch.tensor([0.7, 0.0, 0.0], dtype=torch.float64).repeat_interleave(size),
        seeds_T=torch.tensor([5, 6, 0]).repeat_interleave(size),
    )
    drafted = draft(inputs, torch.tensor(cache.lengths))
    for i, tree in enumerate(expected):
        assert len(tree) == size
        own = slice(i * size, (i + 1) * size)
        assert drafted.tokens_T[own].tolist() == list(tree.tokens)
        assert [max(p - i * size, -1) for p in drafted.trees.parents_T[own].tolist()] == list(tree.parents)
    # Whatever window closes, and however many nodes of these trees close it.
    for ratio in (4, 8):
        for tree in expected:
            most = max(sum(depth % ratio == phase for depth in tree.depths) for phase in range(ratio))
            assert 3 * most <= drafted.trees.num_closing[f"{'csa' if ratio == 4 else 'hca'}{ratio}"]


@pytest.mark.parametrize("head", [DraftHeadKind.MTP, DraftHeadKind.DSPARK])
def test_state_is_that_of_the_text(head: DraftHeadKind) -> None:
    model = carried_model(torch_ops(), head=head)
    cache = model.new_cache(batch_size=2, max_length=64, max_nodes=16, max_draft_nodes=16)
    logits_BV = model.prefill(cache, PROMPTS[:2])
    texts = [[*prompt, int(token)] for prompt, token in zip(PROMPTS, logits_BV.argmax(-1), strict=False)]
    drafter = MTPDrafter(model) if head is DraftHeadKind.MTP else DSparkDrafter(model)
    whole = whole_rounds(model, cache, drafter, FixedShaper(DraftPlan(shape=shape_of("s3_k2_d6"))))
    assert whole is not None
    for _ in range(3):
        places = [
            Place(row=row, root=text[-1], position=len(text), max_depth=9, params=SamplingParams())
            for row, text in enumerate(texts)
        ]
        assert whole.takes(places, CoupledVerifier())
        for text, end in zip(texts, whole.run(places), strict=True):
            text += [*end.tokens[1:], end.acceptance.next_token]
    model.path = None
    for row, text in enumerate(texts):
        assert cache.lengths[row] == len(text) - 1
        assert_same_state(live_state(cache, row), live_state(prefilled(model, [text[:-1]])), f"row {row}")


def test_what_the_device_cannot_do_goes_through_the_host(num_whole: list[int]) -> None:
    model = carried_model(torch_ops(), ratios=(4,))
    for options in (
        {"top_p": 0.9, "temperature": 1.0},
        {"repetition_penalty": 1.2},
        {"logprobs": "raw"},
        {"drafter": "ngram"},
        {"tree": "dynamic_s3_k2_d6"},
        {"verifier": "leviathan", "tree": "s2_k1_d3", "temperature": 1.0},
    ):
        generate(model, [[3, 4, 5]], max_new_tokens=4, stop_token_ids=[], **options)
    assert num_whole == [0]


def test_no_more_trees_than_the_head_has_room_for() -> None:
    """A batch is filled up no further than scratch rows go, which are counted in a cache of one's own making."""
    model, shape = carried_model(torch_ops(), ratios=(4,)), shape_of("s3_k2_d6")
    cache = model.new_cache(batch_size=3, max_length=64, max_nodes=13, prefill_chunk=13, max_draft_nodes=15)
    logits_BV = model.prefill(cache, PROMPTS[:3])
    whole = whole_rounds(model, cache, MTPDrafter(model), FixedShaper(DraftPlan(shape=shape)))
    assert whole is not None
    places = [
        Place(row=row, root=int(logits_V.argmax()), position=len(prompt) + 1, max_depth=9, params=SamplingParams())
        for row, (prompt, logits_V) in enumerate(zip(PROMPTS, logits_BV, strict=True))
    ]
    assert whole.drafts is not None
    assert whole.drafts[False].most_trees == 3
    assert len(whole.run(places[:2])) == 2
    small = model.new_cache(batch_size=3, max_length=64, max_nodes=6, prefill_chunk=6, max_draft_nodes=5)
    none = whole_rounds(model, small, MTPDrafter(model), FixedShaper(DraftPlan(shape=shape)))
    assert none is not None
    assert not none.takes(places[:2], CoupledVerifier())


def test_a_stop_check_that_fails_loses_nothing(num_whole: list[int]) -> None:
    """The round is committed by then; its tokens come with the next step."""
    model = carried_model(torch_ops(), ratios=(4,))
    plain = generate(model, [PROMPTS[0]], tree="off", max_new_tokens=8, stop_token_ids=[])
    calls = [0]

    def moody(before: Sequence[int], tokens: Sequence[int]) -> None:
        calls[0] += 1
        if calls[0] in (3, 4):
            raise KeyError("moody")

    requests = make_requests(
        model,
        [PROMPTS[0]],
        SamplingParams(),
        max_new_tokens=8,
        seed=0,
        stop_token_ids=[],
        stop_checks=[moody],
        logprobs=None,
    )
    cache = model.new_cache(max_length=64, max_nodes=1)
    decoder = Decoder(model, cache, drafter=None, shape=None, verifier=CoupledVerifier())
    decoder.submit(requests[0])
    found: list[int] = []
    failures = 0
    while decoder.has_work:
        try:
            found += [token for chunk in decoder.step() for token in chunk.token_ids]
        except KeyError:
            failures += 1
    assert failures == 2
    assert found == plain[0].token_ids


class _NothingFromTheHost(TorchDispatchMode):
    """Fails for an operation on a tensor of the host: in a graph it could not be replayed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [part for arg in args for part in (arg if isinstance(arg, list | tuple) else [arg])]
        for tensor in tensors:
            assert not isinstance(tensor, torch.Tensor) or not tensor.dim() or tensor.is_meta, f"{func} of the host's"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("tree", "head"),
    [(None, DraftHeadKind.MTP), ("s3_k2_d6", DraftHeadKind.MTP), ("s3_k2_d6", DraftHeadKind.DSPARK)],
)
def test_nothing_in_a_round_waits_for_the_device(
    tree: str | None, head: DraftHeadKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors without data any reading back fails; the kernels, which are not asked to run, do none."""
    model = carried_model(triton_ops(), dtype=torch.float32, head=head)
    path, model.path = model.path, None
    cache = prefilled(model, [PROMPTS[0]], max_length=64)
    model.path = path
    shape = None if tree is None else shape_of(tree)
    model.to("meta")
    cache.pools, cache.device = {name: pool.to("meta") for name, pool in cache.pools.items()}, torch.device("meta")
    monkeypatch.setattr(triton.runtime.jit.KernelInterface, "__getitem__", lambda self, grid: lambda *_, **__: None)
    carried = DeviceRound(DeviceForward(model, cache, triton_ops()))
    size = 1 if shape is None else shape.num_nodes
    inputs = RoundInputs(
        rows_B=torch.zeros(1, dtype=torch.int64, device="meta"),
        tokens_T=torch.zeros(size, dtype=torch.int64, device="meta"),
        temperature_T=torch.zeros(size, dtype=torch.float64, device="meta"),
        seeds_T=torch.zeros(size, dtype=torch.int64, device="meta"),
    )
    run_body(model, cache, carried, shape, inputs)
    with pytest.raises(RuntimeError, match="meta"):
        int(inputs.rows_B[0])


def run_body(
    model: DeepseekV4, cache: Cache, carried: DeviceRound, shape: TreeShape | None, inputs: RoundInputs
) -> None:
    """What a graph records."""
    from compressed_spec.models.deepseek_v4.graphs import GraphedRounds

    def capture(body: Any) -> Any:
        with _NothingFromTheHost(), torch.no_grad():
            body()
        return lambda: None

    form = (-1,) if shape is None else drafts_of(model, cache, shape)
    outputs = GraphedRounds(carried, capture)(form, inputs, 20)
    assert outputs.logits_TV.is_meta
