"""Generation in the invariant numerics: any tree, drafter and batch give the tokens and logits of plain decoding."""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from compressed_spec import generate
from compressed_spec.drafting.base import Drafter
from compressed_spec.generate import GenerationResult
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.testing import AlternatingDrafter, RandomDrafter, random_model, random_text

DTYPES = [torch.float32, torch.bfloat16]
NUM_PROMPTS, NUM_NEW = 8, 24
TEMPERATURES = (0.0, 1.0)

pytestmark = pytest.mark.filterwarnings("ignore:None of .* drafted by RandomDrafter")


def tree_name(num_nodes: int, top_k: int) -> str:
    """A tree of this many nodes with as few draft steps as it takes."""
    num_steps = (
        num_nodes - 1 if top_k == 1 else next(n for n in range(1, 17) if 1 + top_k + (n - 1) * top_k**2 >= num_nodes)
    )
    return f"s{num_steps}_k{top_k}_d{num_nodes}"


class Plain:
    """What plain decoding, a request at a time, makes of eight prompts of 1 to 29 tokens, greedily and sampled."""

    def __init__(self, model: DeepseekV4) -> None:
        self.model, self.dtype = model, model.precision.dtype
        self.prompts = [random_text(1 + 4 * i, seed=i) for i in range(NUM_PROMPTS)]
        self.results = {
            temperature: [self._generate([i], temperature, "off", "auto", 1)[0] for i in range(NUM_PROMPTS)]
            for temperature in TEMPERATURES
        }

    def check(self, prompts: list[int], temperature: float, tree: str, drafter: str) -> int:
        """Decode some of the prompts together in other ways; returns how many tokens that made."""
        expected = [self.results[temperature][i] for i in prompts]
        texts = [self.prompts[i] + result.token_ids for i, result in zip(prompts, expected, strict=True)]
        objects: dict[str, Drafter] = {
            "random": RandomDrafter(self.model.vocab_size),
            "alternating": AlternatingDrafter(texts, self.model.vocab_size),
        }
        actual = self._generate(prompts, temperature, tree, objects.get(drafter, drafter), len(prompts))
        what = f"{tree}, {drafter}, prompts {prompts}, temperature {temperature}"
        for one, plain in zip(actual, expected, strict=True):
            assert one.token_ids == plain.token_ids, what
            # Of float64 log probabilities over the whole vocabulary: as good as its bits.
            assert one.logprobs == plain.logprobs, what
        return sum(len(one.token_ids) for one in actual)

    def _generate(
        self, prompts: list[int], temperature: float, tree: str, drafter: str | Drafter, batch_size: int
    ) -> list[GenerationResult]:
        return generate(
            self.model,
            [self.prompts[i] for i in prompts],
            tree=tree,
            drafter=drafter,
            max_new_tokens=NUM_NEW,
            temperature=temperature,
            seed=[100 + i for i in prompts],
            stop_token_ids=[],
            logprobs="raw",
            batch_size=batch_size,
        )


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def plain(request: pytest.FixtureRequest) -> Iterator[Plain]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Plain(random_model((0, 4, 8, 4), dtype=request.param, numerics="invariant"))
    torch.set_num_threads(before)


def test_T12_two_thousand_tokens(plain: Plain) -> None:
    """A random draw of trees with 2 to 16 nodes, drafters and batches of 1, 3 and 8; a thousand of each dtype."""
    rng, num_tokens = random.Random(str(plain.dtype)), 0
    while num_tokens < 1000:
        prompts = rng.sample(range(NUM_PROMPTS), rng.choice((1, 3, 8)))
        tree = tree_name(rng.randint(2, 16), rng.choice((1, 2, 3)))
        drafter = rng.choice(("mtp", "random", "alternating"))
        num_tokens += plain.check(prompts, rng.choice(TEMPERATURES), tree, drafter)


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", range(2, 17))
def test_T12_every_tree_and_batch(plain: Plain, num_nodes: int) -> None:
    for top_k, drafter, batch_size in itertools.product((1, 2, 3), ("mtp", "random", "alternating"), (1, 3, 8)):
        for temperature in TEMPERATURES:
            plain.check(list(range(batch_size)), temperature, tree_name(num_nodes, top_k), drafter)
