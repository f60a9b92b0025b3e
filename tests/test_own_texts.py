"""Training on the model's own texts: what is marked there, and what the marks do."""

from pathlib import Path

import pytest
import torch

from compressed_spec.generate import generate
from compressed_spec.models.deepseek_v4.config import parse_config
from compressed_spec.models.deepseek_v4.load import load_model
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.training.corpus import Document, Encoded, batches, encode, train_tokenizer
from compressed_spec.training.export import export_checkpoint
from compressed_spec.training.gate import ANSWER_TOKENS
from compressed_spec.training.losses import next_token_loss
from compressed_spec.training.own_texts import repeated
from compressed_spec.training.polish import TEXTS_FILE, Polishing, polishing_documents
from compressed_spec.training.recipe import Recipe, demo_config, initialize


def test_repeated_tokens_are_those_of_a_third_run() -> None:
    text = [9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 7]
    assert repeated(text, start=1, size=3, times=3) == frozenset({7, 8, 9, 10})
    assert repeated(text, start=1, size=3, times=4) == frozenset()
    assert repeated(text, start=5, size=3, times=2) == frozenset({8, 9, 10})
    assert repeated([1] * 5, start=0, size=2, times=3) == frozenset({2, 3, 4})


def test_own_texts_are_drafted_but_not_said() -> None:
    own = Encoded(ids=[0, *range(10, 29), 1], prompt_length=5, own=True, repeated=frozenset({12, 13}))
    batch = next(batches([own], rows=1, length=18, extra=3, prompt_weight=0.5, seed=0))
    assert not batch.weights.any()
    assert batch.unlikely[0].nonzero().flatten().tolist() == [12, 13]
    assert batch.draft_weights[0].tolist() == [0.0, *[0.5] * 4, *[1.0] * 7, 0.0, 0.0, *[1.0] * 7]


@pytest.mark.parametrize("sure", [-4.0, 0.0, 6.0])
def test_unlikelihood_is_the_logarithm_of_all_else(sure: float) -> None:
    logits_TV = torch.randn(3, 20, dtype=torch.float64)
    logits_TV[:, 4] += sure
    logits_TV.requires_grad_()
    labels_T, weights_T = torch.full((3,), 4), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    unlikely_T = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    eye_VV = torch.eye(20, dtype=torch.float64)
    main, repeats, _ = next_token_loss(logits_TV, eye_VV, labels_T, weights_T, unlikely_T)
    law_TV = logits_TV.softmax(-1)
    torch.testing.assert_close(main, -law_TV[:2, 4].log().sum() / 2)
    torch.testing.assert_close(repeats, -(1 - law_TV[2, 4]).log() / 2)
    (slope_TV,) = torch.autograd.grad(repeats, logits_TV)
    torch.testing.assert_close(slope_TV[2, 4], law_TV[2, 4].detach() / 2)


def test_own_texts_are_greedy_answers_and_are_kept(tmp_path: Path) -> None:
    told = [Document(prompt=f"What is {n} + {n}?", completion=f" It is {2 * n}.") for n in range(40)]
    tokenizer = train_tokenizer(told, 270)
    config = demo_config() | {"vocab_size": 270, "num_hidden_layers": 3, "n_routed_experts": 4, "num_hash_layers": 1}
    config |= {"compress_ratios": [0, 4, 128, 0]}
    model = DeepseekV4(parse_config(config), draft_head=DraftHeadKind.MTP, dtype=torch.float32)
    initialize(model, 0)
    export_checkpoint(model, config, tokenizer, tmp_path / "checkpoint")
    documents, run = encode(told, tokenizer), tmp_path / "run"
    polishing = Polishing(number=1, folder=tmp_path / "checkpoint", num_texts=3, earlier=())
    found = polishing_documents(documents, Recipe(), polishing, run, processes=1, compile=False)
    own = [document for document in found if document.own]
    assert len(own) == 3
    exported = load_model(tmp_path / "checkpoint", progress=False)
    for document in own:
        prompt = document.ids[: document.prompt_length]
        (expected,) = generate(exported, [prompt], tree="off", max_new_tokens=ANSWER_TOKENS)
        assert document.ids[document.prompt_length :] == expected.token_ids
        assert document.repeated == repeated(document.ids, start=document.prompt_length)
    assert polishing_documents(documents, Recipe(), polishing, run, processes=1, compile=False) == found
    again, second = Polishing(number=2, folder=tmp_path / "nowhere", num_texts=3, earlier=(run,)), tmp_path / "second"
    second.mkdir()
    (second / TEXTS_FILE).write_text("[]")
    old = polishing_documents(documents, Recipe(), again, second, processes=1, compile=False)
    assert [document for document in old if document.own] == [document for document in own if document.repeated]
