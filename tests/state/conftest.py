"""Tiny models and their one-token-at-a-time references, shared by all tests of the state machine."""

from collections.abc import Iterator

import pytest
import torch

from compressed_spec.testing import Reference, random_model, random_text

# By name, one compression ratio a layer. Window 8 and top-k 3 everywhere, so selection is active from 16 tokens on.
STACKS = {"window": (0, 0), "csa": (4,), "hca": (8,), "mixed": (0, 4, 8), "two_hca": (3, 4, 5)}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of a few rows run no faster on several threads, and much slower where those are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=list(STACKS))
def reference(request: pytest.FixtureRequest) -> Reference:
    """Each kind of stack in turn."""
    return Reference(random_model(STACKS[request.param]))


@pytest.fixture(scope="session")
def mixed() -> Reference:
    """Sliding (hash-routed), CSA and HCA layers, and an MTP head."""
    return Reference(random_model(STACKS["mixed"]))


@pytest.fixture(scope="session")
def deep() -> Reference:
    """Two layers of each kind."""
    return Reference(random_model((0, 4, 8, 4, 8, 0)))


@pytest.fixture(scope="session")
def text() -> list[int]:
    """What the sequences of most tests are prefixes of, so that they share their references."""
    return random_text(100)
