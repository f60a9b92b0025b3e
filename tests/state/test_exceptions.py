"""An exception anywhere leaves a cache that goes on exactly, or one that says that it cannot."""

import pytest
import torch

from compressed_spec import TokenTree
from compressed_spec.cache import Cache, Scratch
from compressed_spec.decode import Decoder, Request
from compressed_spec.drafting import MTPDrafter
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.testing import (
    Reference,
    assert_near,
    assert_same_state,
    greedy_text,
    live_state,
    prefilled,
    raw_bytes,
)
from compressed_spec.tree import parse_tree
from compressed_spec.verifying import make_verifier

TREE = TokenTree(tokens=[5, 6, 7, 8, 9, 10, 11, 12], parents=[-1, 0, 1, 2, 3, 4, 5, 6])


class Fault(Exception):
    """Injected."""


@pytest.fixture(scope="module")
def expected(mixed: Reference) -> list[list[int]]:
    """What the requests of `make_decoder` become."""
    return [greedy_text(mixed.model, range(n), 12) for n in (5, 9, 3)]


class Faulty:
    """Stands for a function that raises at its n-th call (from 0) and works at all others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at: int) -> None:
        original = getattr(owner, name)
        self.calls = 0

        def called(*args: object, **kwargs: object) -> object:
            self.calls += 1
            if self.calls == at + 1:
                raise Fault
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize("at", [0, 1, 4, 7])
def test_T20_a_fault_in_the_middle_of_a_verify(
    mixed: Reference, text: list[int], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Scratch rows are half written; the next verify does not care, and what was verified before is void."""
    model = mixed.model
    cache = prefilled(model, [text[:13], text[:6]])
    earlier = model.verify(cache, [TREE, TREE])
    before = [raw_bytes(cache, row) for row in range(2)]
    Faulty(monkeypatch, Scratch, "write", at)
    with pytest.raises(Fault):
        model.verify(cache, [TREE, TREE])
    assert [raw_bytes(cache, row) for row in range(2)] == before
    with pytest.raises(ValueError, match="verify again"):
        cache.commit(earlier, [[0], [0]])
    verify = model.verify(cache, [TREE, TREE])
    assert_near(verify.logits, earlier.logits, "the retry")
    cache.commit(verify, [range(8), range(3)])
    for row, tokens in enumerate(([*text[:13], *TREE.tokens], [*text[:6], 5, 6, 7])):
        assert_same_state(live_state(cache, row), live_state(mixed.after(tokens).cache), f"row {row}")


@pytest.mark.parametrize("at", range(4))
def test_T20_a_fault_in_the_middle_of_a_commit(
    mixed: Reference, text: list[int], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Some pools have the new rows and some have not: that row is refused, the others go on."""
    model = mixed.model
    cache = prefilled(model, [text[:13], text[:6], text[:9]])
    bystander = raw_bytes(cache, 1)
    whole = cache.snapshot([0])
    verify = model.verify(cache, [TREE, TREE, TREE])
    Faulty(monkeypatch, Cache, "_move", at)
    with pytest.raises(Fault):
        cache.commit(verify, [range(8), [], [0]])
    assert cache.lengths == (13, 6, 9)
    assert raw_bytes(cache, 1) == bystander
    for use in (
        lambda: model.verify(cache, [TREE], rows=[0]),
        lambda: model.prefill(cache, [[3]], rows=[2]),
        lambda: cache.snapshot(),
        lambda: cache.fork(2, 1),
        lambda: cache.commit(verify, [[0], [], []]),
    ):
        with pytest.raises(ValueError, match=r"release it, or restore a snapshot into it|verify again"):
            use()
    cache.restore(whole, rows=[0])
    cache.release(2)
    model.prefill(cache, [text[:9]], rows=[2])
    retry = model.verify(cache, [TREE, TREE, TREE])
    assert_near(retry.logits, verify.logits, "the retry")
    cache.commit(retry, [range(8), [], [0]])
    assert_same_state(live_state(cache), live_state(mixed.after([*text[:13], *TREE.tokens]).cache), "row 0")


@pytest.mark.parametrize("at", range(1, 3))
def test_T20_a_fault_in_a_later_chunk_of_a_prefill(
    mixed: Reference, text: list[int], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Rows that hold a part of their prompt are refused; those that hold none of it are as they were."""
    model = mixed.model
    cache = model.new_cache(batch_size=3, max_length=40, max_nodes=8, prefill_chunk=5)
    model.prefill(cache, [text[:4]], rows=[2])
    Faulty(monkeypatch, Cache, "commit", at)
    with pytest.raises(Fault):
        model.prefill(cache, [text[:12], text[4:7], text[:6]], rows=[0, 2, 1])
    assert cache.lengths == (5 * at, 0, 4)
    with pytest.raises(ValueError, match="Row 0 was left half written"):
        model.prefill(cache, [text[:12]], rows=[0])
    cache.release(0)
    logits = model.prefill(cache, [text[:12], text[4:7], text[:6]], rows=[0, 2, 1])
    for i, n in enumerate((12, 7, 6)):
        assert_near(logits[i], mixed.after(text[:n]).logits_V, f"{n} tokens")


def make_decoder(reference: Reference, processor: "RaisingProcessor | None") -> Decoder:
    model = reference.model
    decoder = Decoder(
        model,
        model.new_cache(batch_size=2, max_length=40, max_nodes=12),
        drafter=MTPDrafter(model),
        shape=parse_tree("s3_k2_d6"),
        verifier=make_verifier("coupled"),
    )
    for n in (5, 9, 3):
        decoder.submit(
            Request(
                prompt_ids=tuple(range(n)),
                params=SamplingParams(logits_processor=processor),
                max_new_tokens=12,
                stop_token_ids=frozenset(),
            )
        )
    return decoder


class RaisingProcessor:
    """Changes nothing, but raises at its n-th call."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise Fault
        return scores


@pytest.mark.parametrize("at", [1, 2, 3, 7, 20, 50])
def test_T20_a_logits_processor_raises_and_the_step_is_repeated(
    mixed: Reference, expected: list[list[int]], at: int
) -> None:
    """In the first tokens (1, 2) and in the middle of rounds: no token is lost, doubled or changed."""
    decoder = make_decoder(mixed, RaisingProcessor(at))
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    num_faults = 0
    while decoder.has_work:
        try:
            chunks = decoder.step()
        except Fault:
            num_faults += 1
            continue
        for chunk in chunks:
            texts[chunk.request] += chunk.token_ids
    assert num_faults == 1
    assert list(texts.values()) == expected


@pytest.mark.filterwarnings("ignore:The drafter failed")  # where the fault falls into a draft
@pytest.mark.parametrize("where", [(Scratch, "write", n) for n in (2, 14, 30, 31, 32, 33)] + [(Cache, "commit", 0)])
def test_T20_a_fault_in_a_round_and_the_step_is_repeated(
    mixed: Reference, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, where: tuple[type, str, int]
) -> None:
    decoder = make_decoder(mixed, None)
    fault = Faulty(monkeypatch, *where)
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while decoder.has_work:
        try:
            chunks = decoder.step()
        except Fault:
            continue
        for chunk in chunks:
            texts[chunk.request] += chunk.token_ids
    assert fault.calls > where[2]
    assert list(texts.values()) == expected


def test_T20_closing_after_a_fault_frees_every_row(mixed: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder(mixed, None)
    decoder.step()
    Faulty(monkeypatch, Cache, "_move", 1)
    with pytest.raises(Fault):
        decoder.step()
    with pytest.raises(ValueError, match="half written"):
        decoder.step()
    decoder.close()
    assert decoder._cache.lengths == (0, 0)
    assert not decoder.has_work
