"""Tokens a round and speed-up, in closed form: every draft accepted with the same probability, independently.

E[N] = 1 + a + ... + a^g (Leviathan et al. 2023, equation 1). Where acceptance varies by depth, rank or task, measured
tokens a round belong in `Round` instead.
"""

from dataclasses import dataclass


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens that a round of a chain emits on average, its bonus token counted.

    Raises ValueError for an acceptance outside 0 .. 1 or fewer than 0 drafts.
    """
    if not 0 <= acceptance <= 1 or num_drafts < 0:
        raise ValueError(
            f"Acceptance lies between 0 and 1 and a round has 0 drafts or more, got {acceptance} and {num_drafts}."
        )
    return sum((acceptance**accepted for accepted in range(num_drafts + 1)), start=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A round's tokens (on average, bonus counted) and the seconds of its parts; state: of its commit."""

    tokens: float
    draft: float
    verify: float
    state: float = 0.0

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.state

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens

    def speedup(self, plain_seconds_per_token: float) -> float:
        """Against plain decoding that takes so long a token; below 1, speculation loses."""
        return plain_seconds_per_token / self.seconds_per_token


def chain_round(
    acceptance: float, num_drafts: int, *, draft_per_token: float, verify: float, state: float = 0.0
) -> Round:
    """A round of a chain whose drafts take `draft_per_token` seconds each."""
    return Round(
        tokens=expected_tokens(acceptance, num_drafts), draft=num_drafts * draft_per_token, verify=verify, state=state
    )
