"""Requests come and go for a long time in one cache, right and random drafts side by side."""

import random
from collections.abc import Sequence

import pytest

from compressed_spec import TokenTree
from compressed_spec.decode import Decoder, Request
from compressed_spec.drafting import DraftRequest
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.testing import OracleDrafter, Reference, greedy_text, random_tree
from compressed_spec.tree import TreeShape
from compressed_spec.verifying import make_verifier

NUM_TEXTS, COUNT, STEPS = 8, 40, 4


class HalfOracle(OracleDrafter):
    """Right for requests whose prompt has an even length, random for the others."""

    def __init__(self, texts: Sequence[Sequence[int]], rng: random.Random) -> None:
        super().__init__(texts, 48)
        self.rng, self.oracle_rows = rng, set[int]()

    def start(self, row: int, token_ids: Sequence[int]) -> None:
        super().start(row, token_ids)
        self.oracle_rows.discard(row)
        if len(token_ids) % 2:  # the prompt and one token more
            self.oracle_rows.add(row)

    def propose(self, request: DraftRequest) -> list[TokenTree]:
        right = super().propose(request)
        return [
            tree
            if row in self.oracle_rows
            else random_tree(self.rng, root, num_nodes=self.rng.randint(1, 9), vocab_size=48)
            for row, root, tree in zip(request.rows, request.roots, right, strict=True)
        ]


def soak(reference: Reference, text: list[int], num_rounds: int) -> None:
    rng = random.Random(39)
    prompts = [text[i : i + 3 + i] for i in range(NUM_TEXTS)]
    futures = [greedy_text(reference.model, prompt, COUNT) for prompt in prompts]
    drafter = HalfOracle([p + f for p, f in zip(prompts, futures, strict=True)], rng)
    cache = reference.model.new_cache(batch_size=3, max_length=60, max_nodes=27)
    shape = TreeShape(num_steps=STEPS, top_k=2, num_nodes=9)
    decoder = Decoder(reference.model, cache, drafter=drafter, shape=shape, verifier=make_verifier("coupled"))
    asked: list[tuple[int, int]] = []
    texts: list[list[int]] = []
    finished = 0

    def step() -> None:
        nonlocal finished
        for chunk in decoder.step():
            texts[chunk.request] += chunk.token_ids
            finished += chunk.finish_reason is not None

    for _ in range(num_rounds):
        while len(asked) - finished < rng.choice((1, 2, 3, 5)):
            which, count = rng.randrange(NUM_TEXTS), rng.randint(1, COUNT)
            number = decoder.submit(
                Request(
                    prompt_ids=tuple(prompts[which]),
                    params=SamplingParams(),
                    max_new_tokens=count,
                    stop_token_ids=frozenset(),
                )
            )
            assert number == len(asked)
            asked.append((which, count))
            texts.append([])
        step()
    cache.check_integrity()
    while decoder.has_work:
        step()
    assert cache.lengths == (0, 0, 0)
    assert finished == len(asked) > num_rounds // 30
    for number, (which, count) in enumerate(asked):
        assert texts[number] == futures[which][:count], f"request {number}"
        stats = decoder.stats[number]
        if len(prompts[which]) % 2 == 0 and stats.whole_rounds:
            assert stats.whole_tokens == (STEPS + 1) * stats.whole_rounds, f"request {number}"
    assert sum(stats.whole_rounds for stats in decoder.stats.values()) > num_rounds // 2


@pytest.mark.filterwarnings("ignore:None of .* tokens drafted")
def test_T39_soak_of_200_rounds(mixed: Reference, text: list[int]) -> None:
    soak(mixed, text, 200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:None of .* tokens drafted")
def test_T39_soak_of_10000_rounds(mixed: Reference, text: list[int]) -> None:
    soak(mixed, text, 10_000)
