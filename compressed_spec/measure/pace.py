"""Tokens a second of several ways of decoding, taken in turns over the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from compressed_spec.measure.sides import Decoded, Side
from compressed_spec.measure.timing import in_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What one side did: `repeats[r][p]` is prompt (or batch of prompts) p in repeat r."""

    repeats: tuple[tuple[Decoded, ...], ...]

    @property
    def tokens_per_second(self) -> list[float]:
        """Of each repeat, all prompts together, prefill and its token left out."""
        return [sum(d.num_decoded for d in one) / sum(d.decode_seconds for d in one) for one in self.repeats]

    @property
    def seconds_per_text(self) -> list[float]:
        """Of each repeat: a whole call, prefill and setting up included."""
        return [sum(d.total_seconds for d in one) / len(one) for one in self.repeats]

    @property
    def texts(self) -> list[list[list[int]]]:
        """The texts of each prompt (or batch); those of the first repeat."""
        return [decoded.texts for decoded in self.repeats[0]]

    def num_differing(self, other: "Pace") -> int:
        """Texts of any repeat that are not those of the other side's first one."""
        pairs = [pair for one in self.repeats for pair in zip(one, other.repeats[0], strict=True)]
        return sum(mine != theirs for a, b in pairs for mine, theirs in zip(a.texts, b.texts, strict=True))

    @property
    def acceptance_length(self) -> float:
        """Tokens a round, pooled over all rounds of all texts; 0.0 for a side that counts none."""
        stats = [one for decoded in self._all for one in decoded.stats]
        rounds = sum(one.num_rounds for one in stats)
        return sum(decoded.num_decoded for decoded in self._all) / rounds if rounds else 0.0

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(one.num_accepted_tokens for decoded in self._all for one in decoded.stats)

    @property
    def stage_milliseconds(self) -> dict[str, float]:
        """Mean milliseconds of a round by stage, and of the whole "round", which is their sum; for batches of one.

        Means, for medians would not add up.
        """
        stats = [decoded.stats[0] for decoded in self._all]
        rounds = sum(one.num_rounds for one in stats)
        total: dict[str, float] = {}
        for one in stats:
            for stage, seconds in asdict(one.times).items():
                total[stage] = total.get(stage, 0.0) + seconds
        del total["prefill"]
        means = {stage: 1e3 * seconds / rounds for stage, seconds in total.items()}
        return {**means, "round": 1e3 * sum(decoded.decode_seconds for decoded in self._all) / rounds}

    @property
    def _all(self) -> list[Decoded]:
        return [decoded for one in self.repeats for decoded in one]


def compare_pace(
    sides: Mapping[str, Side],
    prompts: Sequence[Sequence[Sequence[int]]],
    *,
    max_new_tokens: int,
    repeats: int,
    stop: bool,
) -> dict[str, Pace]:
    """Decode each batch of prompts by each side in turns. Each side decodes a few tokens of one prompt before.

    stop: end texts at EOS. Raises ValueError if a side's texts have no token beyond their first.
    """
    for side in sides.values():
        side.decode(prompts[0][:1], min(max_new_tokens, 8), stop=False)
    results: dict[str, list[list[Decoded]]] = {name: [[] for _ in range(repeats)] for name in sides}
    for batch in prompts:
        calls = {name: partial(side.decode, batch, max_new_tokens, stop=stop) for name, side in sides.items()}
        for name, decoded in in_turns(calls, repeats).items():
            for repeat, one in enumerate(decoded):
                results[name][repeat].append(one)
    paces = {name: Pace(repeats=tuple(map(tuple, all_repeats))) for name, all_repeats in results.items()}
    for name, pace in paces.items():
        if not all(sum(decoded.num_decoded for decoded in one) for one in pace.repeats):
            raise ValueError(f"The texts of {name} end with their first token: give other prompts.")
    return paces
