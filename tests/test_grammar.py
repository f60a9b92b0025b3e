"""Texts of a grammar: the mask of every node is that of a fresh automaton over the node's own path."""

import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from transformers import DeepseekV4ForCausalLM, GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

from compressed_spec import TokenTree, generate, load_model
from compressed_spec.grammar import GrammarMask, grammar_tokenizer, json_schema_mask, lark_mask, regex_mask
from compressed_spec.hf import tree_generate
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.testing import AlternatingDrafter, OracleDrafter, RandomDrafter, WrongDrafter
from compressed_spec.text import load_tokenizer

EOS, VOCAB = 1, 384
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "count", "colour"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PROMPTS = [[5, 90, 17], [200, 5, 90, 17, 33, 70, 71, 8]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        experts="bf16",
        compress_ratios=(0, 4, 128),
        hidden_size=64,
        moe_intermediate_size=32,
        hc_sinkhorn_iters=2,
    )


@pytest.fixture(scope="module")
def model(folder: Path) -> DeepseekV4:
    return load_model(folder, progress=False)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def shared(tokenizer: PreTrainedTokenizerBase) -> LLTokenizer:
    return grammar_tokenizer(tokenizer)


@pytest.fixture(scope="module")
def plain(model: DeepseekV4, shared: LLTokenizer) -> list[list[int]]:
    """Greedy texts one token at a time, each masked by an automaton that starts afresh and reads the whole text."""
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA)
    texts = []
    for prompt in PROMPTS:
        cache = model.new_cache(max_length=128, max_nodes=1)
        text: list[int] = []
        logits_V = model.prefill(cache, [prompt])[0]
        while not text or text[-1] != EOS:
            text.append(int(logits_V.masked_fill(~fresh_mask(shared, grammar, text), -torch.inf).argmax()))
            verify = model.verify(cache, [TokenTree(tokens=[text[-1]], parents=[-1])])
            cache.commit(verify, [[0]])
            logits_V = verify.logits[0]
        texts.append(text)
    return texts


def fresh_mask(shared: LLTokenizer, grammar: str, text: Sequence[int]) -> torch.Tensor:
    matcher = LLMatcher(shared, grammar)
    assert matcher.consume_tokens(list(text))
    bits = matcher.compute_bitmask()
    return torch.tensor([bool(bits[i // 8] >> i % 8 & 1) for i in range(VOCAB)])


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "count", "colour"]
        and len(value["name"]) <= 4
        and value["count"] in range(100)
        and value["colour"] in ("red", "green")
    )


def constrained(model: DeepseekV4, mask: Any, **options: Any) -> list[list[int]]:
    outs = generate(model, PROMPTS, logits_processor=mask, **{"max_new_tokens": 60, **options})
    assert {out.finish_reason for out in outs} == {"stop"}
    return [out.token_ids for out in outs]


def test_plain_texts_are_json(tokenizer: PreTrainedTokenizerBase, plain: list[list[int]]) -> None:
    assert plain[0] != plain[1]
    for text in plain:
        assert text[-1] == EOS
        assert len(text) > 20
        assert is_valid(tokenizer.decode(text[:-1]))


@pytest.mark.parametrize("tree", ["off", "s1_k1_d2", "s5_k1_d6", "s3_k2_d6", "s3_k3_d14"])
@pytest.mark.parametrize("drafter", ["mtp", "oracle", "wrong", "alternating", "random"])
@pytest.mark.filterwarnings("ignore:None of")
def test_T33_speculative_greedy_equals_plain_greedy(
    model: DeepseekV4, shared: LLTokenizer, plain: list[list[int]], tree: str, drafter: str
) -> None:
    """Accepted paths of any length, and rounds of which nothing is accepted; the text ends inside a round."""
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, plain, strict=True)]
    made: dict[str, Any] = {
        "oracle": OracleDrafter(texts, VOCAB),
        "wrong": WrongDrafter(texts, VOCAB),
        "alternating": AlternatingDrafter(texts, VOCAB),
        "random": RandomDrafter(VOCAB),
    }
    mask = json_schema_mask(shared, SCHEMA)
    assert constrained(model, mask, tree=tree, drafter=made.get(drafter, drafter)) == plain


def test_T33_sampled_texts_follow_the_schema(
    model: DeepseekV4, tokenizer: PreTrainedTokenizerBase, shared: LLTokenizer
) -> None:
    mask = json_schema_mask(shared, SCHEMA)
    options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "drafter": "mtp"}
    texts = constrained(model, mask, tree="s3_k2_d6", **options)
    assert texts == constrained(model, mask, tree="off", **options)
    assert all(is_valid(tokenizer.decode(text[:-1])) for text in texts)


def test_T33_the_mask_is_a_function_of_the_path(shared: LLTokenizer, plain: list[list[int]]) -> None:
    """In any order of calls: forth, back, to another text, to a dead end and past the end."""
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA)
    mask = json_schema_mask(shared, SCHEMA).for_prompt(PROMPTS[0])
    rng = random.Random(0)
    scores = torch.zeros(1, VOCAB + 3)
    for _ in range(300):
        text = rng.choice(plain)
        path = text[: rng.randrange(len(text))]
        kept = ~mask(torch.tensor([PROMPTS[0] + path]), scores).isinf()[0]
        assert kept[:VOCAB].equal(fresh_mask(shared, grammar, path))
        assert not kept[VOCAB:].any()
        forbidden = rng.choice((~kept).nonzero().flatten().tolist())
        if kept.nonzero().flatten().tolist() != [EOS]:
            dead = [*PROMPTS[0], *path, forbidden, *text[:2]]
            assert mask(torch.tensor([dead]), scores) is scores
    for text in plain:
        for beyond in ([], [EOS], [EOS, EOS]):
            kept = ~mask(torch.tensor([[*PROMPTS[0], *text[:-1], *beyond]]), scores).isinf()[0]
            assert kept.nonzero().flatten().tolist() == [EOS]


def test_T33_a_node_costs_its_distance_from_the_last_one(shared: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its depth in the text."""
    mask = regex_mask(shared, "[a-z]*").for_prompt([])
    path = shared.tokenize_str("abcdefghij" * 30)
    steps: list[int] = []

    class Counting:
        def __init__(self, matcher: LLMatcher) -> None:
            self._matcher = matcher

        def __getattr__(self, name: str) -> Any:
            return getattr(self._matcher, name)

        def try_consume_tokens(self, tokens: list[int]) -> int:
            steps.append(len(tokens))
            return self._matcher.try_consume_tokens(tokens)

        def rollback(self, count: int) -> bool:
            steps.append(count)
            return self._matcher.rollback(count)

    monkeypatch.setattr(mask, "_matcher", Counting(mask._matcher))
    scores = torch.zeros(1, VOCAB)
    mask(torch.tensor([path]), scores)
    steps.clear()
    for node in (path + path[:1], path + path[:2], path + path[1:2], path + path[:1] + path[3:4]):
        mask(torch.tensor([node]), scores)
    assert sum(steps) <= 3 * 4
    steps.clear()
    assert mask(torch.tensor([path[:-50]]), scores).isinf().any()
    assert steps == [52, 0]


@pytest.mark.parametrize("tree", ["off", "s3_k2_d6"])
def test_T33_a_grammar_that_may_end_earlier_leaves_the_choice(
    model: DeepseekV4, tokenizer: PreTrainedTokenizerBase, shared: LLTokenizer, tree: str
) -> None:
    """EOS is one of several tokens here; after it, and after a rejected one, the automaton goes on rightly."""
    mask = regex_mask(shared, "(ab|c)+d?")
    options: dict[str, Any] = {"temperature": 1.0, "seed": list(range(2)), "drafter": RandomDrafter(VOCAB)}
    for text in constrained(model, mask, tree=tree, **options):
        assert re.fullmatch("(ab|c)+d?", tokenizer.decode(text[:-1]))


def test_lark_grammars_and_length(model: DeepseekV4, tokenizer: PreTrainedTokenizerBase) -> None:
    mask = lark_mask(tokenizer, 'start: "(" start ")" | "x"')
    bias = {int(tokenizer.convert_tokens_to_ids("x")): 9.0}
    (out,) = generate(model, PROMPTS[:1], logits_processor=mask, max_new_tokens=30, logit_bias=bias)
    text = tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert re.fullmatch(r"\(*x\)*", text)
    assert text.count("(") == text.count(")")


def test_T33_inside_transformers(folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """In a left-padded batch, through `logits_processor`; each row has a mask of its own."""
    path = make_tiny_checkpoint(tmp_path, layout="transformers", compress_ratios=(0, 4, 8), hidden_size=64)
    hf_model: Any = DeepseekV4ForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    hf_model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=2)
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[2] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    texts = [
        hf_model.generate(
            ids,
            attention_mask=(ids != 2).long(),
            logits_processor=LogitsProcessorList([json_schema_mask(tokenizer, SCHEMA)]),
            custom_generate=tree_generate,
            tree=tree,
            max_new_tokens=60,
        )[:, longest:]
        for tree in ("off", "s3_k2_d6")
    ]
    assert texts[0].equal(texts[1])
    assert all(is_valid(tokenizer.decode(text, skip_special_tokens=True)) for text in texts[0].tolist())


def test_T36_refused(tokenizer: PreTrainedTokenizerBase, shared: LLTokenizer) -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: json_schema_mask(shared, {"type": "nonsense"}), "The schema cannot be used"),
        (lambda: json_schema_mask(shared, "no json"), "The schema cannot be used"),
        (lambda: regex_mask(shared, "(a"), "The regular expression cannot be used"),
        (lambda: lark_mask(shared, "start: nowhere"), "The grammar cannot be used"),
        (lambda: regex_mask(shared, "a", eos_token_ids=[1]), "belong to grammar_tokenizer"),
        (lambda: regex_mask(tokenizer, "a", eos_token_ids=[]), "what ends a text"),
    ]
    for make, message in cases:
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(ValueError, match="where the prompt ends"):
        regex_mask(shared, "a")(torch.tensor([[1]]), torch.zeros(1, VOCAB))
    with pytest.raises(ValueError, match="No token of this vocabulary"):
        regex_mask(shared, "a").for_prompt([])(torch.zeros((1, 0)), torch.zeros(1, 5))


def test_T36_without_the_extra(monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for make in (
        lambda: json_schema_mask(tokenizer, SCHEMA),
        lambda: regex_mask(tokenizer, "a"),
        lambda: lark_mask(tokenizer, 'start: "a"'),
        lambda: grammar_tokenizer(tokenizer),
    ):
        with pytest.raises(ValueError, match=r"pip install 'compressed-spec\[grammar\]'"):
            make()


def test_a_mask_alone_belongs_to_one_prompt(shared: LLTokenizer) -> None:
    """Masks of several prompts do not disturb each other."""
    mask = regex_mask(shared, "ab|cd")
    first, second = mask.for_prompt([1, 2]), mask.for_prompt([7])
    assert isinstance(first, GrammarMask)
    a, c, d = (shared.tokenize_str(letter)[0] for letter in "acd")
    scores = torch.zeros(1, VOCAB)
    assert not first(torch.tensor([[1, 2]]), scores)[0, [a, c]].isinf().any()
    assert not second(torch.tensor([[7, c]]), scores)[0, d].isinf()
    assert first(torch.tensor([[1, 2, a]]), scores)[0, d].isinf()
