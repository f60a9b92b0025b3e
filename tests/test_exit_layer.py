"""Where to exit early: the measure against references token by token, and the choice against its own formula."""

import pytest

from compressed_spec import generate
from compressed_spec.measure.exit_layer import ExitLayer, best_exit, exit_layers
from compressed_spec.testing import MarkovModel, Reference, cycle, random_model, random_text

TEXT, OTHER = random_text(30), random_text(30, seed=8)


@pytest.fixture(scope="module")
def deep() -> Reference:
    return Reference(random_model((0, 4, 8, 4, 8, 0)))


def test_exit_layers_agree_as_they_do_token_by_token(deep: Reference) -> None:
    """Each layer's acceptance, against references of models that end there."""
    prompts = [TEXT[:9], OTHER[:4]]
    layers = exit_layers(deep.model, prompts, max_new_tokens=12)
    assert [one.layer for one in layers] == [1, 2, 3, 4, 5]
    outs = generate(deep.model, prompts, tree="off", max_new_tokens=12, stop_token_ids=[])
    short = random_model((0, 4, 8))
    own = dict(deep.model.state_dict())
    short.load_state_dict({name: own[name] for name in short.state_dict()})
    early = Reference(short)
    matches = [
        int(early.after([*prompt, *out.token_ids[:n]]).logits_V.argmax()) == out.token_ids[n]
        for prompt, out in zip(prompts, outs, strict=True)
        for n in range(12)
    ]
    assert layers[2].acceptance == sum(matches) / 24


def test_exit_layers_at_a_temperature(deep: Reference) -> None:
    for one in exit_layers(deep.model, [TEXT[:9]], max_new_tokens=8, temperature=1.0):
        assert 0 < one.acceptance < 1


def test_T36_nothing_to_measure(deep: Reference) -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        exit_layers(deep.model, [])
    with pytest.raises(ValueError, match="two layers or more, not 1"):
        exit_layers(MarkovModel(cycle(4), cycle(4)), [[0]])


def test_the_best_exit_weighs_acceptance_against_layers() -> None:
    layers = [ExitLayer(layer=i, num_layers=10, acceptance=a) for i, a in ((1, 0.2), (2, 0.8), (8, 0.95))]
    assert best_exit(layers).layer == 2
    sure = ExitLayer(layer=1, num_layers=10, acceptance=1.0)
    assert sure.num_steps == 8
    assert sure.speedup(8) == pytest.approx(9 / 1.8)
    hopeless = ExitLayer(layer=5, num_layers=10, acceptance=0.1)
    assert hopeless.num_steps == 1
    assert hopeless.speedup(1) == pytest.approx(1.1 / 1.5)
