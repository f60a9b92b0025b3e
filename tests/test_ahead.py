"""Functions compiled ahead of time: any length, weights of one's own, and found again on disk."""

from pathlib import Path

import pytest
import torch
from torch import nn

from compressed_spec import ahead
from compressed_spec.ahead import Inputs, Job, Program, cache_folder, packages_for, source_digest, weights_of
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.models.deepseek_v4.modules import Norm, Precision


class Scaled(nn.Module):
    """x, a pool and rows to write in it -> the rows' sum so far; `scale` is short enough for a compiler to write down
    as a number."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(8, 8, generator=random), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(8, generator=random), requires_grad=False)

    def forward(self, x_TD: torch.Tensor, pool_RD: torch.Tensor, rows_T: torch.Tensor) -> list[torch.Tensor]:
        pool_RD = pool_RD.index_copy_(0, rows_T, (x_TD @ self.weight) * self.scale)
        return [pool_RD[rows_T].cumsum(0)]


def inputs(count: int, rows: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(count)
    return [
        torch.randn(count, 8, generator=random),
        torch.zeros(rows, 8),
        torch.randperm(rows, generator=random)[:count],
    ]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def job(function: Scaled, description: object = None, source: str = "") -> Job:
    sample = Inputs(tensors=inputs(5, 12), open_axes=((0,), (0,), (0,)))
    return Job(function=function, inputs=sample, description=description, source=source)


def test_one_package_serves_all_lengths_and_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = packages_for([job(Scaled(0))])
    assert path.parent == cache_folder()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.is_relative_to(folder)
    monkeypatch.setattr(ahead, "compile_to", lambda *_: pytest.fail("it is on disk"))
    assert packages_for([job(Scaled(1))]) == [path]
    for seed in (0, 1):
        function = Scaled(seed)
        program = Program(path, weights_of(function))
        for count, rows in ((0, 3), (1, 1), (1, 7), (2, 2), (5, 12), (40, 90)):
            expected, actual = inputs(count, rows), inputs(count, rows)
            (out,) = program.run(actual)
            torch.testing.assert_close([out, *actual], [*function(*expected), *expected])


def test_inputs_that_are_one_tensor_in_the_sample_are_two_inputs() -> None:
    class Difference(nn.Module):
        def forward(self, x_T: torch.Tensor, y_T: torch.Tensor) -> list[torch.Tensor]:
            return [x_T - y_T]

    same, function = torch.arange(5.0), Difference()
    sample = Inputs(tensors=[same, same], open_axes=((0,), (0,)))
    (path,) = packages_for([Job(function=function, inputs=sample, description=None, source="")])
    (out,) = Program(path, {}).run([torch.tensor([5.0, 7.0]), torch.tensor([1.0, 9.0])])
    assert out.tolist() == [4.0, -2.0]


def test_another_description_source_or_input_is_another_package() -> None:
    function, sample = Scaled(0), Inputs(tensors=inputs(5, 12), open_axes=((0,), (0,), (0,)))
    fixed = Inputs(tensors=inputs(5, 12), open_axes=((0,), (), (0,)))
    found = [
        Job(function=function, inputs=sample, description=1, source="a").package,
        Job(function=function, inputs=sample, description=2, source="a").package,
        Job(function=function, inputs=sample, description=1, source="b").package,
        Job(function=function, inputs=fixed, description=1, source="a").package,
        Job(function=Scaled(0).to(torch.float64), inputs=sample, description=1, source="a").package,
    ]
    assert len(set(found)) == 5
    assert Job(function=Scaled(3), inputs=sample, description=1, source="a").package == found[0]


@pytest.mark.slow
def test_several_are_compiled_in_processes_of_their_own() -> None:
    dtypes = (torch.float32, torch.float64)
    numerics = numerics_named("fast")
    norms = [Norm(8, 1e-6, Precision(dtype=dtype, numerics=numerics)).requires_grad_(False) for dtype in dtypes]
    samples = [torch.randn(5, 8, dtype=dtype) for dtype in dtypes]
    jobs = [
        Job(function=norm, inputs=Inputs(tensors=[x], open_axes=((0,),)), description=0, source="")
        for norm, x in zip(norms, samples, strict=True)
    ]
    for path, norm, x in zip(packages_for(jobs), norms, samples, strict=True):
        torch.nn.init.normal_(norm.weight)
        (out,) = Program(path, weights_of(norm)).run([x[:2]])
        torch.testing.assert_close(out, norm(x[:2]))


def test_what_a_compiler_takes_as_constant_is_refused() -> None:
    class Peeks(Scaled):
        def forward(self, x_TD: torch.Tensor, pool_RD: torch.Tensor, rows_T: torch.Tensor) -> list[torch.Tensor]:
            return [x_TD * (2 if x_TD.shape[0] == 5 else 3)]

    with pytest.raises(AssertionError, match="taken as constant"):
        packages_for([job(Peeks(0))])


def test_a_digest_tells_sources_apart(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = source_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert source_digest(tmp_path) != before
