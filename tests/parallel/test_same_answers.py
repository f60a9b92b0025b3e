"""Several processes answer like one: logits to rounding, texts token for token, whatever is drafted and how."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compressed_spec import load_model
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.testing.parallel import finish, logits_of, plain_texts, start, text_of, ways

WORKER = Path(__file__).parent / "worker.py"
# Of 2 and of 4 parts most begin inside a 128-row scale block: wq_b has 192 rows, wo_a and wo_b's columns 384.
ODD: dict[str, Any] = {
    "head_dim": 48,
    "o_lora_rank": 96,
    "o_groups": 4,
    "hidden_size": 96,
    "vocab_size": 320,
    "compress_ratios": (0, 4, 8),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parallel")
    return {head: make_tiny_checkpoint(root / head, draft_head=head, **ODD) for head in ("mtp", "dspark")}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, DeepseekV4]:
    return {head: load_model(folder, progress=False) for head, folder in folders.items()}


def answers(folders: dict[str, Path], count: int, *options: str, every: bool = False) -> dict[str, Any]:
    argv = [sys.executable, str(WORKER), *map(str, folders.values()), *options, *(["--every"] if every else [])]
    ended = finish(
        start(argv, count, environment={"OMP_NUM_THREADS": "1"}), seconds=280 if not every and count == 2 else 800
    )
    assert [one.code for one in ended] == [0] * count, [one.err[-2000:] for one in ended]
    assert all(not one.out for one in ended[1:])
    found: dict[str, Any] = json.loads(ended[0].out)
    return found


def check(folders: dict[str, Path], models: dict[str, DeepseekV4], found: dict[str, Any], *, every: bool) -> None:
    for head, folder in folders.items():
        model, mine = models[head], found[str(folder)]
        torch.testing.assert_close(torch.tensor(mine["logits"]), logits_of(model), rtol=0, atol=1e-4)
        plain = plain_texts(model)
        assert len({json.dumps(text) for text in plain.values()}) == len(plain)
        for name, (same_as, options) in ways(model, every=every).items():
            text = mine["texts"][name]
            if isinstance(text, str):  # a combination that is refused is refused by one process, with the same words
                with pytest.raises(ValueError) as refusal:
                    text_of(model, options)
                assert str(refusal.value) == text
            else:
                assert text == (plain[same_as] if same_as else text_of(model, options)), (head, name)


def test_two_processes(folders: dict[str, Path], models: dict[str, DeepseekV4]) -> None:
    found = answers(folders, 2)
    check(folders, models, found, every=False)
    own, other = found["asked"]
    assert own == 'KeyError: "a processor\'s own"'
    assert other.startswith("PeerError: rank 0 on ")
    assert other.endswith('failed: KeyError: "a processor\'s own"')
    assert found["different"]["nodes"].startswith("The processes disagree about the next nodes: 1 of 2 differ")
    assert found["different"]["state"].startswith("The processes disagree about the state of the last nodes: ")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "every"), [(2, True), (4, False)], ids=["two-all-ways", "four"])
def test_more(folders: dict[str, Path], models: dict[str, DeepseekV4], count: int, every: bool) -> None:
    check(folders, models, answers(folders, count, every=every), every=every)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_on_the_kernels_path(folders: dict[str, Path], models: dict[str, DeepseekV4]) -> None:
    """The layers as a GPU runs them, with plain torch for the kernels."""
    check(folders, models, answers(folders, 2, "--kernel-path"), every=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_groups_of_two(folders: dict[str, Path], models: dict[str, DeepseekV4]) -> None:
    """Each group is a model of its own; both answer alike."""
    found = answers(folders, 4, "--group-size", "2")
    check(folders, models, found, every=False)
    assert [(replica, rank) for replica, rank, _ in found["replicas"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({texts for _, _, texts in found["replicas"]}) == 1
