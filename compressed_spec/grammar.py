"""Texts of a grammar: a JSON schema, a regular expression or a Lark grammar, masked on every tree node.

The automaton is llguidance's (the extra `grammar`). It walks to each node's own path, by rolling back to where that
path left the last one, so a node costs the steps between the two and not its whole text.

L = tokens of a text, V = vocabulary
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class GrammarMask:
    """A logits processor that leaves only the tokens with which a text of the grammar can go on.

    What it masks is a function of the ids it is given: its automaton is a cache of where the last ones led. It must
    know where the prompt ends: `generate` and `hf.tree_generate` ask for one mask a prompt with `for_prompt`; in a
    `SamplingParams` of your own, give `mask.for_prompt(prompt_ids)`.

    Once a text is complete, only EOS is left. A path that no text of the grammar begins with (a draft that will be
    rejected) keeps its scores.
    """

    def __init__(self, start: "LLMatcher", vocab_size: int, prompt_length: int | None = None) -> None:
        """start: an automaton before the first token, which is copied. vocab_size: ids that it knows."""
        self._start, self._vocab_size, self._prompt_length = start, vocab_size, prompt_length
        self._restart()

    def for_prompt(self, prompt_ids: Sequence[int]) -> "GrammarMask":
        """The mask for texts that follow this prompt."""
        return GrammarMask(self._start, self._vocab_size, len(prompt_ids))

    def __call__(self, ids_1L: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
        """Scores `[1, V]` with -inf for every other token.

        Raises ValueError if the prompt's length is not known, if the grammar turns out too complex, or if no token of
        the vocabulary can go on.
        """
        if self._prompt_length is None:
            raise ValueError("A grammar must know where the prompt ends: use mask.for_prompt(prompt_ids).")
        if not self._walk(ids_1L[0, self._prompt_length :].tolist()):
            return scores_1V
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._raise_error()
        allowed = np.unpackbits(bits, bitorder="little")[: min(self._vocab_size, scores_1V.shape[1])]
        if not allowed.any():
            raise ValueError("No token of this vocabulary can continue the text as the grammar demands: change either.")
        mask_V = torch.zeros(scores_1V.shape[1], dtype=torch.bool)
        mask_V[: len(allowed)] = torch.from_numpy(allowed.astype(bool))
        return scores_1V.masked_fill(~mask_V.to(scores_1V.device), -math.inf)

    def _walk(self, path: list[int]) -> bool:
        """Bring the automaton to the end of `path`; False if the grammar does not allow it."""
        common = min(len(path), len(self._path))
        while path[:common] != self._path[:common]:
            common -= 1
        if common < len(self._path):
            self._matcher.rollback(len(self._path) - common)
            del self._path[common:]
        rest = path[common:]
        known = next((i for i, token in enumerate(rest) if not 0 <= token < self._vocab_size), len(rest))
        count = self._matcher.try_consume_tokens(rest[:known])
        self._raise_error()
        self._path += rest[:count]
        # After the end nothing is consumed any more: a text that goes on regardless may only say EOS again.
        return len(self._path) == len(path) or self._matcher.is_stopped()

    def _restart(self) -> None:
        self._matcher = self._start.deep_copy()
        self._path: list[int] = []

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error()
            self._restart()
            raise ValueError(f"The grammar cannot be followed any further ({reason}): simplify it.")


def json_schema_mask(
    tokenizer: "PreTrainedTokenizerBase | LLTokenizer",
    schema: str | Mapping[str, object],
    *,
    eos_token_ids: Sequence[int] | None = None,
) -> GrammarMask:
    """Texts that are JSON of this schema, in which llguidance's key `x-guidance` is read as well.

    tokenizer: a fast tokenizer of transformers, or `grammar_tokenizer`'s result, which saves the second or so that
    reading a large vocabulary takes. eos_token_ids: the tokens that may end a text, the tokenizer's EOS by default;
    they should be the request's stop tokens.
    Raises ValueError for an unusable schema or tokenizer, or without the extra `grammar`.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return _mask(tokenizer, _llguidance().LLMatcher.grammar_from_json_schema(text), "schema", eos_token_ids)


def regex_mask(
    tokenizer: "PreTrainedTokenizerBase | LLTokenizer", regex: str, *, eos_token_ids: Sequence[int] | None = None
) -> GrammarMask:
    """Texts that a regular expression (Rust's syntax) matches as a whole; otherwise as `json_schema_mask`."""
    return _mask(tokenizer, _llguidance().LLMatcher.grammar_from_regex(regex), "regular expression", eos_token_ids)


def lark_mask(
    tokenizer: "PreTrainedTokenizerBase | LLTokenizer", grammar: str, *, eos_token_ids: Sequence[int] | None = None
) -> GrammarMask:
    """Texts of a context-free grammar in llguidance's Lark syntax; otherwise as `json_schema_mask`."""
    return _mask(tokenizer, _llguidance().LLMatcher.grammar_from_lark(grammar), "grammar", eos_token_ids)


def grammar_tokenizer(
    tokenizer: PreTrainedTokenizerBase, *, eos_token_ids: Sequence[int] | None = None
) -> "LLTokenizer":
    """A tokenizer's vocabulary as the automata read it, to be shared by several masks.

    Raises ValueError for a tokenizer that is not a fast one or has no EOS, or without the extra `grammar`.
    """
    _llguidance()
    from llguidance.hf import from_tokenizer

    eos = [tokenizer.eos_token_id] if eos_token_ids is None else list(eos_token_ids)
    if not eos or None in eos:
        raise ValueError("A grammar must know what ends a text: the tokenizer has no EOS token, give eos_token_ids.")
    if not tokenizer.is_fast:
        raise ValueError(f"A grammar needs a fast tokenizer, and {type(tokenizer).__name__} is none.")
    return from_tokenizer(tokenizer, eos_token=eos)


def _mask(
    tokenizer: "PreTrainedTokenizerBase | LLTokenizer", grammar: str, noun: str, eos_token_ids: Sequence[int] | None
) -> GrammarMask:
    llguidance = _llguidance()
    if not isinstance(tokenizer, llguidance.LLTokenizer):
        tokenizer = grammar_tokenizer(tokenizer, eos_token_ids=eos_token_ids)
    elif eos_token_ids is not None:
        raise ValueError("eos_token_ids belong to grammar_tokenizer where its result is used.")
    problem = llguidance.LLMatcher.validate_grammar(grammar, tokenizer)
    if problem:
        raise ValueError(f"The {noun} cannot be used: {' '.join(problem.split())}.")
    return GrammarMask(llguidance.LLMatcher(tokenizer, grammar), tokenizer.vocab_size)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError("Grammars need llguidance: pip install 'compressed-spec[grammar]'.") from error
    return llguidance
