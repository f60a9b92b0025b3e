"""Training of the demo: the dense forward is the model, losses fall, runs resume exactly, exports load."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from compressed_spec.kernels.hyper_connection import sinkhorn
from compressed_spec.kernels.moe import Routing, routed_experts
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.layout import CacheShape
from compressed_spec.models.deepseek_v4.config import parse_config
from compressed_spec.models.deepseek_v4.load import load_model
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.text import load_tokenizer
from compressed_spec.training.autograd import GroupedExperts, Sinkhorn
from compressed_spec.training.corpus import (
    BOS_TOKEN,
    EOS_TOKEN,
    Document,
    Encoded,
    batches,
    encode,
    read_corpus,
    train_tokenizer,
)
from compressed_spec.training.dense import DenseForward
from compressed_spec.training.export import export_checkpoint
from compressed_spec.training.gate import has_loop, is_well_formed
from compressed_spec.training.loop import LOG_FILE, Budget, Trainer
from compressed_spec.training.optimizer import orthogonalize
from compressed_spec.training.quantize import is_fp4, is_fp8, rounded
from compressed_spec.training.recipe import Recipe, demo_config

LENGTH = 128


def small_config(**overrides: object) -> dict[str, object]:
    small: dict[str, object] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 32,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "index_head_dim": 16,
        "index_topk": 8,
        "n_routed_experts": 4,
        "num_hash_layers": 1,
        "hc_sinkhorn_iters": 4,
        "sliding_window": 16,
        "compress_ratios": [0, 4, 128, 0],
    }
    return demo_config() | small | overrides


def random_model(config: dict[str, object]) -> DeepseekV4:
    model = DeepseekV4(parse_config(config), draft_head=DraftHeadKind.MTP, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
            if name.endswith("weights_proj.weight"):
                parameter.abs_()
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(buffer.shape[0], 4).argsort(dim=1)[:, : buffer.shape[1]])
    return model


def documents() -> list[Encoded]:
    return [Encoded(ids=[0, *(2 + (7 * i + j) % 60 for j in range(90)), 1], prompt_length=8) for i in range(4)]


def recipe(**overrides: object) -> Recipe:
    options: dict[str, object] = {"rows": 2, "length": LENGTH, "micro_batches": 2, "warmup": 0.1}
    return Recipe(**(options | overrides))  # type: ignore[arg-type]


# ---------------------------------------------------------------- the dense forward


def test_dense_forward_is_the_models_own_with_gradients() -> None:
    model = random_model(small_config(index_topk=1000))
    tokens_BL = torch.randint(0, 300, (2, LENGTH))
    expected, _ = model.score(tokens_BL.tolist())
    actual = DenseForward(model, LENGTH)(tokens_BL).streams[-1]
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(expected)
    used = {n: p for n, p in model.named_parameters() if not n.startswith(("mtp", "head", "hc_head", "norm"))}
    used = {n: p for n, p in used.items() if ".indexer." not in n and not n.endswith("gate.bias")}
    wanted = torch.autograd.grad(expected, list(used.values()), upstream)
    got = torch.autograd.grad(actual, list(used.values()), upstream)
    for name, left, right in zip(used, wanted, got, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-8, atol=1e-8, msg=name)


def test_dense_forward_selects_the_same_entries_as_the_model() -> None:
    # Enough index heads that a score of exactly zero (all heads silent), and with it a tie, does not occur.
    model = random_model(small_config(index_n_heads=32))
    tokens_BL = torch.randint(0, 300, (2, LENGTH))
    expected, _ = model.score(tokens_BL.tolist())
    forward = DenseForward(model, LENGTH)
    torch.testing.assert_close(forward(tokens_BL).streams[-1], expected, rtol=1e-10, atol=1e-10)
    everything = forward(tokens_BL, select=False).streams[-1]
    assert not torch.allclose(everything, expected, rtol=1e-3)


def test_skipped_layers_leave_the_streams_alone() -> None:
    model = random_model(small_config())
    passed = DenseForward(model, LENGTH)(torch.randint(0, 300, (1, LENGTH)), skip=frozenset({1}))
    assert torch.equal(passed.streams[1], passed.streams[0])
    assert not torch.allclose(passed.streams[2], passed.streams[1])


def test_chained_draft_steps_are_those_of_decoding() -> None:
    """Chains of three steps against the model's own draft head, which works through a cache, one node at a time."""
    from compressed_spec.cache import Cache, Scratch
    from compressed_spec.rows import Nodes, window_rows
    from compressed_spec.target import DraftStep

    model = random_model(small_config())
    tokens_BL = torch.randint(0, 300, (1, LENGTH + 3))
    forward = DenseForward(model, LENGTH)
    streams_TMD = forward(tokens_BL[:, :LENGTH]).streams[-1]
    told = [tokens_BL[:, step + 1 : step + 1 + LENGTH] for step in range(3)]
    steps = forward.draft(streams_TMD, told, None)

    for start in (0, 5, 40, 99):
        shape = CacheShape(batch_size=1, max_length=LENGTH, max_nodes=LENGTH, prefill_chunk=LENGTH, max_draft_nodes=8)
        cache = Cache(model.state_spec(), shape, model.device)
        committed = tokens_BL[0, : start + 1].tolist()
        with torch.no_grad():
            model.prefill(cache, [committed])
            stream = cache.pools["pending_stream"][0, :1].unflatten(-1, (4, -1))
            for step in range(3):
                nodes = Nodes(
                    sequence_T=torch.zeros(1, dtype=torch.int64).numpy(),
                    start_T=torch.tensor([start]).numpy(),
                    depth_T=torch.tensor([step]).numpy(),
                    ancestors_TA=torch.arange(step + 1).view(1, -1).numpy(),
                )
                draft = DraftStep(
                    streams_NMD=stream,
                    tokens_N=tokens_BL[0, start + step + 1 : start + step + 2],
                    position_N=torch.from_numpy(nodes.position_T),
                    window_rows_NW=torch.from_numpy(window_rows(nodes, 16, 1)),
                    first=step,
                )
                stream = model.draft_step(draft, Scratch(cache)).streams_NMD
                torch.testing.assert_close(steps[step][start : start + 1], stream, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_sinkhorn_gradient_is_autograds(iterations: int) -> None:
    logits_TMM = torch.randn(5, 4, 4, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(5, 4, 4, dtype=torch.float64)
    expected = sinkhorn(logits_TMM, iterations, 1e-6)
    actual = Sinkhorn.apply(logits_TMM.permute(1, 2, 0), iterations, 1e-6).permute(2, 0, 1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    (wanted,) = torch.autograd.grad(expected, logits_TMM, upstream)
    (got,) = torch.autograd.grad(actual, logits_TMM, upstream)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


def test_grouped_experts_and_their_gradients_are_the_kernels() -> None:
    x_TD = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    weights_TK = torch.rand(50, 2, dtype=torch.float64, requires_grad=True)
    experts_TK = torch.rand(50, 5).argsort(dim=1)[:, :2] % 4  # expert 3 shared by two ids, some pairs equal
    w13 = torch.randn(6, 24, 16, dtype=torch.float64, requires_grad=True)
    w2 = torch.randn(6, 16, 12, dtype=torch.float64, requires_grad=True)
    inputs = (x_TD, weights_TK, w13, w2)
    routing = Routing(experts_TK=experts_TK, weights_TK=weights_TK)
    expected = routed_experts(x_TD, routing, w13, w2, 3.0, numerics_named("fast"))
    actual = GroupedExperts.apply(x_TD, weights_TK, experts_TK, w13, w2, 3.0)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(expected)
    for left, right in zip(
        torch.autograd.grad(expected, inputs, upstream), torch.autograd.grad(actual, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(right, left, rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------- optimisation and the loop


def test_orthogonalize_brings_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 16, 40)))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_losses_fall_on_a_toy_corpus(tmp_path: Path) -> None:
    trainer = Trainer(small_config(), documents(), recipe(), Budget(steps=25), tmp_path)
    trainer.run(progress=False)
    log = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert log[0]["main"] > 5.0
    assert log[-1]["main"] < 2.5
    assert log[-1]["draft_1"] < log[0]["draft_1"] - 1.0
    assert {"draft_2", "draft_3", "agree_3"} <= log[-1].keys() | log[-2].keys()
    assert [row["step"] for row in log] == list(range(1, 26))


def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    budget = Budget(steps=8)
    whole = Trainer(small_config(), documents(), recipe(), budget, tmp_path / "whole")
    whole.run(progress=False)
    first = Trainer(small_config(), documents(), recipe(), budget, tmp_path / "parts")
    for _ in range(3):
        first.train_step()
    first.save()
    second = Trainer(small_config(), documents(), recipe(), budget, tmp_path / "parts")
    assert second.step == 3
    second.run(progress=False)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_resuming_another_recipe_is_refused(tmp_path: Path) -> None:
    Trainer(small_config(), documents(), recipe(), Budget(steps=1), tmp_path).save()
    with pytest.raises(ValueError, match="another recipe"):
        Trainer(small_config(), documents(), recipe(lr=1.0), Budget(steps=1), tmp_path)


def test_selection_biases_move_towards_idle_experts(tmp_path: Path) -> None:
    trainer = Trainer(small_config(), documents(), recipe(), Budget(steps=2), tmp_path)
    trainer.train_step()
    bias = dict(trainer.model.named_parameters())["layers.1.ffn.gate.bias"]
    assert bias.abs().max() > 0


# ---------------------------------------------------------------- corpus


def texts() -> list[Document]:
    return [Document(prompt=f"Question: what is {n} + {n}?\nAnswer:", completion=f" It is {2 * n}.") for n in range(40)]


def test_rows_begin_with_a_document_and_prompts_weigh_less() -> None:
    tokenizer = train_tokenizer(texts(), 280)
    encoded = encode(texts(), tokenizer)
    bos, eos = tokenizer.token_to_id(BOS_TOKEN), tokenizer.token_to_id(EOS_TOKEN)
    assert all(item.ids[0] == bos and item.ids[-1] == eos for item in encoded)
    batch = next(batches(encoded, rows=3, length=100, extra=4, prompt_weight=0.25, seed=1))
    assert batch.tokens.shape == (3, 104)
    assert bool(torch.as_tensor(batch.tokens[:, 0] == bos).all())
    assert (batch.weights[batch.tokens == bos] == 0).all()
    assert set(batch.weights.unique().tolist()) == {0.0, 0.25, 1.0}
    assert (batch.weights[batch.tokens == eos] == 1).all()


def test_batches_can_be_skipped_for_resuming() -> None:
    def stream(skip: int) -> list[torch.Tensor]:
        source = batches(documents(), rows=2, length=64, extra=4, prompt_weight=1.0, seed=3, skip=skip)
        return [next(source).tokens for _ in range(3)]

    assert torch.equal(stream(2)[0], stream(0)[2])


def test_a_prompts_ids_are_the_start_of_its_documents() -> None:
    tokenizer = train_tokenizer(texts(), 280)
    for text, item in zip(texts(), encode(texts(), tokenizer), strict=True):
        assert tokenizer.encode(text.prompt).ids == item.ids[: item.prompt_length]
        assert tokenizer.decode(item.ids) == text.prompt + text.completion


def test_only_train_parts_are_read(tmp_path: Path) -> None:
    gsm = {"question": "How many?", "answer": "One.\n#### 1"}
    (tmp_path / "gsm8k_train.jsonl").write_text(json.dumps(gsm) + "\n")
    rows = [{"task_id": i, "text": f"task {i}", "code": "pass"} for i in (11, 600, 601, 974)]
    (tmp_path / "mbpp.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    prompts = [document.prompt for document in read_corpus(tmp_path)]
    assert [p for p in prompts if p.startswith("Task")] == ["Task: task 601\nCode:\n", "Task: task 974\nCode:\n"]
    with pytest.raises(ValueError, match="is missing: give the folder"):
        read_corpus(tmp_path / "elsewhere")


# ---------------------------------------------------------------- export and gate


def test_an_export_loads_with_every_weight_as_it_was_rounded(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(texts(), 280)
    config = small_config(vocab_size=280)
    model = DeepseekV4(parse_config(config), draft_head=DraftHeadKind.MTP, dtype=torch.float32)
    model.load_state_dict(random_model(config).state_dict())
    export_checkpoint(model, config, tokenizer, tmp_path)
    loaded = load_model(tmp_path, progress=False)
    for name, value in model.state_dict().items():
        stored = loaded.state_dict()[name]
        if is_fp4(name) or is_fp8(name):
            assert torch.equal(stored, rounded(name, value)), name
            assert 0 < (stored - value).norm() / value.norm() < 0.2, name
        else:
            torch.testing.assert_close(stored, value, rtol=2**-8, atol=0)
    text = "Question: what is 7 + 7?\nAnswer:"
    ids: Sequence[int] = load_tokenizer(tmp_path)(text)["input_ids"]
    assert list(ids) == tokenizer.encode(text).ids


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So 3.\n#### 3", True),
        ("#### 1,200", True),
        ("#### -2.5", True),
        ("It is 3", False),
        ("#### 3 apples", False),
        ("#### 3\nmore", False),
    ],
)
def test_well_formed_answers(text: str, expected: bool) -> None:
    assert is_well_formed(text) is expected


def test_loops_are_eight_tokens_four_times() -> None:
    gram = list(range(8))
    assert has_loop(gram * 4)
    assert not has_loop([*gram, 99] * 3)
    assert has_loop([5] * 11)
    assert not has_loop([5] * 10)


def test_a_run_begins_with_a_checkpoints_weights(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(texts(), 280)
    first = Trainer(small_config(), documents(), recipe(), Budget(steps=1), tmp_path / "first")
    export_checkpoint(first.model, small_config(), tokenizer, tmp_path / "checkpoint")
    again = Trainer(
        small_config(),
        documents(),
        recipe(seed=9),
        Budget(steps=1),
        tmp_path / "again",
        start_from=tmp_path / "checkpoint",
    )
    expected = load_model(tmp_path / "checkpoint", progress=False).state_dict()
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
