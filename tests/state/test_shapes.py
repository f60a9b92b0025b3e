"""Every drafter in every shape: the text of plain decoding, and nothing lost in rounds without drafts."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compressed_spec import TokenTree, generate
from compressed_spec.drafting import Drafter, DraftPlan, DraftRequest, make_drafter
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.shaping import (
    AutoShaper,
    Calibration,
    CostModel,
    FixedShaper,
    RoundOutcome,
    RoundState,
    Shaper,
    parse_shape,
)
from compressed_spec.testing import (
    MarkovModel,
    OracleDrafter,
    Reference,
    cycle,
    greedy_text,
    prefilled,
    random_model,
)
from compressed_spec.tree import TreeShape

COUNT = 18
SHAPES = ["s3_k2_d6", "static", "optimal", "dynamic", "dynamic_file", "auto", "auto_timeless"]
DRAFTERS = ["mtp", "dspark", "early-exit", "ngram", "suffix"]
STATIC = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
FREE = CostModel(verify=(1.0, 0.0, 0.0, 0.0, 0.0), draft=(0.0, 0.0, 0.0), num_experts=lambda nodes: 0.0)
Shape = str | Shaper


class Timeless(AutoShaper):
    """Every verify takes a second, and drafting nothing: what it does depends on no clock."""

    def __init__(self, caps: TreeShape, *, chains_only: bool = False) -> None:
        super().__init__(FREE, caps=caps, chains_only=chains_only)

    def observe(self, outcome: RoundOutcome) -> None:
        super().observe(replace(outcome, draft_seconds=0.0, verify_seconds=1.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "static.json").write_text(json.dumps(STATIC))
    measured = Calibration(
        acceptance=((0.6, 0.2, 0.1), (0.6, 0.3), (0.6,)),
        score_temperature=0.7,
        log_bias=((0.1, -0.5, 0.2), (-0.3, 0.4)),
    )
    measured.save(str(folder / "calibration.json"))
    return folder


def named(shape: str, folder: Path) -> Shape:
    if shape == "auto_timeless":
        return Timeless(TreeShape(num_steps=3, top_k=3, num_nodes=9))
    names = {
        "static": f"static:{folder / 'static.json'}",
        "optimal": f"optimal_d7:{folder / 'calibration.json'}",
        "dynamic_file": f"dynamic_s3_k3_d7:{folder / 'calibration.json'}",
    }
    return names.get(shape, shape)


@pytest.fixture(scope="module")
def block() -> Reference:
    """The stack of `mixed` with a DSpark head."""
    return Reference(random_model((0, 4, 8), draft_head=DraftHeadKind.DSPARK, num_draft_layers=2))


@pytest.fixture(scope="module")
def prompts(text: list[int]) -> list[list[int]]:
    return [text[:9], text[:14], text[:5] * 3]


@pytest.fixture(scope="module")
def plain(mixed: Reference, block: Reference, prompts: list[list[int]]) -> dict[float, list[list[int]]]:
    """Both models have the same random layers, hence one text."""
    assert greedy_text(block.model, prompts[0], COUNT) == greedy_text(mixed.model, prompts[0], COUNT)
    return {
        temperature: [
            out.token_ids
            for out in generate(
                mixed.model,
                prompts,
                tree="off",
                max_new_tokens=COUNT,
                temperature=temperature,
                seed=3,
                stop_token_ids=[],
            )
        ]
        for temperature in (0.0, 1.0)
    }


@pytest.mark.filterwarnings("ignore:None of .* tokens drafted")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_T12_every_drafter_in_every_shape(
    mixed: Reference,
    block: Reference,
    prompts: list[list[int]],
    plain: dict[float, list[list[int]]],
    folder: Path,
    drafter: str,
    shape: str,
    temperature: float,
) -> None:
    """Three requests in two rows."""
    outs = generate(
        (block if drafter == "dspark" else mixed).model,
        prompts,
        tree=named(shape, folder),
        drafter=drafter,
        max_new_tokens=COUNT,
        temperature=temperature,
        seed=3,
        stop_token_ids=[],
        batch_size=2,
    )
    assert [out.token_ids for out in outs] == plain[temperature]
    for out in outs:
        assert out.stats.num_draft_errors == 0
        per_pos = out.stats.num_accepted_tokens_per_pos
        assert sum(per_pos) == out.stats.num_accepted_tokens
        assert sorted(per_pos, reverse=True) == list(per_pos)
    if shape != "auto":
        assert sum(out.stats.num_draft_tokens for out in outs) > 0


@pytest.mark.parametrize("verifier", ["leviathan", "block", "traversal"])
@pytest.mark.parametrize("shape", ["static", "optimal", "dynamic", "auto"])
@pytest.mark.parametrize("drafter", ["mtp", "dspark", "early-exit"])
def test_sampled_drafts_take_fixed_topologies_only(
    mixed: Reference, block: Reference, text: list[int], folder: Path, drafter: str, verifier: str, shape: str
) -> None:
    def run() -> list[int]:
        out = generate(
            (block if drafter == "dspark" else mixed).model,
            [text[:9]],
            tree=named(shape, folder),
            drafter=drafter,
            verifier=verifier,
            temperature=1.0,
            max_new_tokens=12,
            stop_token_ids=[],
        )[0]
        assert out.stats.num_draft_errors == 0
        return out.token_ids

    if shape == "dynamic":
        with pytest.raises(ValueError, match="shapes it by their values"):
            run()
    elif shape != "auto" and verifier != "traversal":
        with pytest.raises(ValueError, match="this tree branches"):
            run()
    else:
        assert len(run()) == 12


@pytest.mark.parametrize("verifier", ["leviathan", "block", "traversal"])
def test_sampled_drafts_of_auto_keep_the_law(verifier: str) -> None:
    """A head with another law than the target's: the second and third tokens still follow the target's law."""
    generator = torch.Generator().manual_seed(1)
    target, head = (torch.randn((4, 4), generator=generator, dtype=torch.float64) for _ in range(2))
    model, count = MarkovModel(target, head), 1200
    outs = generate(
        model,
        [[2]] * count,
        tree=Timeless(TreeShape(num_steps=2, top_k=2, num_nodes=6), chains_only=verifier != "traversal"),
        verifier=verifier,
        temperature=1.0,
        max_new_tokens=4,
        batch_size=64,
    )
    assert sum(out.stats.num_accepted_tokens for out in outs) > count // 4
    p = torch.softmax(target, dim=-1)
    for first in range(4):
        followers = [out.token_ids[2] for out in outs if out.token_ids[1] == first]
        for second in range(4):
            rate, share = float(p[first, second]), followers.count(second) / len(followers)
            assert abs(share - rate) < 4.5 * (rate * (1 - rate) / len(followers)) ** 0.5


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "auto"])
def test_T24_an_oracle_head_reaches_depth_plus_one(folder: Path, shape: str) -> None:
    """The package's own head drafter, with a head that has the target's law."""
    model, tree = MarkovModel(cycle(30), cycle(30)), named(shape, folder)
    shaper = parse_shape(tree) if isinstance(tree, str) else tree
    assert isinstance(shaper, Shaper)
    depth = shaper.largest.shape.num_steps
    assert depth >= 3
    out = generate(model, [[0]], tree=tree, max_new_tokens=1 + 15 * (depth + 1))[0]
    assert out.token_ids == [(i + 1) % 30 for i in range(len(out.token_ids))]
    if shape == "auto_timeless":  # now and then it times a plain round
        assert out.stats.num_rounds_off == 1
        assert out.stats.num_accepted_tokens >= depth * (out.stats.num_rounds - 3)
    else:
        assert out.stats.acceptance_length == depth + 1
        assert out.stats.num_accepted_tokens_per_pos == (15,) * depth


@pytest.mark.parametrize("tree", ["static:", "dynamic_s3_k2_d7", "s3_k2_d7"])
def test_T24_an_oracle_that_reads_caps(folder: Path, tree: str) -> None:
    model, text = MarkovModel(cycle(30), cycle(30)), [i % 30 for i in range(80)]
    if tree == "static:":
        (folder / "binary.json").write_text('{"parents": [-1, 0, 0, 1, 1, 3, 3]}')
        tree += str(folder / "binary.json")
    out = generate(model, [[0]], tree=tree, drafter=OracleDrafter([text], 30), max_new_tokens=61)[0]
    assert out.token_ids == text[1:62]
    assert out.stats.acceptance_length == 4
    assert out.stats.num_accepted_tokens_per_pos == (15, 15, 15)


class Blinking(FixedShaper):
    """Speculates in every third round only."""

    def __init__(self, shape: TreeShape) -> None:
        super().__init__(DraftPlan(shape=shape))
        self.num_rounds = 0

    def plan(self, state: RoundState) -> DraftPlan | None:
        self.num_rounds += 1
        return self.largest if self.num_rounds % 3 == 0 else None


class Listening:
    """Passes everything on to a drafter, and keeps what was proposed for which text."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.text: list[int] = []
        self.proposed: list[tuple[list[int], TokenTree, DraftRequest]] = []

    def start(self, row: int, token_ids: Sequence[int]) -> None:
        self.text = list(token_ids)
        self.drafter.start(row, token_ids)

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        self.text += token_ids
        self.drafter.observe(row, token_ids)

    def release(self, row: int) -> None:
        self.drafter.release(row)

    def propose(self, request: DraftRequest) -> Sequence[TokenTree]:
        (tree,) = self.drafter.propose(request)
        assert isinstance(tree, TokenTree)
        self.proposed.append((list(self.text), tree, request))
        return [tree]


@pytest.mark.filterwarnings("ignore:None of .* tokens drafted")
@pytest.mark.parametrize("name", DRAFTERS)
def test_T38_rounds_without_drafts_leave_nothing_to_catch_up(
    mixed: Reference, block: Reference, text: list[int], name: str
) -> None:
    """After rounds switched off, a drafter proposes what one that starts from the whole text proposes."""
    model = (block if name == "dspark" else mixed).model

    def make() -> Drafter:
        return make_drafter(name, model)

    listening = Listening(make())
    prompt = (text[:6] * 4)[:20]
    shape = TreeShape(num_steps=3, top_k=2, num_nodes=6)
    out = generate(model, [prompt], tree=Blinking(shape), drafter=listening, max_new_tokens=24, stop_token_ids=[])[0]
    assert out.stats.num_rounds_off >= 8
    assert len(listening.proposed) >= 4
    for so_far, tree, request in listening.proposed:
        cache = prefilled(model, [so_far[:-1]])
        fresh = make()
        fresh.start(0, so_far)
        (replayed,) = fresh.propose(
            DraftRequest(
                cache=cache,
                rows=(0,),
                roots=request.roots,
                shape=request.shape,
                max_depths=request.max_depths,
                temperatures=request.temperatures,
                noise=None,
                scoring=request.scoring,
            )
        )
        assert isinstance(replayed, TokenTree)
        assert (replayed.tokens, replayed.parents) == (tree.tokens, tree.parents)


def test_rounds_off_are_counted(mixed: Reference, text: list[int]) -> None:
    dear = CostModel(verify=(0.0, 0.0, 1.0, 0.0, 0.0), draft=(9.0, 0.0, 0.0), num_experts=lambda nodes: 0.0)
    out = generate(mixed.model, [text[:9]], tree=AutoShaper(dear), drafter="mtp", max_new_tokens=20, stop_token_ids=[])[
        0
    ]
    assert out.stats.num_rounds_off == out.stats.num_rounds - 1 == 18  # the last token needs no draft
    assert out.stats.num_draft_tokens == 0


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("static", "not complete"),
        ("static:", "not complete"),
        ("static:nowhere.json", "nowhere.json"),
        ("optimal:x.json", "not complete"),
        ("optimal_d8", "not complete"),
        ("optimal_d8:nowhere.json", "nowhere.json"),
        ("dynamic:nowhere.json", "nowhere.json"),
        ("dynamic_s2", "Unknown tree"),
        ("auto_s2_k1_d9", "is a chain"),
        ("auto:file", "not complete"),
        ("bushy", "'auto', 'dynamic'"),
    ],
)
def test_T36_names_of_trees(mixed: Reference, text: list[int], tree: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(mixed.model, [text[:4]], tree=tree)


def test_T36_topologies_wider_than_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "wide.json").write_text(json.dumps([[i] for i in range(49)]))
    with pytest.warns(UserWarning, match="more than the vocabulary's 48"):
        out = generate(random_model((0,)), [[3]], tree=f"static:{tmp_path / 'wide.json'}", max_new_tokens=4)[0]
    assert out.stats.num_draft_errors > 0
