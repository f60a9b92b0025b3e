"""A forward of few nodes in pieces, each one function of tensors alone, so that it can be compiled.

Pieces write rows in place, at the rows that they are given. Uncompiled they do the same, but move far more memory than
the model's plain form.

T = nodes, M = residual streams, D = model width, R = pool rows, V = vocabulary
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from compressed_spec.layer_scratch import LayerScratch
from compressed_spec.models.deepseek_v4.attention import AttentionRound
from compressed_spec.models.deepseek_v4.block import Block
from compressed_spec.models.deepseek_v4.dspark import DSparkHead
from compressed_spec.models.deepseek_v4.embedding import VocabularyEmbedding
from compressed_spec.models.deepseek_v4.modules import HyperConnected, Linear, Norm
from compressed_spec.models.deepseek_v4.mtp import MTPHead
from compressed_spec.models.deepseek_v4.rope import Rotation, rotation

Head = TypeVar("Head", bound=nn.Module)

_OPEN_LISTS = frozenset({"extra_rows_TX", "listed_TK"})  # whose length differs from round to round


class Fields:
    """Where a nested dataclass has its tensors: takes them out of one like `sample`, and puts others into `sample`."""

    def __init__(self, sample: Any) -> None:
        self._sample = sample
        self.paths = tuple(_tensor_paths(sample))
        self._get = attrgetter(*self.paths)

    def take(self, value: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of a value that is built like the sample."""
        tensors: tuple[torch.Tensor, ...] = self._get(value)
        return tensors

    def put(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The sample, with these tensors."""
        return _with_tensors(self._sample, dict(zip(self.paths, tensors, strict=True)), "")


def _tensor_paths(value: Any, prefix: str = "") -> list[str]:
    paths = []
    for field in fields(value):
        part, path = getattr(value, field.name), prefix + field.name
        if isinstance(part, torch.Tensor):
            paths.append(path)
        elif is_dataclass(part):
            paths += _tensor_paths(part, f"{path}.")
    return paths


def _with_tensors(value: Any, tensors: Mapping[str, torch.Tensor], prefix: str) -> Any:
    changes: dict[str, Any] = {}
    for field in fields(value):
        part, path = getattr(value, field.name), prefix + field.name
        if isinstance(part, torch.Tensor):
            changes[field.name] = tensors[path]
        elif is_dataclass(part):
            changes[field.name] = _with_tensors(part, tensors, f"{path}.")
    return replace(value, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What all layers share: the embedded tokens as streams, and the rotations.

    main, compress: of the nodes, in layers without and with compression. entries: of the entries that close, in the
    order of the compressions.
    """

    streams_TMD: torch.Tensor
    main: Rotation
    compress: Rotation
    entries: tuple[Rotation, ...]


class Opening(nn.Module):
    """tokens_T, position_T, then each compression's entry_position_C -> the streams, then cosines and sines."""

    def __init__(
        self, embed: VocabularyEmbedding, num_streams: int, rope_main: torch.Tensor, rope_compress: torch.Tensor
    ) -> None:
        super().__init__()
        self.embed, self.num_streams = embed, num_streams
        self.register_buffer("rope_main", rope_main)
        self.register_buffer("rope_compress", rope_compress)

    def forward(
        self, tokens_T: torch.Tensor, position_T: torch.Tensor, *entry_positions: torch.Tensor
    ) -> list[torch.Tensor]:
        streams_TMD = self.embed(tokens_T).unsqueeze(1).expand(-1, self.num_streams, -1)
        compress = self.get_buffer("rope_compress")
        rotations = [rotation(self.get_buffer("rope_main"), position_T)]
        rotations += [rotation(compress, position_N) for position_N in (position_T, *entry_positions)]
        return [streams_TMD.contiguous(), *(table for one in rotations for table in (one.cos_NP, one.sin_NP))]

    @staticmethod
    def opened(tensors: Sequence[torch.Tensor]) -> Opened:
        """What these outputs are."""
        rotations = [Rotation(cos_NP=cos, sin_NP=sin) for cos, sin in zip(tensors[1::2], tensors[2::2], strict=True)]
        return Opened(streams_TMD=tensors[0], main=rotations[0], compress=rotations[1], entries=tuple(rotations[2:]))


class Layer(nn.Module):
    """streams_TMD, tokens_T, the layer's pools, the rows to write in each, then what `fields` has -> the next streams.

    sample: a round, without its scratch. pools: names, in their order.
    """

    def __init__(self, block: Block, pools: Sequence[str], sample: AttentionRound) -> None:
        super().__init__()
        self.block, self.pools, self.fields = block, tuple(pools), Fields(sample)

    def forward(self, streams_TMD: torch.Tensor, tokens_T: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
        count = len(self.pools)
        scratch = LayerScratch(
            pools=dict(zip(self.pools, rest[:count], strict=True)),
            rows=dict(zip(self.pools, rest[count : 2 * count], strict=True)),
        )
        here = replace(self.fields.put(rest[2 * count :]), scratch=scratch)
        return [self.block.few(streams_TMD, tokens_T, here)]

    @property
    def open_lists(self) -> frozenset[int]:
        """Which inputs are lists of any length."""
        first = 2 + 2 * len(self.pools)
        names = [path.rsplit(".", 1)[-1] for path in self.fields.paths]
        return frozenset(first + i for i, name in enumerate(names) if name in _OPEN_LISTS)


class _HeadPiece(nn.Module, Generic[Head]):
    """What the pieces of a draft head share: the head, the embedding, and the frequencies of its rotation."""

    def __init__(self, head: Head, embed: VocabularyEmbedding, rope_main: torch.Tensor) -> None:
        super().__init__()
        self.head: Head = head
        self.embed = embed
        self.register_buffer("rope_main", rope_main)

    def turned(self, position_N: torch.Tensor) -> Rotation:
        return rotation(self.get_buffer("rope_main"), position_N)

    def here(
        self, turned: Rotation, rows_NW: torch.Tensor, head_RE: torch.Tensor, head_rows_N: torch.Tensor
    ) -> AttentionRound:
        """A round of one of the head's layers: it reads `rows_NW` of its pool and writes `head_rows_N`."""
        return AttentionRound(
            rotation=turned,
            window_rows_TW=rows_NW,
            scratch=LayerScratch(pools={"head_kv": head_RE}, rows={"head_kv": head_rows_N}),
            kv_pool="head_kv",
            first=0,
            compression=None,
        )


class HeadRows(_HeadPiece[MTPHead]):
    """streams_TMD, tokens_T, position_T, parent_stream_T, the pools of pending streams and of the MTP head's KV, the
    rows to write in each -> nothing: what a verification leaves to the next draft."""

    def forward(
        self,
        streams_TMD: torch.Tensor,
        tokens_T: torch.Tensor,
        position_T: torch.Tensor,
        parent_stream_T: torch.Tensor,
        pending_RF: torch.Tensor,
        head_RE: torch.Tensor,
        pending_rows_T: torch.Tensor,
        head_rows_T: torch.Tensor,
    ) -> list[torch.Tensor]:
        pending_RF = pending_RF.index_copy_(0, pending_rows_T, streams_TMD.flatten(1))
        previous_TMD = pending_RF[parent_stream_T].unflatten(-1, streams_TMD.shape[1:])
        rows_TE = self.head.kv_rows(previous_TMD, self.embed(tokens_T), self.turned(position_T - 1))
        head_RE.index_copy_(0, head_rows_T, rows_TE.to(head_RE.dtype))
        return []


class HeadStep(_HeadPiece[MTPHead]):
    """streams_NMD, tokens_N, position_N, window_rows_NW, the pool of the MTP head's KV, rows to write -> the head's
    own streams, and logits `[N, V]`."""

    def __init__(
        self, head: MTPHead, embed: VocabularyEmbedding, rope_main: torch.Tensor, vocabulary_head: Linear
    ) -> None:
        super().__init__(head, embed, rope_main)
        self.vocabulary_head = vocabulary_head

    def forward(
        self,
        streams_NMD: torch.Tensor,
        tokens_N: torch.Tensor,
        position_N: torch.Tensor,
        window_rows_NW: torch.Tensor,
        head_RE: torch.Tensor,
        head_rows_N: torch.Tensor,
    ) -> list[torch.Tensor]:
        here = self.here(self.turned(position_N), window_rows_NW, head_RE, head_rows_N)
        own_NMD = self.head.few(self.head.fuse(streams_NMD, self.embed(tokens_N)), tokens_N, here)
        logits_NV: torch.Tensor = self.vocabulary_head(self.head.norm(self.head.collapse_head(own_NMD)))
        return [own_NMD, logits_NV.to(self.head.precision.wide)]


class BlockHidden(_HeadPiece[DSparkHead]):
    """tokens_N, position_N, rows_NW, the rows to write, the pool of each stage's KV -> the DSpark head's one output
    stream `[N, D]`."""

    def forward(
        self,
        tokens_N: torch.Tensor,
        position_N: torch.Tensor,
        rows_NW: torch.Tensor,
        head_rows_N: torch.Tensor,
        *pools: torch.Tensor,
    ) -> list[torch.Tensor]:
        stages, turned = self.head.stages, self.turned(position_N)
        streams_NMD = self.embed(tokens_N).unsqueeze(1).expand(-1, stages[0].config.hc_mult, -1)
        for stage, head_RE in zip(stages, pools, strict=True):
            here = self.here(turned, rows_NW, head_RE, head_rows_N)
            streams_NMD = stage.few(streams_NMD, tokens_N, here)
        return [stages[-1].collapse_head(streams_NMD)]


class RowMoves(nn.Module):
    """source_PN, target_PN (as in `Moves`, a line a pool), then the pools `[L, R, D]` -> nothing."""

    def forward(self, source_PN: torch.Tensor, target_PN: torch.Tensor, *pools: torch.Tensor) -> list[torch.Tensor]:
        for pool_LRD, source_N, target_N in zip(pools, source_PN, target_PN, strict=True):
            # What moves nothing copies the last row, a scratch row, onto itself.
            last, still_N = pool_LRD.shape[1] - 1, source_N < 0
            rows_LND = pool_LRD.index_select(1, torch.where(still_N, last, source_N))
            pool_LRD.index_copy_(1, torch.where(still_N, last, target_N), rows_LND)
        return []


class Output(HyperConnected):
    """streams_TMD -> logits `[T, V]`."""

    def __init__(self, owner: HyperConnected, norm: Norm, head: Linear) -> None:
        super().__init__(owner.config, owner.precision)
        for part in ("fn", "base", "scale"):
            self.register_parameter(f"hc_head_{part}", owner.get_parameter(f"hc_head_{part}"))
        self.norm, self.head = norm, head

    def forward(self, streams_TMD: torch.Tensor) -> list[torch.Tensor]:
        logits_TV: torch.Tensor = self.head(self.norm(self.collapse_head(streams_TMD)))
        return [logits_TV.to(self.precision.wide)]
