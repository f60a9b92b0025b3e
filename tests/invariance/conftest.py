"""Every test runs on one thread, and the slow ones on two: how a library shares out work must not show either."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
