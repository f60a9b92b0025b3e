"""The drop-in for transformers: its options and its streamers, with the text of its own `generate`.

Greedy texts are compared with transformers' own decoding of each row alone: in a batch it compresses the pads of a
left-padded row like tokens, so that the row's text depends on its company there.
"""

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV4ForCausalLM, GenerationConfig, LogitsProcessorList, TextIteratorStreamer
from transformers.generation import (
    ClassifierFreeGuidanceLogitsProcessor,
    GenerateDecoderOnlyOutput,
    StopStringCriteria,
    TopPLogitsWarper,
)

from compressed_spec import generate
from compressed_spec.hf import tree_generate
from compressed_spec.hf_processors import sampling_options
from compressed_spec.models.deepseek_v4.from_transformers import share_parameters
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.processors import NodeHistory
from compressed_spec.sampling import target_log_probs
from compressed_spec.testing import OracleDrafter, RandomDrafter, WrongDrafter
from compressed_spec.text import load_tokenizer

VOCAB, PAD, LENGTH = 384, 2, 24
LENGTHS = (5, 22, 1, 13)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        layout="transformers",
        compress_ratios=(0, 4, 8),
        hidden_size=64,
        moe_intermediate_size=32,
        index_topk=3,
        hc_sinkhorn_iters=2,
    )


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    model = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config = GenerationConfig(bos_token_id=0, pad_token_id=PAD)
    return model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [rng.choices(range(3, VOCAB), k=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def alone(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' own greedy text of each prompt alone."""
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=LENGTH)[0, len(prompt) :].tolist() for prompt in prompts
    ]


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor([[PAD] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]),
        "attention_mask": torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]),
    }


def tree_text(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """New tokens of each row, padding included."""
    batch = padded(prompts)
    ids = model.generate(**batch, custom_generate=tree_generate, **options)
    length = batch["input_ids"].shape[1]
    assert ids[:, :length].equal(batch["input_ids"])
    new: list[list[int]] = ids[:, length:].tolist()
    return new


class Recorder:
    """A streamer that remembers what it was told."""

    def __init__(self, fails_at: int = -1) -> None:
        self.told: list[list[int]] = []
        self.ended, self._fails_at = 0, fails_at

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        if len(self.told) == self._fails_at:
            raise RuntimeError("broken pipe")
        self.told.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("tree", ["off", "s1_k1_d2", "s3_k1_d4", "s3_k2_d6"])
def test_T15_greedy_text_of_a_left_padded_batch(
    model: Any, prompts: list[list[int]], alone: list[list[int]], tree: str
) -> None:
    assert len({tuple(text) for text in alone}) == len(prompts)
    assert tree_text(model, prompts, tree=tree, max_new_tokens=LENGTH) == alone
    assert tree_text(model, prompts, tree=tree, max_new_tokens=LENGTH, batch_size=2) == alone


@pytest.mark.parametrize("drafter", [OracleDrafter, WrongDrafter, RandomDrafter])
@pytest.mark.filterwarnings("ignore:None of")
def test_greedy_text_with_any_drafter(
    model: Any, prompts: list[list[int]], alone: list[list[int]], drafter: Any
) -> None:
    texts = [[*prompt, *text] for prompt, text in zip(prompts, alone, strict=True)]
    helper = drafter(VOCAB) if drafter is RandomDrafter else drafter(texts, VOCAB)
    assert tree_text(model, prompts, tree="s4_k2_d8", drafter=helper, max_new_tokens=LENGTH) == alone


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": None, "max_length": 35},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "suppress_tokens": [163, 267]},
        {"bad_words_ids": [[200], [13, 13]], "forced_eos_token_id": 7},
        {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 300},
        {"min_new_tokens": 12, "eos_token_id": list(range(3, 100))},
        {"min_length": 34, "eos_token_id": list(range(3, 100))},
        {"sequence_bias": [[[163], -40.0], [[95, 100], 40.0]]},
    ],
    ids=lambda options: "-".join(options),
)
def test_T32_every_option_means_what_it_means_there(
    model: Any, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    options = {"max_new_tokens": 16, **options} if "max_length" not in options else options
    plain = model.generate(torch.tensor([prompts[1]]), max_new_tokens=16)[0, 22:].tolist()
    expected = model.generate(torch.tensor([prompts[1]]), **options)[0, 22:].tolist()
    assert expected != plain
    assert tree_text(model, [prompts[1]], **options) == [expected]


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.3}, {"min_new_tokens": 9, "eos_token_id": list(range(3, 100))}], ids=str
)
def test_T32_options_mean_the_same_behind_pads(model: Any, prompts: list[list[int]], options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 14, **options}
    rows = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    longest = max(map(len, rows))
    assert tree_text(model, prompts, **options) == [row + [PAD] * (longest - len(row)) for row in rows]


def test_T32_allowed_tokens_are_asked_for_by_row(model: Any, prompts: list[list[int]]) -> None:
    seen: set[tuple[int, int]] = set()

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        seen.add((batch_id, int(ids[-1])))
        return list(range(10 + 50 * batch_id, 60 + 50 * batch_id))

    new = tree_text(model, prompts, prefix_allowed_tokens_fn=allowed, max_new_tokens=12)
    for row, text in enumerate(new):
        assert set(text) <= set(range(10 + 50 * row, 60 + 50 * row))
        assert {(row, token) for token in (prompts[row][-1], *text[:-1])} <= seen


@pytest.mark.parametrize("tree", ["off", "s3_k2_d6"])
def test_T29_eos_pads_the_rows_that_end_first(
    model: Any, prompts: list[list[int]], alone: list[list[int]], tree: str
) -> None:
    eos = [alone[0][6], alone[1][11], alone[3][0]]
    ends = [next((i + 1 for i, t in enumerate(text) if t in eos), len(text)) for text in alone]
    longest = max(ends)
    expected = [text[:end] + [PAD] * (longest - end) for text, end in zip(alone, ends, strict=True)]
    assert len(set(ends)) > 2
    assert tree_text(model, prompts, tree=tree, max_new_tokens=LENGTH, eos_token_id=eos) == expected


def test_a_missing_pad_token_is_an_eos(model: Any, prompts: list[list[int]], alone: list[list[int]]) -> None:
    config = GenerationConfig(eos_token_id=alone[0][6], max_new_tokens=12)
    batch = padded(prompts[:1] * 2)
    assert model.generate(**batch, generation_config=config, custom_generate=tree_generate).shape[1] == 5 + 7
    new = tree_text(model, [prompts[0], prompts[1][:5]], eos_token_id=alone[0][6], pad_token_id=None, max_new_tokens=12)
    assert new[0][7:] == [alone[0][6]] * 5


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_T30_max_new_tokens_is_never_exceeded(
    model: Any, prompts: list[list[int]], alone: list[list[int]], count: int
) -> None:
    texts = [[*prompt, *text] for prompt, text in zip(prompts, alone, strict=True)]
    new = tree_text(model, prompts, tree="s5_k1_d6", drafter=OracleDrafter(texts, VOCAB), max_new_tokens=count)
    assert new == [text[:count] for text in alone]


SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "max_new_tokens": 12}


def test_T28_a_seed_decides_the_text_and_the_tree_does_not(model: Any, prompts: list[list[int]]) -> None:
    plain = tree_text(model, prompts, tree="off", seed=3, **SAMPLED)
    for tree in ("s1_k3_d4", "s3_k2_d6"):
        assert tree_text(model, prompts, tree=tree, seed=3, **SAMPLED) == plain
    assert tree_text(model, prompts, tree="off", seed=4, **SAMPLED) != plain
    target = share_parameters(model)
    options = {name: SAMPLED[name] for name in ("temperature", "top_k", "top_p", "max_new_tokens")}
    ours = generate(target, prompts, tree="off", seed=3, stop_token_ids=[], **options)
    assert [out.token_ids for out in ours] == plain


def test_T28_without_a_seed_torch_decides(model: Any, prompts: list[list[int]]) -> None:
    torch.manual_seed(5)
    first, second = (tree_text(model, prompts, **SAMPLED) for _ in range(2))
    torch.manual_seed(5)
    assert tree_text(model, prompts, **SAMPLED) == first
    assert first != second


def test_T28_several_sequences_a_prompt(model: Any, prompts: list[list[int]]) -> None:
    new = tree_text(model, [prompts[0]] * 6, seed=list(range(6)), **SAMPLED)
    ids = torch.tensor(prompts[:1])
    out = model.generate(ids, custom_generate=tree_generate, num_return_sequences=6, seed=list(range(6)), **SAMPLED)
    assert out[:, len(prompts[0]) :].tolist() == new
    assert len({tuple(text) for text in new}) == 6


def test_usual_warpers_become_options_and_the_law_stays(model: Any) -> None:
    """Wherever the list is split, what was taken off and what is left draw from the same law as the whole list."""
    scores = torch.randn(1, VOCAB) * 3
    for settings, taken in (
        ({"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05}, (0.7, 9, 0.8, 0.05)),
        ({"temperature": 0.7, "top_k": 0, "top_p": 0.8}, (0.7, 0, 0.8, 0.0)),
        ({"temperature": 0.7, "top_k": 9, "typical_p": 0.9}, (1.0, 0, 1.0, 0.0)),
        ({"temperature": 0.7, "top_h": 0.5, "top_k": 9}, (1.0, 9, 1.0, 0.0)),
    ):
        config = GenerationConfig(do_sample=True, **settings)
        config._eos_token_tensor = None
        warpers = model._get_logits_processor(config, input_ids_seq_length=1)
        options = sampling_options(warpers, do_sample=True)
        p = options.params
        assert (p.temperature, p.top_k, p.top_p, p.min_p) == taken
        num_taken = sum(value != default for value, default in zip(taken, (1.0, 0, 1.0, 0), strict=True))
        assert len(options.processors) == len(warpers) - num_taken
        assert list(options.processors) == warpers[: len(options.processors)]
        rest = LogitsProcessorList(options.processors) if options.processors else None
        history = NodeHistory(prompt_ids=[0], generated_ids=[])
        ours = target_log_probs(scores, [replace(p, logits_processor=rest)], [history]).exp()
        theirs = warpers(torch.zeros((1, 1), dtype=torch.int64), scores.clone()).softmax(-1)
        torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=1e-6, rtol=0)
    wide = LogitsProcessorList([TopPLogitsWarper(0.9, min_tokens_to_keep=2)])
    assert sampling_options(wide, do_sample=True).processors == (wide[0],)
    assert sampling_options([TopPLogitsWarper(0.9)], do_sample=False).params.is_greedy


def test_T29_a_stop_string_of_transformers(folder: Path, model: Any, alone: list[list[int]], prompts: Any) -> None:
    tokenizer = load_tokenizer(folder)
    text = next(word for token in alone[1][8:] if (word := tokenizer.decode([token])).isascii() and len(word) > 1)
    criteria: Any = [StopStringCriteria(tokenizer, [text])]
    ids = torch.tensor([prompts[1]])
    expected = model.generate(ids, stopping_criteria=criteria, max_new_tokens=LENGTH)
    assert expected.shape[1] < len(prompts[1]) + LENGTH
    for tree in ("off", "s3_k2_d6"):
        out = model.generate(
            ids, stopping_criteria=criteria, max_new_tokens=LENGTH, custom_generate=tree_generate, tree=tree
        )
        assert out.equal(expected)


def test_T29_criteria_end_their_own_row(model: Any, prompts: list[list[int]], alone: list[list[int]]) -> None:
    target = alone[1][8]
    criteria: Any = [lambda ids, scores: ids[:, -1] == target]
    new = tree_text(model, prompts, stopping_criteria=criteria, max_new_tokens=LENGTH)
    for text, full in zip(new, alone, strict=True):
        end = full.index(target) + 1 if target in full else LENGTH
        assert text == full[:end] + [PAD] * (LENGTH - end)


def test_T29_a_streamer_hears_the_prompt_then_each_round(
    model: Any, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    streamer = Recorder()
    oracle = OracleDrafter([[*prompts[1], *alone[1]]], VOCAB)
    eos = alone[1][9]
    assert eos not in alone[1][:9]
    model.generate(
        torch.tensor([prompts[1]]),
        streamer=streamer,
        custom_generate=tree_generate,
        tree="s3_k1_d4",
        drafter=oracle,
        eos_token_id=eos,
        max_new_tokens=LENGTH,
    )
    assert streamer.told == [prompts[1], alone[1][:1], alone[1][1:5], alone[1][5:9], alone[1][9:10]]
    assert streamer.ended == 1


def test_a_text_streamer_gets_the_whole_text(folder: Path, model: Any, prompts: list[list[int]]) -> None:
    tokenizer = load_tokenizer(folder)
    plain, ours = (TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10) for _ in range(2))
    ids = torch.tensor([prompts[1]])
    model.generate(ids, streamer=plain, max_new_tokens=LENGTH)
    model.generate(ids, streamer=ours, max_new_tokens=LENGTH, custom_generate=tree_generate)
    assert "".join(ours) == "".join(plain) != ""


def test_T20_a_streamer_or_processor_that_raises(model: Any, prompts: list[list[int]], alone: list[list[int]]) -> None:
    ids = torch.tensor([prompts[1]])
    run = functools.partial(model.generate, ids, custom_generate=tree_generate, max_new_tokens=LENGTH)
    with pytest.raises(RuntimeError, match="broken pipe"):
        run(streamer=Recorder(fails_at=3))
    calls = iter(range(1000))

    def raising(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if next(calls) == 15:
            raise RuntimeError("no such token")
        return scores

    with pytest.raises(RuntimeError, match="no such token"):
        run(logits_processor=LogitsProcessorList([raising]))
    assert run(logits_processor=LogitsProcessorList([raising]))[0, len(prompts[1]) :].tolist() == alone[1]


def test_output_as_a_dictionary(model: Any, prompts: list[list[int]], alone: list[list[int]]) -> None:
    out = model.generate(
        **padded(prompts), custom_generate=tree_generate, return_dict_in_generate=True, max_new_tokens=LENGTH
    )
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert out.sequences[:, max(LENGTHS) :].tolist() == alone
    assert out.scores is None


def test_it_can_be_called_without_generate(model: Any, prompts: list[list[int]], alone: list[list[int]]) -> None:
    streamer = Recorder()
    config = GenerationConfig(max_length=len(prompts[1]) + LENGTH)
    out = tree_generate(model, torch.tensor([prompts[1]]), generation_config=config, streamer=streamer)
    assert isinstance(out, torch.Tensor)
    assert out[0, len(prompts[1]) :].tolist() == alone[1] == [token for told in streamer.told for token in told]


GUIDANCE: Any = LogitsProcessorList([ClassifierFreeGuidanceLogitsProcessor(2.0)])
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "beam_search cannot be combined"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores is not returned"),
    "logits": ({"return_dict_in_generate": True, "output_logits": True}, "output_logits is not returned"),
    "guidance": ({"logits_processor": GUIDANCE}, "ClassifierFreeGuidanceLogitsProcessor needs more"),
    "guidance_scale": ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidanceLogitsProcessor needs more"),
    "head": ({"drafter": "mtp"}, "has no MTP head"),
    "tree": ({"tree": "s3"}, "tree"),
    "verifier": ({"verifier": "hope"}, "verifier"),
    "batch": ({"batch_size": 0}, "batch_size"),
    "seeds": ({"seed": [1, 2]}, "one seed a prompt"),
    "unknown": ({"trees": "s3_k2_d6"}, "trees"),
    "unused": ({"output_router_logits": True}, "output_router_logits is no option"),
    "positions": ({"position_ids": torch.arange(1, 6)[None]}, "position_ids must count"),
    "right_padding": ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "attention_mask must be 0 for padding"),
    "hole": ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}, "attention_mask must be 0 for padding"),
    "all_pads": ({"attention_mask": torch.zeros((1, 5), dtype=torch.int64)}, "attention_mask must be 0 for padding"),
    "too_long": ({"max_new_tokens": 9000}, "beyond the model's 8192 positions"),
    "token": ({"eos_token_id": 400}, "Token id 400 is out of range"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.filterwarnings("ignore")
def test_T36_refused(model: Any, prompts: list[list[int]], name: str) -> None:
    options, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor(prompts[:1]), custom_generate=tree_generate, **{"max_new_tokens": 3, **options})


def test_T36_refused_caches_and_batches(model: Any, prompts: list[list[int]]) -> None:
    output = model(torch.tensor(prompts[:1]))
    name = "cache" if "cache" in output else "past_key_values"  # its name before transformers 5.2x
    given = {name: output[name]}
    with pytest.raises(ValueError, match="hold no branches"):
        model.generate(torch.tensor(prompts[:1]), max_new_tokens=3, custom_generate=tree_generate, **given)
    with pytest.raises(ValueError, match="A streamer takes one row"):
        model.generate(**padded(prompts), max_new_tokens=3, streamer=Recorder(), custom_generate=tree_generate)
    with pytest.raises(ValueError, match="give pad_token_id"):
        tree_generate(
            model,
            padded(prompts)["input_ids"],
            generation_config=GenerationConfig(max_length=30),
            stopping_criteria=[lambda ids, scores: False],
        )
