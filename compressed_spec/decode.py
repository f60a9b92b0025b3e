"""The round: draft, verify, accept, commit; and the rows that join and leave between rounds.

B = batch rows, V = vocabulary
"""

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from compressed_spec.accepting import Context, accept, first_tokens, kept_tokens, token_logprobs
from compressed_spec.cache import Cache
from compressed_spec.drafting.base import Drafter, DraftPlan
from compressed_spec.drafting.fit import proposal_for
from compressed_spec.proposing import Place, Proposer
from compressed_spec.requests import Chunk, Request, StopCheck, check_request
from compressed_spec.shaping.base import FixedShaper, RoundOutcome, RoundState, Shaper
from compressed_spec.stats import StageClock, StatsBuilder
from compressed_spec.target import TargetModel
from compressed_spec.tree import TokenTree, TreeShape
from compressed_spec.verifying import Acceptance, DraftTree, Proposal, Verifier
from compressed_spec.whole import WholeEnd, whole_rounds

__all__ = ["Chunk", "Decoder", "Request", "StopCheck", "check_request"]


@dataclass(slots=True, kw_only=True)
class _Active:
    number: int
    row: int
    request: Request
    output_ids: list[int] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.output_ids)

    @property
    def place(self) -> Place:
        """Where its next tree grows; deeper nodes would be cut off, as a round emits one token more than it accepts."""
        return Place(
            row=self.row,
            root=self.output_ids[-1],
            position=len(self.request.prompt_ids) + len(self.output_ids),
            max_depth=self.remaining - 1,
            params=self.request.params,
        )

    @property
    def context(self) -> Context:
        return Context(
            params=self.request.params,
            prompt_ids=self.request.prompt_ids,
            output_ids=self.output_ids,
            eos_token_ids=tuple(self.request.stop_token_ids),
        )


class Decoder:
    """Decodes requests in the rows of one cache; more requests than rows wait for a free one.

    Where several processes share the model, each runs a decoder with the same requests. What a round emits is decided
    on the first, which alone asks processors and stop checks; a drafter that raises ends the run.

    shape: what trees to draft, the same every round or as a shaper decides; None (or no drafter) is plain decoding:
    trees of one node. `stats[i]` counts request i.
    Raises ValueError if a tree of `shape` does not fit the cache, or the verifier not what the drafter proposes.
    """

    def __init__(
        self,
        model: TargetModel,
        cache: Cache,
        *,
        drafter: Drafter | None,
        shape: TreeShape | Shaper | None,
        verifier: Verifier,
    ) -> None:
        shaper = FixedShaper(DraftPlan(shape=shape)) if isinstance(shape, TreeShape) else shape
        num_nodes = 1 if shaper is None else shaper.largest.shape.num_nodes
        if num_nodes > cache.shape.max_nodes:
            raise ValueError(
                f"Trees of {num_nodes} nodes need a cache with max_nodes of at least that, not {cache.shape.max_nodes}."
            )
        self._model, self._cache, self._verifier = model, cache, verifier
        self._drafter = None if shaper is None else drafter
        self._shaper = None if drafter is None else shaper
        self._proposer: Proposer | None = None
        if drafter is not None and shaper is not None:
            proposal = proposal_for(verifier, drafter, shaper.largest)
            self._proposer = Proposer(cache, drafter, verifier, proposal, model.vocab_size)
        self._whole = whole_rounds(model, cache, self._drafter, self._shaper)
        self._unread: tuple[list[_Active], list[WholeEnd]] | None = None  # a round committed, but not yet emitted
        self._max_rows = min(cache.shape.batch_size, cache.shape.max_nodes // num_nodes)
        self._waiting: deque[tuple[int, Request]] = deque()
        self._active: list[_Active] = []
        self._unreported: list[Chunk] = []
        self._num_submitted = 0
        self.clock = StageClock()
        self.stats: dict[int, StatsBuilder] = {}
        self.num_prompt_tokens: dict[int, int] = {}

    @property
    def cache(self) -> Cache:
        """The cache whose rows requests take."""
        return self._cache

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active or self._unreported)

    def submit(self, request: Request) -> int:
        """Queue a request; its number. It joins when a row is free.

        Raises ValueError for an empty prompt, a token id out of range, or a text longer than the cache.
        """
        check_request(self._model, request)
        # The newest token is never processed, so the row ends one short of prompt + output.
        length = len(request.prompt_ids) + request.max_new_tokens - 1
        if length > self._cache.shape.max_length:
            raise ValueError(
                f"A prompt of {len(request.prompt_ids)} tokens with max_new_tokens {request.max_new_tokens} does not "
                f"fit the cache's max_length {self._cache.shape.max_length}: shorten one of them."
            )
        number = self._num_submitted
        self._num_submitted += 1
        self.stats[number] = StatsBuilder()
        self.num_prompt_tokens[number] = len(request.prompt_ids)
        self._waiting.append((number, request))
        return number

    def step(self) -> list[Chunk]:
        """Let waiting requests into free rows; if none joined, run one round of those that are active.

        A first token is handed over before the round that follows it. After an exception it may be called again: no
        token is lost, and whatever was under way starts afresh, except that rows of a commit that failed are refused.
        """
        self._unreported += self._admit()
        if self._active and not self._unreported:
            whole = self._whole_round()
            self._unreported += self._round() if whole is None else whole
        chunks, self._unreported = self._unreported, []
        return chunks

    def close(self) -> None:
        """Release all rows; whatever has not finished is dropped."""
        self._waiting.clear()
        self._unreported.clear()
        self._unread = None
        for active in list(self._active):
            self._leave(active)

    def _admit(self) -> list[Chunk]:
        busy = {active.row for active in self._active}
        free = [row for row in range(self._cache.shape.batch_size) if row not in busy and not self._cache.lengths[row]]
        if self._waiting and not free and not busy:
            raise ValueError("Every row of the cache is taken by others, so no request can start: release one.")
        joining: list[_Active] = []
        while self._waiting and free and len(self._active) + len(joining) < self._max_rows:
            number, request = self._waiting.popleft()
            joining.append(_Active(number=number, row=free.pop(0), request=request))
        if not joining:
            return []
        try:
            with self.clock.stage("prefill"):
                logits_BV = self._model.prefill(
                    self._cache, [a.request.prompt_ids for a in joining], rows=[a.row for a in joining]
                )
            with self.clock.stage("sample"):
                tokens, chunks = self._model.group.decide(lambda: self._first(joining, logits_BV))
        except BaseException:
            # As if they had never joined, so that the next step starts them afresh.
            for active in joining:
                self._cache.release(active.row)
            self._waiting.extendleft((a.number, a.request) for a in reversed(joining))
            raise
        self._active += joining
        for active, token, chunk in zip(joining, tokens, chunks, strict=True):
            active.output_ids.append(token)
            if chunk.finish_reason is None:
                self._tell_drafter("start", active, [*active.request.prompt_ids, token])
            self._finish(active, chunk)
        return chunks

    def _round(self) -> list[Chunk]:
        active = list(self._active)
        state = self._state(active)
        seconds = self.clock.seconds()
        with self.clock.stage("draft"):
            plan = self._shaper.plan(state) if self._shaper is not None and state.max_depth else None
            drafts = self._draft(active, state, plan)
        with self.clock.stage("verify"):
            verify = self._model.verify(self._cache, [d.tree for d in drafts], rows=[a.row for a in active])
        with self.clock.stage("sample"):
            accepted, chunks = self._model.group.decide(lambda: self._accept(active, drafts, verify.logits))
        with self.clock.stage("commit"):
            self._cache.commit(
                verify, [a.path[: len(chunk.token_ids)] for a, chunk in zip(accepted, chunks, strict=True)]
            )
        # Texts grow only now: whatever raised before this point left every request as it was.
        self._tell_shaper(state, plan, drafts, accepted, seconds)
        num_accepted = [len(acceptance.path) - 1 for acceptance in accepted]
        self._emit(active, state, plan, [len(draft.tree) for draft in drafts], num_accepted, chunks)
        return chunks

    def _whole_round(self) -> list[Chunk] | None:
        """A round without the host, None where it cannot be had. One whose emission raised is emitted again."""
        if self._whole is None:
            return None
        if self._unread is None:
            active, places = list(self._active), [a.place for a in self._active]
            if any(a.request.logprobs for a in active) or not self._whole.takes(places, self._verifier):
                return None
            with self.clock.stage("verify"):
                self._unread = active, self._whole.run(places)
        active, ends = self._unread
        with self.clock.stage("sample"):
            tokens = [[*end.tokens[1:], end.acceptance.next_token] for end in ends]
            chunks = [self._cut(one, mine, None) for one, mine in zip(active, tokens, strict=True)]
        state, plan = self._state(active), None if self._shaper is None else self._shaper.largest
        self._unread = None
        sizes = [self._whole.num_nodes] * len(active)
        self._emit(active, state, plan, sizes, [len(end.tokens) - 1 for end in ends], chunks)
        return chunks

    def _emit(
        self,
        active: Sequence[_Active],
        state: RoundState,
        plan: DraftPlan | None,
        sizes: Sequence[int],
        accepted: Sequence[int],
        chunks: Sequence[Chunk],
    ) -> None:
        """Let texts grow by a round's chunks. sizes, accepted: nodes of each tree, and how many drafts were right."""
        # Where all that is left is last tokens, nobody is asked for drafts, but there was no room for them either.
        no_room_at_all = self._shaper is not None and not state.max_depth
        num_steps = int(no_room_at_all) if plan is None else plan.shape.num_steps
        for one, num_nodes, num_accepted, chunk in zip(active, sizes, accepted, chunks, strict=True):
            num_emitted = len(chunk.token_ids)
            # A round that uses up max_new_tokens is truncated too if there was no room for deeper drafts.
            no_room = chunk.finish_reason == "length" and one.remaining - 1 < num_steps
            one.output_ids += chunk.token_ids
            self.stats[one.number].observe(
                num_nodes=num_nodes,
                num_accepted=num_accepted,
                num_emitted=num_emitted,
                truncated=no_room or num_emitted <= num_accepted,
            )
            self.stats[one.number].num_rounds_off += plan is None and state.max_depth > 0 and self._shaper is not None
            self._tell_drafter("observe", one, chunk.token_ids)
            self._finish(one, chunk)

    def _first(self, joining: Sequence[_Active], logits_BV: torch.Tensor) -> tuple[list[int], list[Chunk]]:
        """The first token of each, as a token and as a chunk."""
        tokens = first_tokens(logits_BV, [active.context for active in joining])
        return tokens, [
            self._cut(active, [token], logits_BV[i : i + 1])
            for i, (active, token) in enumerate(zip(joining, tokens, strict=True))
        ]

    def _accept(
        self, active: Sequence[_Active], drafts: Sequence[DraftTree], logits_TV: torch.Tensor
    ) -> tuple[list[Acceptance], list[Chunk]]:
        """What is accepted of each tree, and what of that is emitted."""
        accepted = accept(logits_TV, drafts, [one.context for one in active], self._verifier)
        chunks, first = [], 0
        for one, draft, acceptance in zip(active, drafts, accepted, strict=True):
            tokens = [*(draft.tree.tokens[node] for node in acceptance.path[1:]), acceptance.next_token]
            nodes = [first + node for node in acceptance.path]
            chunks.append(self._cut(one, tokens, logits_TV[nodes] if one.request.logprobs else None))
            first += len(draft.tree)
        return accepted, chunks

    def _cut(self, active: _Active, tokens: Sequence[int], logits_NV: torch.Tensor | None) -> Chunk:
        """A round's tokens (accepted ones, then one of the target's own) up to the text's end.

        logits_NV: what each token followed, for its log probability.
        """
        stop_check = active.request.stop_check
        kept, reason = kept_tokens(
            tokens,
            active.remaining,
            active.request.stop_token_ids,
            None if stop_check is None else partial(stop_check, active.output_ids),
        )
        logprobs = None
        if active.request.logprobs is not None and logits_NV is not None:
            logprobs = token_logprobs(logits_NV[: len(kept)], kept, active.context, active.request.logprobs)
        return Chunk(
            request=active.number,
            token_ids=tuple(kept),
            logprobs=logprobs,
            num_accepted=min(len(tokens) - 1, len(kept)),
            finish_reason=reason,
        )

    def _finish(self, active: _Active, chunk: Chunk) -> None:
        if chunk.finish_reason is not None:
            self._leave(active)
            if self._drafter is not None:
                self.stats[active.number].warn_if_silent(type(self._drafter).__name__)

    def _leave(self, active: _Active) -> None:
        self._active.remove(active)
        self._cache.release(active.row)
        self._tell_drafter("release", active)

    def _tell_drafter(self, what: str, active: _Active, *arguments: Sequence[int]) -> None:
        """Call the drafter's `start`, `observe` or `release`; what it raises may cost speed but not the text."""
        if self._drafter is None:
            return
        try:
            getattr(self._drafter, what)(active.row, *arguments)
        except Exception as error:
            self._draft_error(error, [active])

    def _draft_error(self, error: Exception, active: Sequence[_Active]) -> None:
        warnings.warn(f"The drafter failed, so a round may go without drafts: {error!r}", stacklevel=2)
        for one in active:
            self.stats[one.number].num_draft_errors += 1

    def _state(self, active: Sequence[_Active]) -> RoundState:
        places = [a.place for a in active]
        return RoundState(
            num_rows=len(active),
            context=sum(place.position - 1 for place in places) // len(active),
            max_depth=max(place.max_depth for place in places),
            sampled=self._proposer is not None and self._proposer.draws(places),
        )

    def _tell_shaper(
        self,
        state: RoundState,
        plan: DraftPlan | None,
        drafts: Sequence[DraftTree],
        accepted: Sequence[Acceptance],
        before: Mapping[str, float],
    ) -> None:
        if self._shaper is None or not state.max_depth:
            return
        spent = {stage: now - before[stage] for stage, now in self.clock.seconds().items()}
        self._shaper.observe(
            RoundOutcome(
                state=state,
                plan=plan,
                trees=tuple(draft.tree for draft in drafts),
                paths=tuple(acceptance.path for acceptance in accepted),
                draft_seconds=spent["draft"],
                verify_seconds=spent["verify"] + spent["sample"] + spent["commit"],
            )
        )

    def _draft(self, active: Sequence[_Active], state: RoundState, plan: DraftPlan | None) -> list[DraftTree]:
        proposed: list[TokenTree | DraftTree] = []
        if plan is not None and self._proposer is not None:
            try:
                proposed = self._proposer.propose([a.place for a in active], plan)
            except Exception as error:
                if self._model.group.size > 1:
                    raise  # the other processes may be waiting in the middle of the head's forward
                self._draft_error(error, active)
        drafts = []
        for i, one in enumerate(active):
            if i < len(proposed) and plan is not None and self._proposer is not None:
                drafts.append(self._proposer.usable(proposed[i], one.place, plan.shape.num_nodes))
            else:
                root = TokenTree(tokens=[one.output_ids[-1]], parents=[-1])
                drafts.append(DraftTree(tree=root, proposal=Proposal.DETERMINISTIC, fixed_topology=False))
        if plan is None or self._shaper is None or any(draft.proposal is Proposal.SAMPLED for draft in drafts):
            return drafts
        pruned = self._shaper.prune(state, [draft.tree for draft in drafts])
        return [replace(draft, tree=tree) for draft, tree in zip(drafts, pruned, strict=True)]
