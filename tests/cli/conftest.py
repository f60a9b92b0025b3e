"""Runs of the command line in this process, on a small checkpoint."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compressed_spec.cli import main
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint

SMALL: dict[str, Any] = {
    "compress_ratios": (0, 4),
    "hidden_size": 64,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 2,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a run of the command line left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`main` in this process."""

    def call(*argv: object) -> Ran:
        code: object = 0
        try:
            main([str(argument) for argument in argv])
        except SystemExit as stop:
            code = stop.code
        assert isinstance(code, int)
        out, err = capsys.readouterr()
        return Ran(code=code, out=out, err=err)

    return call


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), **SMALL)


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to damage."""
    return shutil.copytree(tiny, tmp_path / "copy")
