"""T23: the model and its DSpark head against the outputs of DeepSeek's own inference code (tests/data/golden_dspark).

B = batch rows, S = places of a block, V = vocabulary, N = draft nodes, T = nodes, M = residual streams, D = model width
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from compressed_spec import TokenTree, generate, load_model
from compressed_spec.cache import Cache, Scratch
from compressed_spec.drafting import DraftRequest, DSparkDrafter
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.rope import Rotation
from compressed_spec.target import BlockDraft, DraftBlock
from compressed_spec.testing.ways import WAYS, Way, after_rejected_rounds, along_trees
from compressed_spec.tree import parse_tree

FOLDER = Path(__file__).parent / "data" / "golden_dspark"
GOLDEN: dict[str, Any] = json.loads((FOLDER / "golden.json").read_text())
LENGTHS = sorted(map(int, GOLDEN))  # of the prompts, which `first` follows
TOLERANCE = 2e-4  # absolute, on logits of size 10


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    return load_model(FOLDER, progress=False)


@dataclass(slots=True, kw_only=True)
class Seen:
    """What the head said while a drafter used it: its blocks, and the bias and confidence of each level of nodes."""

    blocks: list[BlockDraft] = field(default_factory=list)
    biases_NV: list[torch.Tensor] = field(default_factory=list)
    confidences_N: list[torch.Tensor] = field(default_factory=list)
    streams_of: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def assert_draft(self, row: int, length: int) -> None:
        """The one block was, for this row, the reference's; its chain as well."""
        golden = GOLDEN[str(length)]
        (block,) = self.blocks
        assert len(self.biases_NV) == len(self.confidences_N) == len(golden["draft_ids"]) == 5
        logits_SV = block.logits_BSV[row] + torch.stack([bias_NV[row] for bias_NV in self.biases_NV])
        torch.testing.assert_close(logits_SV, torch.tensor(golden["draft_logits"]), atol=TOLERANCE, rtol=0)
        assert logits_SV.argmax(dim=-1).tolist() == golden["draft_ids"]
        confidence_S = torch.stack([confidence_N[row] for confidence_N in self.confidences_N])
        torch.testing.assert_close(confidence_S, torch.tensor(golden["confidence"]), atol=TOLERANCE, rtol=0)


@pytest.fixture
def seen(model: DeepseekV4, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Fills with what the head says as a drafter asks it."""
    seen = Seen()
    draft_block, draft_bias, draft_confidence = model.draft_block, model.draft_bias, model.draft_confidence
    assert model.dspark_head is not None
    kv_rows = model.dspark_head.kv_rows

    def record_block(block: DraftBlock, scratch: Scratch) -> BlockDraft:
        seen.blocks.append(draft_block(block, scratch))
        return seen.blocks[-1]

    def record_bias(tokens_N: torch.Tensor) -> torch.Tensor:
        seen.biases_NV.append(draft_bias(tokens_N))
        return seen.biases_NV[-1]

    def record_confidence(hidden_ND: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
        seen.confidences_N.append(draft_confidence(hidden_ND, tokens_N))
        return seen.confidences_N[-1]

    def record_streams(streams_of: Mapping[int, torch.Tensor], rotation: Rotation) -> list[torch.Tensor]:
        seen.streams_of = streams_of
        return kv_rows(streams_of, rotation)

    monkeypatch.setattr(model, "draft_block", record_block)
    monkeypatch.setattr(model, "draft_bias", record_bias)
    monkeypatch.setattr(model, "draft_confidence", record_confidence)
    monkeypatch.setattr(model.dspark_head, "kv_rows", record_streams)
    return seen


def text_of(length: int) -> list[int]:
    return [*GOLDEN[str(length)]["prompt"], GOLDEN[str(length)]["first"]]


def propose(
    model: DeepseekV4, cache: Cache, lengths: Sequence[int], rows: Sequence[int], tree: str, threshold: float = 1e-9
) -> list[TokenTree]:
    """Greedy drafts. The threshold cuts nothing here, but has the head asked for its confidence."""
    shape = parse_tree(tree)
    assert shape is not None
    request = DraftRequest(
        cache=cache,
        rows=tuple(rows),
        roots=tuple(GOLDEN[str(length)]["root"] for length in lengths),
        shape=shape,
        max_depths=(shape.num_steps,) * len(rows),
        temperatures=(0.0,) * len(rows),
        noise=None,
    )
    return list(DSparkDrafter(model, confidence_threshold=threshold).propose(request))


def chain_of(length: int) -> tuple[int, ...]:
    golden = GOLDEN[str(length)]
    return (golden["root"], *golden["draft_ids"])


def test_checkpoint_holds_three_stages(model: DeepseekV4) -> None:
    assert (model.own_drafter, len(model.mtp), model.draft_block_size) == ("dspark", 3, 5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.__name__))
def test_T23_target_and_head_equal_the_reference(model: DeepseekV4, seen: Seen, way: Way, length: int) -> None:
    cache = model.new_cache(max_length=320, prefill_chunk=37)
    logits_V = way(model, cache, 0, text_of(length))
    assert int(logits_V.argmax()) == GOLDEN[str(length)]["root"]
    for _ in range(2):  # drafting leaves nothing behind: a second draft is the same
        for record in (seen.blocks, seen.biases_NV, seen.confidences_N):
            record.clear()
        (tree,) = propose(model, cache, [length], [0], "s5_k1_d6")
        seen.assert_draft(0, length)
        assert (tree.tokens, tree.parents) == (chain_of(length), (-1, 0, 1, 2, 3, 4))
    cache.check_integrity()


@pytest.mark.parametrize("length", LENGTHS)
def test_T23_what_the_head_reads_of_the_target(model: DeepseekV4, seen: Seen, length: int) -> None:
    cache = model.new_cache(max_length=320)
    text = text_of(length)
    assert int(model.prefill(cache, [text[:-1]])[0].argmax()) == text[-1]
    model.verify(cache, [TokenTree(tokens=[text[-1]], parents=[-1])])
    assert list(seen.streams_of) == [1, 2, 3]
    hidden_D = torch.cat([seen.streams_of[layer][0].mean(dim=0) for layer in (1, 2, 3)])
    expected_D = torch.tensor(GOLDEN[str(length)]["main_hidden_last"])
    torch.testing.assert_close(hidden_D, expected_D, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("way", [after_rejected_rounds, along_trees], ids=lambda way: str(way.__name__))
def test_T23_head_in_a_batch_with_every_row_active(model: DeepseekV4, seen: Seen, way: Way) -> None:
    rows = [3, 0, 4, 2, 5]  # row 1 stays free
    cache = model.new_cache(batch_size=6, max_length=320, prefill_chunk=64)
    for row, length in zip(rows, LENGTHS, strict=True):
        way(model, cache, row, text_of(length))
    trees = propose(model, cache, LENGTHS, rows, "s5_k1_d6")
    for i, length in enumerate(LENGTHS):
        seen.assert_draft(i, length)
        assert trees[i].tokens == chain_of(length)


def test_T23_prefill_of_all_prompts_together(model: DeepseekV4, seen: Seen) -> None:
    cache = model.new_cache(batch_size=5, max_length=320, prefill_chunk=50)
    model.prefill(cache, [text_of(length) for length in LENGTHS])
    propose(model, cache, LENGTHS, range(5), "s5_k1_d6")
    for row, length in enumerate(LENGTHS):
        seen.assert_draft(row, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_T23_chains_that_stop_early_are_the_same_chain(model: DeepseekV4, length: int) -> None:
    """The block stays as long as it was trained, whatever is asked for; a longer chain ends with the block."""
    cache = model.new_cache(max_length=320)
    model.prefill(cache, [text_of(length)])
    for steps in (1, 2, 4, 7):
        (tree,) = propose(model, cache, [length], [0], f"s{steps}_k1_d{steps + 1}")
        assert tree.tokens == chain_of(length)[: steps + 1]


@pytest.mark.parametrize("length", LENGTHS)
def test_T23_confidence_cuts_the_chain_where_the_reference_falls_below(model: DeepseekV4, length: int) -> None:
    cache = model.new_cache(max_length=320)
    model.prefill(cache, [text_of(length)])
    confidence_S = torch.tensor(GOLDEN[str(length)]["confidence"]).sigmoid()
    for threshold in (0.2, 0.5, 0.8):
        (tree,) = propose(model, cache, [length], [0], "s5_k1_d6", threshold)
        below = (confidence_S < threshold).nonzero().flatten().tolist()
        assert tree.tokens == chain_of(length)[: 1 + (below[0] if below else 5)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", ["s5_k3_d9", "s3_k2_d8", "s5_k8_d24"])
def test_a_tree_holds_the_best_nodes_there_are(model: DeepseekV4, length: int, shape: str) -> None:
    """Against an exhaustive search over the reference's own logits, of which the Markov bias is taken off."""
    cache = model.new_cache(max_length=320)
    model.prefill(cache, [text_of(length)])
    (tree,) = propose(model, cache, [length], [0], shape)
    named = parse_tree(shape)
    assert named is not None
    chain = chain_of(length)
    bias_SV = model.draft_bias(torch.tensor(chain[:-1]))
    base_SV = torch.tensor(GOLDEN[str(length)]["draft_logits"]) - bias_SV
    paths: dict[tuple[int, ...], float] = {}
    newest: dict[tuple[int, ...], float] = {(): 0.0}
    for depth in range(named.num_steps):
        grown: dict[tuple[int, ...], float] = {}
        for path, score in newest.items():
            bias_V = model.draft_bias(torch.tensor([path[-1] if path else chain[0]]))[0]
            best = torch.log_softmax((base_SV[depth] + bias_V).double(), dim=-1).topk(named.top_k)
            grown |= {(*path, int(t)): score + float(s) for s, t in zip(best.values, best.indices, strict=True)}
        newest = dict(sorted(grown.items(), key=lambda item: -item[1])[: 2 * named.num_nodes])
        paths |= newest
    expected = sorted(paths, key=lambda path: -paths[path])[: named.num_nodes - 1]
    found = {tuple(tree.tokens[i] for i in tree.path_to(node)[1:]) for node in range(1, len(tree))}
    assert found == set(expected)


@pytest.mark.parametrize("tree", ["s5_k1_d6", "s4_k3_d10"])
def test_drafting_does_not_change_the_text(model: DeepseekV4, tree: str) -> None:
    prompts = [GOLDEN[str(length)]["prompt"] for length in LENGTHS]
    plain = generate(model, prompts, tree="off", max_new_tokens=6, stop_token_ids=[])
    outs = generate(model, prompts, tree=tree, max_new_tokens=6, stop_token_ids=[])
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    for length, out in zip(LENGTHS, outs, strict=True):
        assert out.token_ids[:2] == [GOLDEN[str(length)]["first"], GOLDEN[str(length)]["root"]]
        assert out.stats.num_draft_tokens > 0
