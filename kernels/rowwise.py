"""Operations whose every row has bits of its own, whatever rows stand beside it, how many, and where in them it stands.

Three things make a row's last bits depend on its neighbours, and each is taken away:

* A matrix product picks its kernel, and with it the order of its sums, by shape. Here a product always has `ROW_TILE`
  rows; missing ones are zeros.
* torch's sigmoid, SiLU and softplus treat the last few elements of a tensor, which do not fill a vector, by another
  formula. Here they are made of exp and log1p, which do not, and of exactly rounded arithmetic.
* Sums over a list follow its length. Here lists are cut into blocks, and blocks are added one after the other.

That a kernel of fixed shape treats its rows alike is a property of the libraries below (measured: MKL and oneDNN,
AVX-512, float32, float64 and bfloat16), so it is tested, not assumed: tests/invariance.

R = rows, D = input width, O = output width, G = groups
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

ROW_TILE = 8  # rows of every product: small, because decoding a token pays for all of them


def row_tiles(x_RD: torch.Tensor, tile: int = ROW_TILE) -> tuple[torch.Tensor, ...]:
    """The rows (first axis) in tiles of exactly `tile`, contiguous; the last is filled up with zeros."""
    missing = -x_RD.shape[0] % tile
    if missing:
        x_RD = F.pad(x_RD, (0, 0) * (x_RD.dim() - 1) + (0, missing))
    x_RD = x_RD.contiguous()
    return (x_RD,) if len(x_RD) == tile else tuple(x_RD.split(tile))


def join_tiles(tiles: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
    """The first `num_rows` rows of tiles."""
    joined = tiles[0] if len(tiles) == 1 else torch.cat(list(tiles))
    return joined if len(joined) == num_rows else joined[:num_rows]


def linear(x_RD: torch.Tensor, weight_OD: torch.Tensor) -> torch.Tensor:
    """`x weight^T` over the last axis; x may have any number of leading axes."""
    if x_RD.dim() > 2:
        return linear(x_RD.flatten(0, -2), weight_OD).view(*x_RD.shape[:-1], -1)
    return join_tiles([F.linear(tile, weight_OD) for tile in row_tiles(x_RD)], len(x_RD))


def grouped_linear(x_RGD: torch.Tensor, weight_GOD: torch.Tensor) -> torch.Tensor:
    """One product a group, `[R, G, O]`."""
    return join_tiles([torch.einsum("rgd,god->rgo", x, weight_GOD) for x in row_tiles(x_RGD)], len(x_RGD))


def bmm(a_RXY: torch.Tensor, b_RYZ: torch.Tensor) -> torch.Tensor:
    """One product a row, `[R, X, Z]`."""
    pairs = zip(row_tiles(a_RXY), row_tiles(b_RYZ), strict=True)
    return join_tiles([torch.bmm(a, b) for a, b in pairs], len(a_RXY))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """`1 / (1 + exp(-x))`, float32 or wider."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """`x sigmoid(x)`, computed in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """`log(1 + exp(x))`, float32 or wider; x itself above 20, as torch has it."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))
