"""The two sides run the same model: same logits, same texts; and the bytes that a token reads are those it must.

T = tokens, V = vocabulary
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from compressed_spec import TokenTree, load_model
from compressed_spec.layout import Addressing, pool_specs
from compressed_spec.measure.bench import check_logits
from compressed_spec.measure.parts import NODES, bookkeeping_by_layers, tree_of
from compressed_spec.measure.roof import state_bytes, token_bytes
from compressed_spec.measure.sides import OurSide, Side, TransformersSide, transformers_side
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind, expected_parameters
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.models.deepseek_v4.to_transformers import logits_difference, to_transformers
from compressed_spec.rows import make_plan

PROMPT = [7 * i % 380 + 3 for i in range(50)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stored in FP8 and FP4; of the FP8 sides, 128 does not divide 96, 160 and others."""
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        compress_ratios=(0, 4, 128, 4),
        hidden_size=160,
        moe_intermediate_size=96,
        num_hash_layers=1,
        index_topk=6,
    )


@pytest.fixture(scope="module")
def model(folder: Path) -> DeepseekV4:
    return load_model(folder, progress=False)


@pytest.fixture(scope="module")
def peer(model: DeepseekV4, folder: Path) -> TransformersSide:
    return transformers_side(model, folder)


@torch.no_grad()
def plain_text(peer: TransformersSide, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation, one whole forward a token, no cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(peer.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_logits_agree_and_weights_are_shared(model: DeepseekV4, peer: TransformersSide) -> None:
    cache = model.new_cache(max_length=64)
    ours_TV = model.verify(cache, [TokenTree.chain(PROMPT)]).logits
    theirs_TV = peer.model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert logits_difference(ours_TV, theirs_TV) < 1e-5
    ours = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert all(tensor.data_ptr() in ours for tensor in peer.model.state_dict().values())


def test_weights_are_those_that_transformers_reads_itself(tmp_path: Path) -> None:
    """From an unquantised checkpoint, which it reads rightly."""
    folder = make_tiny_checkpoint(tmp_path, experts="bf16", compress_ratios=(0, 4), hidden_size=64)
    read = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    made = to_transformers(load_model(folder, progress=False), folder)
    expected = read.state_dict()
    assert made.state_dict().keys() == expected.keys()
    assert all(tensor.equal(expected[name].float()) for name, tensor in made.state_dict().items() if "tid" not in name)
    assert {name: b.tolist() for name, b in made.named_buffers() if "inv_freq" in name} == {
        name: b.tolist() for name, b in read.named_buffers() if "inv_freq" in name
    }


@torch.no_grad()
def test_bfloat16_runs_wherever_transformers_runs_it(tmp_path: Path) -> None:
    """5.17 fails in bfloat16 on checkpoints that it loads itself, too: that is said in a sentence."""
    folder = make_tiny_checkpoint(tmp_path, experts="bf16", compress_ratios=(0, 4), hidden_size=64)
    read = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = load_model(folder, dtype="bfloat16", progress=False)
    peer = transformers_side(model, folder)
    dtypes = {name: tensor.dtype for name, tensor in read.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in peer.model.state_dict().items()} == dtypes
    try:
        read(torch.tensor([PROMPT]))
    except RuntimeError:
        with pytest.raises(ValueError, match=r"transformers .* cannot run this model .*: try --dtype float32"):
            check_logits(model, peer, PROMPT)
    else:
        assert 0 < check_logits(model, peer, PROMPT) < 0.05


def test_a_difference_in_one_row_is_rounding_but_in_all_it_is_not() -> None:
    theirs_TV = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    flipped_TV = theirs_TV.clone()
    flipped_TV[3] += 1.0
    assert logits_difference(flipped_TV, theirs_TV) == 0.0
    assert logits_difference(theirs_TV + 0.5, theirs_TV) == pytest.approx(0.5 / float(theirs_TV.abs().max()), rel=1e-5)


@pytest.mark.parametrize("stop", [False, True])
def test_all_sides_write_what_whole_forwards_write(model: DeepseekV4, peer: TransformersSide, stop: bool) -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    expected = [plain_text(peer, prompt, 14) for prompt in prompts]
    sides: list[Side] = [peer, *(OurSide(model=model, tree=tree) for tree in ("off", "s2_k1_d3", "s3_k2_d6"))]
    for side in sides:
        decoded = side.decode(prompts, 14, stop=stop)
        assert decoded.texts == expected
        assert decoded.num_decoded == 26
        assert 0 < decoded.prefill_seconds < decoded.total_seconds
        assert 0 < decoded.decode_seconds < decoded.total_seconds


def test_both_sides_stop_at_the_same_token(model: DeepseekV4, peer: TransformersSide) -> None:
    """Random weights never say EOS, so another token stands for it; the first row ends before the second."""
    prompts = [PROMPT, PROMPT[::-1]]
    texts = [plain_text(peer, prompt, 14) for prompt in prompts]
    end = next(token for token in texts[0][2:] if token not in texts[1] and texts[0].index(token) >= 2)
    theirs = TransformersSide(model=peer.model, eos_token_ids=(end,)).decode(prompts, 14, stop=True)
    before, model.eos_token_ids = model.eos_token_ids, (end,)
    try:
        ours = OurSide(model=model, tree="s2_k2_d5").decode(prompts, 14, stop=True)
    finally:
        model.eos_token_ids = before
    assert ours.texts == theirs.texts == [texts[0][: texts[0].index(end) + 1], texts[1]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("context", [10, 100])
def test_weight_bytes_are_those_of_the_parameter_list(folder: Path, dtype: str, context: int) -> None:
    """Counted from names and shapes: 2 of 4 experts, one row of a table, index queries beyond 6 x 4 tokens."""
    model = load_model(folder, dtype=dtype, progress=False)
    narrow = 2 if dtype == "bfloat16" else 4
    wide_leaves = (
        "norm.weight",
        "attn_sink",
        "ape",
        "gate.weight",
        "gate.bias",
        "compressor.wkv.weight",
        "wgate.weight",
    )
    total = 0
    for name, shape in expected_parameters(model.config, DraftHeadKind.NONE).items():
        count = torch.Size(shape).numel()
        if name == "embed.weight" or name.endswith("tid2eid"):
            count = shape[1]
        if ".experts." in name:
            count = count * 2 // 4
        if ".indexer.w" in name and context == 10:
            count = 0
        wide = name.endswith(wide_leaves) or ".hc_" in f".{name}"
        total += count * (8 if name.endswith("tid2eid") else 4 if wide else narrow)
    assert token_bytes(model, context).weights == total
    assert token_bytes(model, context).total == total + state_bytes(model.state_spec(), context)


@pytest.mark.parametrize("context", [0, 3, 10, 23, 27, 28, 100, 255, 300])
def test_state_bytes_are_those_of_the_rows_that_a_plan_lists(model: DeepseekV4, context: int) -> None:
    """Rows read are those listed; the pooled windows of a whole period of tokens are shared out among them."""
    spec = model.state_spec()
    cache = model.new_cache(max_length=512)
    plan = make_plan(spec, cache.shape, [TokenTree(tokens=[5], parents=[-1])], [0], [context], cache.device)
    total = spec.num_layers * int((plan.window_rows_TW >= 0).sum()) * spec.head_dim * 4
    dims = {pool.name: pool.dim for pool in pool_specs(spec, 512) if pool.addressing is Addressing.RING}
    for comp in spec.compressions:
        own = plan.compressions[comp.name]
        listed = comp.index_topk if own.listed_TK is None else int((own.listed_TK >= 0).sum())
        scored = own.num_visible if own.listed_TK is None else 0
        lanes = [dims[f"buffer.{comp.name}"], dims.get(f"index_buffer.{comp.name}", 0)]
        row = listed * comp.entry_dim + scored * comp.index_dim + sum(lanes) * comp.span / comp.ratio
        total += comp.num_layers * int(row * 4)
    assert state_bytes(spec, context) == total


def test_trees_to_time_have_their_size_and_go_deep() -> None:
    for size in range(1, 17):
        tree = tree_of(size, [9, 8, 7, 6, 5, 4], 100)
        assert len(tree) == size
        assert tree.tokens[0] == 9
        assert len(tree.path_to(size - 1)) >= (3 if size >= NODES else 1)


def test_bookkeeping_is_timed_for_fewer_and_for_more_layers(model: DeepseekV4) -> None:
    found = bookkeeping_by_layers(model.state_spec(), model.device, 40, model.vocab_size, 3)
    assert {layers: len(times) for layers, times in found.items()} == {3: 3, 4: 3, 16: 3}
