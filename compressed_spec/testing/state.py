"""What a cache must hold, said a second time: which rows are live, and nothing else may matter.

L = layers, R = rows, D = row width
"""

from collections.abc import Mapping

import torch

from compressed_spec.cache import Cache
from compressed_spec.layout import Addressing, PoolSpec, pool_specs


def live_rows(pool: PoolSpec, row: int, length: int) -> list[int]:
    """Persistent rows of a pool that a sequence of `length` tokens in batch row `row` owns, oldest first."""
    if pool.addressing is Addressing.RING:
        end = max(length + pool.shift, 0)
        slots = [position % pool.per_sequence for position in range(max(end - pool.per_sequence, 0), end)]
    elif pool.addressing is Addressing.ENTRIES:
        assert pool.compression is not None
        slots = list(range(length // pool.compression.ratio))
    else:
        slots = [0] if length else []
    return [row * pool.per_sequence + slot for slot in slots]


def live_state(cache: Cache, row: int = 0) -> dict[str, torch.Tensor]:
    """Every live row of a sequence by pool, `[L, n, D]`, oldest first: a function of its tokens alone."""
    return {
        pool.name: cache.pools[pool.name][:, live_rows(pool, row, cache.lengths[row])].clone()
        for pool in pool_specs(cache.spec, cache.shape.max_length)
    }


def poison(cache: Cache) -> None:
    """Overwrite with NaN every row that no committed prefix owns: scratch, free rows, stale slots of rings."""
    for pool in pool_specs(cache.spec, cache.shape.max_length):
        rows_LRD = cache.pools[pool.name]
        live = [i for row, length in enumerate(cache.lengths) for i in live_rows(pool, row, length)]
        dead_R = torch.ones(rows_LRD.shape[1], dtype=torch.bool, device=rows_LRD.device)
        dead_R[live] = False
        rows_LRD[:, dead_R] = 255 if pool.packed else float("nan")


def raw_bytes(cache: Cache, row: int) -> dict[str, bytes]:
    """All persistent bytes of a batch row by pool, live or not: to show that nobody touched them."""
    return {
        pool.name: cache.pools[pool.name][:, row * pool.per_sequence : (row + 1) * pool.per_sequence]
        .contiguous()
        .flatten()
        .view(torch.uint8)
        .cpu()
        .numpy()
        .tobytes()
        for pool in pool_specs(cache.spec, cache.shape.max_length)
    }


def assert_near(actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float | None = None) -> None:
    """Fail unless two finite tensors of one shape differ by at most `tolerance` of the larger of 1 and their scale.

    Default tolerance: 1e-10 for float64, 1e-4 for float32.
    """
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    if not expected.numel():
        return
    if tolerance is None:
        tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-4
    assert bool(torch.isfinite(actual).all()), f"{what} is not finite"
    scale = max(1.0, float(expected.abs().max()))
    error = float((actual - expected).abs().max())
    assert error <= tolerance * scale, f"{what} is off by {error:.3g} at scale {scale:.3g}"


def assert_same_state(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str) -> None:
    """Fail unless two `live_state`s agree, pool by pool."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert_near(tensor, expected[name], f"{what}: {name}")


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fail unless two tensors of one shape and dtype hold the same bytes."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    same = torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    if not same:
        error = (actual.double() - expected.double()).abs()
        raise AssertionError(f"{what}: {int((error != 0).sum())} of {error.numel()} differ, by up to {error.max():.3g}")
