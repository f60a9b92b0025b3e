"""What the engine asks of a model: one forward over flat nodes. Prefill and verify follow from it.

T = nodes, B = batch rows, V = vocabulary, M = residual streams, D = model width, N = draft nodes,
S = places of a block, W = rows listed
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import nn

from compressed_spec.cache import Cache, Scratch, Verification
from compressed_spec.device_trees import DeviceRounds
from compressed_spec.kernels.commit import MoveRows
from compressed_spec.layout import CacheShape, StateSpec
from compressed_spec.memory import check_fits
from compressed_spec.parallel import ALONE, ParallelGroup
from compressed_spec.partial import Claim, LayerStreams
from compressed_spec.rows import RowPlan, make_plan, plan_nodes
from compressed_spec.tree import TokenTree

DEFAULT_CHUNK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep:
    """Draft nodes for one step of an MTP head.

    streams_NMD, tokens_N: what each node is made of (the stream before its token, and the token). position_N: position
    of its row in the head's KV. window_rows_NW: rows it reads there. first: scratch row of the first node.
    """

    streams_NMD: torch.Tensor
    tokens_N: torch.Tensor
    position_N: torch.Tensor
    window_rows_NW: torch.Tensor
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDraft:
    """What a step leaves: the head's own stream of each node, and logits of the token after it, float32 or wider."""

    streams_NMD: torch.Tensor
    logits_NV: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBlock:
    """Blocks of places for a head that drafts them all in one pass, one block a batch row, root first.

    roots_B: the newest tokens, at the blocks' first places. position_N, rows_NW: position of each place, and rows that
    it reads in the head's KV; the places own scratch rows 0 .. N.
    """

    roots_B: torch.Tensor
    position_N: torch.Tensor
    rows_NW: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDraft:
    """What a block head says at each place: its hidden state, and logits `[B, S, V]` of the token after the place.

    The logits leave out what is known of the token at the place itself: `draft_bias` adds that.
    """

    hidden_BSD: torch.Tensor
    logits_BSV: torch.Tensor


class TargetModel(nn.Module, ABC):
    """A model whose state is addressed by row. Subclasses give `state_spec`, `forward` and `logits`.

    group: the processes that share it. Each runs the same rounds on its own copy of the state; a round in which they
    are about to process different nodes, or whose streams come out different, raises PeerError on all of them.
    """

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    group: ParallelGroup = ALONE

    @abstractmethod
    def state_spec(self) -> StateSpec:
        """The state this model keeps."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the parameters are."""

    @abstractmethod
    def forward(self, plan: RowPlan, scratch: Scratch) -> torch.Tensor:
        """The streams `[T, M, D]` after the last layer; writes every kind of scratch row of these nodes."""

    @abstractmethod
    def logits(self, streams_TMD: torch.Tensor) -> torch.Tensor:
        """Next-token logits `[T, V]` of streams, float32 or wider."""

    def begin(self, plan: RowPlan) -> LayerStreams:
        """`forward` in three parts: before the first layer."""
        raise NotImplementedError("a model that cannot stop between its layers")

    def advance(self, plan: RowPlan, scratch: Scratch, before: LayerStreams, num_layers: int) -> LayerStreams:
        """On through the layers up to `num_layers`, writing their rows."""
        raise NotImplementedError("a model that cannot stop between its layers")

    def finish(self, plan: RowPlan, scratch: Scratch, after: LayerStreams) -> torch.Tensor:
        """What `forward` gives, from the last layer; writes the rows that are no layer's."""
        raise NotImplementedError("a model that cannot stop between its layers")

    @property
    def own_drafter(self) -> str | None:
        """Which drafter the model's own head is for: "mtp" (`draft_step`), "dspark" (`draft_block`) or None."""
        return None

    def num_experts(self, num_nodes: float) -> float:
        """Distinct routed experts of a layer that so many nodes are expected to touch; 0.0 for a dense model."""
        return 0.0

    def draft_step(self, step: DraftStep, scratch: Scratch) -> StepDraft:
        """One step of the MTP head; writes its KV rows to scratch."""
        raise NotImplementedError("a model without an MTP head")

    @property
    def draft_block_size(self) -> int:
        """Places S of a block of the DSpark head, 0 without one."""
        return 0

    def draft_block(self, block: DraftBlock, scratch: Scratch) -> BlockDraft:
        """One pass of the DSpark head; writes its KV rows to scratch."""
        raise NotImplementedError("a model without a DSpark head")

    def draft_bias(self, tokens_N: torch.Tensor) -> torch.Tensor:
        """What to add to a place's logits once its token is known, `[N, V]`, float32 or wider."""
        raise NotImplementedError("a model without a DSpark head")

    def draft_confidence(self, hidden_ND: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
        """Log odds `[N]` that what is drafted after these tokens, at places of this hidden state, is accepted."""
        raise NotImplementedError("a model without a DSpark head")

    def new_cache(
        self,
        *,
        batch_size: int = 1,
        max_length: int = 4096,
        max_nodes: int = 64,
        prefill_chunk: int = DEFAULT_CHUNK,
        max_draft_nodes: int | None = None,
    ) -> Cache:
        """A cache for `batch_size` sequences of at most `max_length` tokens, reserved in full.

        max_nodes: nodes of one verify, all rows together. prefill_chunk: tokens that a prefill processes at once.
        max_draft_nodes: nodes that a draft head may process in a round (4 max_nodes by default).
        Raises ValueError for sizes below 1, a length beyond the model's `max_position_embeddings`, or, before any of it
        is taken, more memory than is free.
        """
        if max_length > self.max_position_embeddings:
            raise ValueError(
                f"max_length {max_length} is beyond the model's {self.max_position_embeddings} positions: lower it."
            )
        shape = CacheShape(
            batch_size=batch_size,
            max_length=max_length,
            max_nodes=max_nodes,
            prefill_chunk=prefill_chunk,
            max_draft_nodes=4 * max_nodes if max_draft_nodes is None else max_draft_nodes,
        )
        spec = self.state_spec()
        check_fits("A cache", shape.nbytes(spec), self.device, "lower batch_size, max_length or max_nodes")
        return Cache(spec, shape, self.device, self.row_mover())

    def row_mover(self) -> MoveRows | None:
        """What moves the rows of a cache's commits, one a cache; None for torch's own copies."""
        return None

    def device_rounds(self, cache: Cache) -> DeviceRounds | None:
        """Rounds over a cache that the device carries out by itself, None where the host must see each step."""
        return None

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise ValueError if a token id is not in the vocabulary."""
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"Token id {token} is out of range: the vocabulary has ids 0 .. {self.vocab_size - 1}."
                )

    @torch.no_grad()
    def prefill(
        self, cache: Cache, prompts_ids: Sequence[Sequence[int]], *, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Append prompts to rows (0 .. by default) and commit them; logits `[B, V]` after each last token.

        A prompt may continue what its row holds. Long prompts go in chunks of the cache's `prefill_chunk` tokens, all
        rows together; the result does not depend on it. Raises ValueError, before anything is written, for an empty
        prompt, a token id out of range, or a row that would grow beyond `max_length`. If anything else is raised, rows
        that hold a part of their prompt are refused until released.
        """
        rows = list(range(len(prompts_ids)) if rows is None else rows)
        cache.check_rows(rows)
        if not rows or len(rows) != len(prompts_ids):
            raise ValueError(
                f"Prefill needs one row a prompt and at least one, got {len(rows)} rows for {len(prompts_ids)} prompts."
            )
        for row, prompt in zip(rows, prompts_ids, strict=True):
            if not len(prompt):
                raise ValueError("A prompt is empty: give at least one token id, such as the BOS token.")
            self.check_tokens(prompt)
            if cache.lengths[row] + len(prompt) > cache.shape.max_length:
                raise ValueError(
                    f"A prompt of {len(prompt)} tokens does not fit after the {cache.lengths[row]} of its row: "
                    f"make a cache with a max_length above {cache.shape.max_length}."
                )
        before = [cache.lengths[row] for row in rows]
        try:
            return self._prefill(cache, prompts_ids, rows)
        except BaseException:
            cache.mark_damaged([row for row, length in zip(rows, before, strict=True) if cache.lengths[row] != length])
            raise

    def _prefill(self, cache: Cache, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int]) -> torch.Tensor:
        done = [0] * len(rows)
        last: dict[int, torch.Tensor] = {}
        while len(last) < len(rows):
            room = cache.shape.prefill_chunk
            parts: list[tuple[int, int]] = []
            for i, prompt in enumerate(prompts_ids):
                count = min(room, len(prompt) - done[i])
                if count:
                    parts.append((i, count))
                    room -= count
            trees = [TokenTree.chain(prompts_ids[i][done[i] : done[i] + count]) for i, count in parts]
            verify, streams_TMD = self._run(cache, trees, [rows[i] for i, _ in parts], want_logits=False)
            cache.commit(verify, [range(count) for _, count in parts])
            end = 0
            for i, count in parts:
                end, done[i] = end + count, done[i] + count
                if done[i] == len(prompts_ids[i]):
                    last[i] = streams_TMD[end - 1]
        return self.logits(torch.stack([last[i] for i in range(len(rows))]))

    @torch.no_grad()
    def verify(self, cache: Cache, trees: Sequence[TokenTree], *, rows: Sequence[int] | None = None) -> Verification:
        """Process one tree a row (rows 0 .. by default); persistent rows are untouched until `cache.commit`.

        Raises ValueError, before anything is written, for a token id out of range, more nodes than the cache's
        `max_nodes`, or a tree that reaches beyond `max_length`.
        """
        rows = list(range(len(trees)) if rows is None else rows)
        cache.check_rows(rows)
        if not trees or len(rows) != len(trees):
            raise ValueError(f"Verify needs one tree a row and at least one, got {len(trees)} trees, {len(rows)} rows.")
        num_nodes = sum(map(len, trees))
        if num_nodes > cache.shape.max_nodes:
            raise ValueError(
                f"These trees have {num_nodes} nodes, more than the cache's {cache.shape.max_nodes}: "
                "make it with a larger max_nodes."
            )
        for row, tree in zip(rows, trees, strict=True):
            self.check_tokens(tree.tokens)
            # No tree is deeper than it has nodes, which is told sooner.
            room = cache.shape.max_length - cache.lengths[row]
            if len(tree) > room and max(tree.depths) + 1 > room:
                raise ValueError(
                    f"A tree of depth {max(tree.depths)} does not fit after the {cache.lengths[row]} tokens of row "
                    f"{row}: make a cache with a max_length above {cache.shape.max_length}."
                )
        return self._run(cache, trees, rows, want_logits=True)[0]

    def _run(
        self, cache: Cache, trees: Sequence[TokenTree], rows: Sequence[int], *, want_logits: bool
    ) -> tuple[Verification, torch.Tensor]:
        claim = None if cache.stopped is None else cache.stopped.claim(trees, rows)
        stopped, ticket = cache.stopped, cache.next_ticket()
        starts = [cache.lengths[row] for row in rows]
        self.group.check_same("the next nodes", (trees, rows, starts))
        slots = None if claim is None else claim.slot_T
        plan = make_plan(cache.spec, cache.shape, trees, rows, starts, cache.device, slots=slots)
        if stopped is None or claim is None:
            streams_TMD = self(plan, Scratch(cache))
        else:
            streams_TMD = self._go_on(cache, plan, trees, list(stopped.levels), claim)
        written = cache.scratch_rows(len(streams_TMD))
        # A sum over heads hides whose rows differ, so the rows are compared, and not only what comes of them.
        self.group.check_same_bits("the state of the last nodes", chain([streams_TMD], written))
        logits_TV = self.logits(streams_TMD) if want_logits else streams_TMD.new_empty((0, self.vocab_size))
        verify = Verification(trees=tuple(trees), rows=tuple(rows), logits=logits_TV, plan=plan, ticket=ticket)
        return verify, streams_TMD

    def _go_on(
        self, cache: Cache, plan: RowPlan, trees: Sequence[TokenTree], done: list[LayerStreams], claim: Claim
    ) -> torch.Tensor:
        """`forward` of trees some of whose nodes have gone through the first layers: `done`, as `claim` says."""
        if claim.new_T.any():
            tokens_N = np.asarray([token for tree in trees for token in tree.tokens])[claim.new_T]
            new = plan_nodes(cache.spec, cache.shape, plan.nodes.take(claim.new_T), tokens_N, cache.device)
            done = [*done, self.advance(new, Scratch(cache, new.slot_T), self.begin(new), done[0].num_layers)]
        scratch = Scratch(cache, plan.slot_T)
        before = LayerStreams.cat(done).take(torch.from_numpy(claim.source_T).to(cache.device))
        return self.finish(plan, scratch, self.advance(plan, scratch, before, cache.spec.num_layers))

    def score(self, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, RowPlan]:
        """Streams `[T, M, D]` of whole sequences in one differentiable chain pass, and their plan. For training."""
        spec = self.state_spec()
        # Room for one entry of each kind: a list without entries names a row all the same, to be left out.
        longest = max(*map(len, sequences), *(comp.ratio for comp in spec.compressions), 1)
        shape = CacheShape(
            batch_size=len(sequences), max_length=longest, max_nodes=1, prefill_chunk=1, max_draft_nodes=1
        )
        cache = Cache(spec, shape, self.device)
        trees = [TokenTree.chain(sequence) for sequence in sequences]
        plan = make_plan(cache.spec, shape, trees, range(len(trees)), [0] * len(trees), self.device)
        return self(plan, Scratch(cache, out_of_place=True)), plan
