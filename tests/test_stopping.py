"""Where texts end: every reason, at every place of an accepted path; and what is left when a callback raises."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from compressed_spec import generate, load_model
from compressed_spec.cache import Cache
from compressed_spec.decode import Chunk, Decoder, StopCheck
from compressed_spec.generate import make_decoder, make_requests, stream
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.stopping import criteria_check
from compressed_spec.testing import OracleDrafter, greedy_text, random_model
from compressed_spec.text import TextChunk, TextDecoder, load_tokenizer

PROMPT = [5, 9, 2, 7, 7]
STEPS = 5  # a right draft of 5 is accepted whole: token 0 comes from the prefill, then rounds bring 1-6, 7-12, ...
COUNT = 14


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    return random_model((0, 4, 8), seed=9)


@pytest.fixture(scope="module")
def text(model: DeepseekV4) -> list[int]:
    """The greedy text; its first tokens are all different, so that each can stop it in one place only."""
    tokens = greedy_text(model, PROMPT, COUNT)
    assert len(set(tokens[:10])) == 10
    return tokens


class Run:
    """One request decoded with right drafts, and what could be seen from outside."""

    def __init__(
        self,
        model: DeepseekV4,
        monkeypatch: pytest.MonkeyPatch,
        text: Sequence[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        stop_check: StopCheck | None = None,
        allowed_token_ids: tuple[int, ...] | None = None,
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.drafter = OracleDrafter([[*PROMPT, *text]], model.vocab_size)
        requests = make_requests(
            model,
            [PROMPT],
            SamplingParams(allowed_token_ids=allowed_token_ids),
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            stop_checks=None if stop_check is None else [stop_check],
        )
        decoder = make_decoder(
            model, requests, tree=f"s{STEPS}_k1_d{STEPS + 1}", drafter=self.drafter, verifier="auto", batch_size=1
        )
        self.released: list[int] = []
        release = Cache.release

        def watched(cache: Cache, row: int) -> None:
            self.released.append(cache.lengths[row])
            release(cache, row)

        monkeypatch.setattr(Cache, "release", watched)
        self.chunks: list[Chunk] = list(stream(decoder))
        self.stats = decoder.stats[0].build(decoder.clock.times())
        assert not decoder.has_work

    def check(self, tokens: Sequence[int], reason: str) -> None:
        """The text is `tokens`, and nothing was said, kept, counted or drafted beyond it."""
        assert [token for chunk in self.chunks for token in chunk.token_ids] == list(tokens)
        assert [chunk.finish_reason for chunk in self.chunks] == [None] * (len(self.chunks) - 1) + [reason]
        assert self.released == [len(PROMPT) + len(tokens) - 1]
        rounds = -(-(len(tokens) - 1) // (STEPS + 1))
        assert len(self.chunks) == rounds + 1
        assert self.stats.num_rounds == rounds
        assert self.drafter.num_rounds <= rounds
        whole, rest = divmod(len(tokens) - 1, STEPS + 1)
        # Nothing is drafted that could not be emitted, so a last token that length allows is the target's own.
        deepest = self.max_new_tokens - 1 - whole * (STEPS + 1) - 1
        assert self.stats.num_accepted_tokens == whole * STEPS + min(rest, STEPS, max(deepest, 0))
        assert sum(chunk.num_accepted for chunk in self.chunks) == self.stats.num_accepted_tokens


def last_token_is(token: int) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    return lambda ids, scores: ids[:, -1] == token


@pytest.mark.parametrize("kind", ["stop_token", "criteria", "both"])
@pytest.mark.parametrize("at", range(9))
def test_T29_a_stop_at_every_index_of_an_accepted_path(
    model: DeepseekV4, text: list[int], monkeypatch: pytest.MonkeyPatch, kind: str, at: int
) -> None:
    """With room for one token less than that, for just as many, and for more."""
    for max_new_tokens in (at, at + 1, at + 2, COUNT):
        if max_new_tokens < 1:
            continue
        check = criteria_check(last_token_is(text[at]), PROMPT) if kind != "stop_token" else None
        if kind == "both":
            either = StoppingCriteriaList([last_token_is(text[at + 1]), last_token_is(text[at])])
            check = criteria_check(either, PROMPT)
        with monkeypatch.context() as patch:
            run = Run(
                model,
                patch,
                text,
                max_new_tokens=max_new_tokens,
                stop_token_ids=[] if kind == "criteria" else [text[at]],
                stop_check=check,
            )
        run.check(text[: min(at + 1, max_new_tokens)], "stop" if max_new_tokens > at else "length")


@pytest.mark.parametrize("count", range(1, COUNT))
def test_T30_length_alone(model: DeepseekV4, text: list[int], monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    Run(model, monkeypatch, text, max_new_tokens=count).check(text[:count], "length")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), experts="bf16", compress_ratios=(0, 4), hidden_size=64, hc_sinkhorn_iters=2
    )


@pytest.mark.parametrize("at", range(8))
def test_T29_a_stop_string_at_every_index(folder: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Through the text side, and through transformers' criteria: the text ends with the token that completes it."""
    model, tokenizer = load_model(folder, progress=False), load_tokenizer(folder)
    letters = tuple(i for i in range(model.vocab_size) if tokenizer.decode([i]).isalpha())
    plain = generate_plain(model, letters)
    word = tokenizer.decode(plain[at : at + 1])
    end = next(i for i in range(COUNT) if word in tokenizer.decode(plain[: i + 1]))
    for max_new_tokens in (end, end + 1, COUNT):
        texts = TextDecoder(tokenizer, 1, [word])
        criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [word])])
        for check in (texts.stop_check(0), criteria_check(criteria, PROMPT)):
            if max_new_tokens < 1:
                continue
            with monkeypatch.context() as patch:
                run = Run(
                    model,
                    patch,
                    plain,
                    max_new_tokens=max_new_tokens,
                    stop_check=check,
                    allowed_token_ids=letters,
                )
            run.check(plain[: min(end + 1, max_new_tokens)], "stop" if max_new_tokens > end else "length")


def generate_plain(model: DeepseekV4, allowed_token_ids: tuple[int, ...]) -> list[int]:
    requests = make_requests(
        model,
        [PROMPT],
        SamplingParams(allowed_token_ids=allowed_token_ids),
        max_new_tokens=COUNT,
        stop_token_ids=[],
    )
    decoder = make_decoder(model, requests, tree="off", drafter="auto", verifier="auto", batch_size=1)
    return [token for chunk in stream(decoder) for token in chunk.token_ids]


def test_T29_criteria_see_the_text_grow_token_by_token(model: DeepseekV4, text: list[int]) -> None:
    seen: list[list[int]] = []

    def criteria(ids: torch.Tensor, scores: object) -> bool:
        assert scores is None
        seen.append(ids[0].tolist())
        return len(seen) == 9

    (out,) = generate(
        model,
        [PROMPT],
        tree="s5_k1_d6",
        drafter=OracleDrafter([[*PROMPT, *text]], model.vocab_size),
        max_new_tokens=COUNT,
        stop_token_ids=[],
        stopping_criteria=criteria,
    )
    assert (out.token_ids, out.finish_reason) == (text[:9], "stop")
    assert seen == [[*PROMPT, *text[: i + 1]] for i in range(9)]


def test_T29_transformers_criteria_by_row(model: DeepseekV4, text: list[int]) -> None:
    """A list of them; each row with its own text, whatever its company."""
    prompts = [PROMPT, [3, 1, 4], [8] * 11]
    plain = [out.token_ids for out in generate(model, prompts, tree="off", max_new_tokens=20, stop_token_ids=[])]
    criteria = StoppingCriteriaList([MaxLengthCriteria(14), EosTokenCriteria([text[3], plain[1][6]])])
    outs = generate(
        model, prompts, max_new_tokens=20, stop_token_ids=[], stopping_criteria=criteria, batch_size=2, drafter="mtp"
    )
    for prompt, tokens, out in zip(prompts, plain, outs, strict=True):
        ends = [i + 1 for i, t in enumerate(tokens) if t in (text[3], plain[1][6])] + [14 - len(prompt)]
        assert out.token_ids == tokens[: min(ends)]
        assert out.finish_reason == "stop"


def test_T36_criteria_that_cannot_be_used(model: DeepseekV4) -> None:
    with pytest.raises(ValueError, match="must be callable; wrap a list"):
        generate(model, [PROMPT], stopping_criteria=[last_token_is(3)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one truth value for one text, got shape \(2,\)"):
        generate(model, [PROMPT], stopping_criteria=lambda ids, scores: torch.tensor([True, False]))


def decoder_of(model: DeepseekV4, **options: Any) -> Decoder:
    processor = options.pop("logits_processor", None)
    requests = make_requests(
        model, [PROMPT, [3, 1, 4]], SamplingParams(logits_processor=processor), max_new_tokens=COUNT, **options
    )
    return make_decoder(model, requests, tree="s3_k2_d6", drafter="mtp", verifier="auto", batch_size=2)


def texts_of(chunks: Sequence[Chunk]) -> list[list[int]]:
    return [[token for c in chunks if c.request == request for token in c.token_ids] for request in range(2)]


class Once:
    """Raises at its n-th call (from 0), and answers with nothing at all others."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, -1

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor | None) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("injected")
        return False if scores is None else scores


@pytest.mark.parametrize("at", [0, 1, 2, 4, 9])
@pytest.mark.parametrize("where", ["criteria", "processor"])
def test_T20_a_callback_that_raises_releases_the_rows(model: DeepseekV4, where: str, at: int) -> None:
    expected = texts_of(list(stream(decoder_of(model, stop_token_ids=[]))))
    once = Once(at)
    options: dict[str, Any] = {"logits_processor": once}
    if where == "criteria":
        options = {"stop_checks": [criteria_check(once, PROMPT), criteria_check(once, [3, 1, 4])]}
    decoder = decoder_of(model, stop_token_ids=[], **options)
    said: list[Chunk] = []
    with pytest.raises(RuntimeError, match="injected"):
        said += iter(stream(decoder))
    cache = decoder._cache
    assert cache.lengths == (0, 0)
    assert not decoder.has_work
    cache.check_integrity()
    again = Decoder(model, cache, drafter=None, shape=None, verifier=decoder._verifier)
    for request in make_requests(model, [PROMPT, [3, 1, 4]], SamplingParams(), max_new_tokens=COUNT, stop_token_ids=[]):
        again.submit(request)
    assert texts_of(list(stream(again))) == expected


@pytest.mark.parametrize("at", [0, 1, 4, 7])
def test_T20_a_neighbours_fault_tells_no_tokens_twice(folder: Path, at: int) -> None:
    """The second of two requests raises once: the first one's criteria and text are as if it had not."""
    model, tokenizer = load_model(folder, progress=False), load_tokenizer(folder)
    seen: list[tuple[int, ...]] = []
    once = Once(at)

    def watch(ids_1L: torch.Tensor, scores: Any) -> bool:
        seen.append(tuple(ids_1L[0].tolist()))
        return False

    texts = TextDecoder(tokenizer, 2, ["never to be found"])
    watcher, follow = criteria_check(watch, PROMPT), texts.stop_check(0)
    faulty = criteria_check(once, PROMPT)
    requests = make_requests(
        model,
        [PROMPT, PROMPT],
        SamplingParams(),
        max_new_tokens=12,
        stop_token_ids=[],
        stop_checks=[lambda so_far, new: watcher(so_far, new) or follow(so_far, new), faulty],
    )
    decoder = make_decoder(model, requests, tree="s3_k2_d6", drafter="auto", verifier="auto", batch_size=2)
    chunks: list[TextChunk] = []
    while decoder.has_work:
        with contextlib.suppress(RuntimeError):
            chunks += map(texts.follow, decoder.step())
    assert once.calls > at
    plain = generate(model, [PROMPT], tree="off", max_new_tokens=12, stop_token_ids=[])[0].token_ids
    longest = [ids for i, ids in enumerate(seen) if ids not in seen[:i]]
    assert longest == [(*PROMPT, *plain[: n + 1]) for n in range(12)]
    first = [chunk for chunk in chunks if chunk.request == 0]
    assert [token for chunk in first for token in chunk.token_ids] == plain
    assert "".join(chunk.text for chunk in first) == tokenizer.decode(plain, skip_special_tokens=True)


@pytest.mark.parametrize("at", [0, 5, 6, 8, 9])
def test_T20_a_round_whose_criteria_raised_may_be_tried_again(model: DeepseekV4, text: list[int], at: int) -> None:
    once = Once(at)
    requests = make_requests(
        model,
        [PROMPT],
        SamplingParams(),
        max_new_tokens=COUNT,
        stop_token_ids=[],
        stop_checks=[criteria_check(StoppingCriteriaList([once, last_token_is(text[9])]), PROMPT)],
    )
    oracle = OracleDrafter([[*PROMPT, *text]], model.vocab_size)
    decoder = make_decoder(model, requests, tree="s3_k2_d6", drafter=oracle, verifier="auto", batch_size=1)
    said: list[int] = []
    while decoder.has_work:
        try:
            said += [token for chunk in decoder.step() for token in chunk.token_ids]
        except RuntimeError:
            assert decoder._cache.lengths[0] in (0, len(PROMPT) + len(said) - 1)
    assert said == text[:10]


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_T29_a_consumer_that_leaves_early_releases_the_rows(model: DeepseekV4, after: int) -> None:
    decoder = decoder_of(model, stop_token_ids=[])
    chunks = stream(decoder)
    for _ in range(after):
        next(chunks)
    assert any(decoder._cache.lengths)
    chunks.close()  # type: ignore[attr-defined]  # a generator, which is what a `for` left early closes
    assert decoder._cache.lengths == (0, 0)
    assert not decoder.has_work
