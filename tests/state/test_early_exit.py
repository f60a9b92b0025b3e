"""The early-exit drafter in whole runs, and what it is asked for and refuses."""

import pytest

from compressed_spec import generate
from compressed_spec.drafting import DraftRequest, EarlyExitDrafter, make_drafter
from compressed_spec.testing import MarkovModel, Reference, cycle, random_model, random_text

OTHER = random_text(30, seed=8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["early-exit:1", "early-exit:4"])
def test_T12_batches_of_ragged_prompts(deep: Reference, text: list[int], drafter: str, temperature: float) -> None:
    """Five requests in three rows, with and without a topology of its own."""
    prompts = [text[:1], text[:9], text[:5] * 4, OTHER[:14], OTHER[:3]]

    def texts(tree: str) -> list[list[int]]:
        outs = generate(
            deep.model,
            prompts,
            tree=tree,
            drafter=drafter,
            temperature=temperature,
            seed=5,
            max_new_tokens=14,
            stop_token_ids=[],
            batch_size=3,
        )
        assert all(out.stats.num_draft_errors == 0 for out in outs)
        return [out.token_ids for out in outs]

    plain = texts("off")
    assert texts("s4_k2_d7") == plain
    assert texts("dynamic") == plain


@pytest.mark.parametrize(
    ("verifier", "tree"), [("leviathan", "s3_k1_d4"), ("block", "s3_k1_d4"), ("traversal", "s3_k2_d6")]
)
def test_sampled_drafts_are_reused_too(deep: Reference, text: list[int], verifier: str, tree: str) -> None:
    """The text is a function of seed and tree, with the reuse and without it."""

    def run(drafter: object) -> list[list[int]]:
        outs = generate(
            deep.model,
            [text[:9], OTHER[:4]],
            tree=tree,
            drafter=drafter,  # type: ignore[arg-type]
            verifier=verifier,
            temperature=1.0,
            seed=2,
            max_new_tokens=14,
            stop_token_ids=[],
        )
        assert all(out.stats.num_draft_errors == 0 for out in outs)
        return [out.token_ids for out in outs]

    class Forgetful(EarlyExitDrafter):
        def propose_sampled(self, request: DraftRequest, coins: object) -> list[object]:  # type: ignore[override]
            trees = super().propose_sampled(request, coins)  # type: ignore[arg-type]
            request.cache.next_ticket()
            return list(trees)

    assert run(EarlyExitDrafter(deep.model, 3)) == run(Forgetful(deep.model, 3))


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("early-exit:0", "choose 1 .. 5"),
        ("early-exit:6", "choose 1 .. 5"),
        ("early-exit:", "names no layer"),
        ("early-exit:two", "names no layer"),
        ("early-exit:-1", "names no layer"),
    ],
)
def test_T36_layers_that_are_not_there(deep: Reference, drafter: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter(drafter, deep.model)


def test_T36_models_of_one_layer() -> None:
    with pytest.raises(ValueError, match="use drafter='ngram'"):
        make_drafter("early-exit", MarkovModel(cycle(4), cycle(4)))


def test_a_third_of_the_way_up() -> None:
    for count, expected in ((2, 1), (3, 1), (6, 2), (9, 3)):
        drafter = make_drafter("early-exit", random_model((0,) * count))
        assert isinstance(drafter, EarlyExitDrafter)
        assert drafter.exit_layer == expected


def test_generate_makes_room_for_what_is_drafted(deep: Reference, text: list[int]) -> None:
    """Forty rows of 9 draft nodes each, of whose trees 3 are kept: more than the 256 of a prefill."""
    outs = generate(
        deep.model,
        [text[:3]] * 40,
        tree="s5_k2_d3",
        drafter="early-exit",
        max_new_tokens=7,
        batch_size=40,
        stop_token_ids=[],
    )
    assert all(out.stats.num_draft_errors == 0 for out in outs)
    assert all(out.stats.num_draft_tokens > 0 for out in outs)
