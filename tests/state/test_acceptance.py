"""A drafter that is right is accepted to the last token, one that is wrong does not pass in silence, caps hold."""

import warnings

import pytest

from compressed_spec import generate
from compressed_spec.testing import OracleDrafter, Reference, WrongDrafter, greedy_text, random_model

COUNT = 41


@pytest.fixture(scope="module")
def future(mixed: Reference, text: list[int]) -> list[int]:
    return greedy_text(mixed.model, text[:6], COUNT)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7, 8, 9, 13])
def test_T24_an_oracle_chain_is_accepted_whole(mixed: Reference, text: list[int], future: list[int], k: int) -> None:
    drafter = OracleDrafter([text[:6] + future], 48)
    out = generate(
        mixed.model,
        [text[:6]],
        tree=f"s{k}_k1_d{k + 1}",
        drafter=drafter,
        max_new_tokens=COUNT,
        stop_token_ids=[],
    )[0]
    assert out.token_ids == future
    assert out.stats.acceptance_length == k + 1
    whole, rest = divmod(COUNT - 1, k + 1)  # the prefill gives the first token
    assert out.stats.num_rounds == whole + bool(rest)
    # The last round has a bonus token like every other, so one draft fewer than tokens.
    assert out.stats.num_accepted_tokens == whole * k + max(rest - 1, 0)
    assert out.stats.num_accepted_tokens_per_pos == tuple(whole + (depth < rest - 1) for depth in range(k))


@pytest.mark.parametrize("shape", ["s3_k2_d7", "s4_k3_d13"])
def test_T24_an_oracle_tree_is_accepted_to_its_depth(
    mixed: Reference, text: list[int], future: list[int], shape: str
) -> None:
    drafter = OracleDrafter([text[:6] + future], 48)
    out = generate(mixed.model, [text[:6]], tree=shape, drafter=drafter, max_new_tokens=COUNT, stop_token_ids=[])[0]
    assert out.token_ids == future
    assert out.stats.acceptance_length == int(shape[1]) + 1


def test_T24_another_models_text_is_hardly_accepted(mixed: Reference, text: list[int], future: list[int]) -> None:
    """The same oracle before a model of other weights."""
    drafter = OracleDrafter([text[:6] + future], 48)
    other = random_model((0, 4, 8), seed=1)
    out = generate(other, [text[:6]], tree="s4_k1_d5", drafter=drafter, max_new_tokens=COUNT, stop_token_ids=[])[0]
    assert out.token_ids == greedy_text(other, text[:6], COUNT)
    assert out.stats.acceptance_length < 1.2


@pytest.mark.parametrize(("count", "warns"), [(16, False), (41, True)])
def test_T24_no_acceptance_at_all_is_said_aloud(
    mixed: Reference, text: list[int], future: list[int], count: int, warns: bool
) -> None:
    """After 64 tokens drafted in vain; before, it may be chance."""
    drafter = WrongDrafter([text[:6] + future], 48)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = generate(
            mixed.model, [text[:6]], tree="s3_k1_d4", drafter=drafter, max_new_tokens=count, stop_token_ids=[]
        )[0]
    assert out.stats.acceptance_length == 1
    assert out.stats.num_accepted_tokens_per_pos == ()
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == warns
    assert all("drafted by WrongDrafter was accepted" in message for message in messages)


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("shape", ["off", "s5_k1_d6", "s5_k2_d11"])
def test_T30_max_new_tokens(mixed: Reference, text: list[int], future: list[int], shape: str, count: int) -> None:
    """1 .. k + 2 tokens with k right drafts a round."""
    drafter = OracleDrafter([text[:6] + future], 48)
    out = generate(mixed.model, [text[:6]], tree=shape, drafter=drafter, max_new_tokens=count, stop_token_ids=[])[0]
    assert out.token_ids == future[:count]
    assert out.finish_reason == "length"
    assert out.stats.num_draft_tokens <= count * 10
    assert out.stats.num_rounds == (0 if count == 1 else count - 1 if shape == "off" else -(-(count - 1) // 6))


@pytest.mark.parametrize("shape", ["off", "s5_k1_d6", "s4_k2_d8"])
def test_T30_up_to_the_models_last_position(text: list[int], shape: str) -> None:
    """24 positions hold a prompt and all new tokens but the last, which is never processed."""
    model = random_model((0, 4), max_position_embeddings=24)
    for length in (1, 15, 22, 24):
        count = 25 - length
        expected = greedy_text(random_model((0, 4)), text[:length], count)
        out = generate(model, [text[:length]], tree=shape, max_new_tokens=count, stop_token_ids=[])[0]
        assert out.token_ids == expected
        with pytest.raises(ValueError, match="24 positions"):
            generate(model, [text[:length]], tree=shape, max_new_tokens=count + 1, stop_token_ids=[])
