"""What a benchmark is asked to measure."""

from dataclasses import dataclass

from compressed_spec.tree import parse_tree

CHAINS = ("s1_k1_d2", "s2_k1_d3", "s3_k1_d4", "s4_k1_d5")
TREES = ("s2_k2_d5", "s3_k2_d6", "s3_k2_d8", "s4_k3_d8", "s4_k3_d12")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure. Lengths are in tokens.

    context: of the prompts. long_context: of the one that a token's time is compared at. repeats: of every timing;
    those of single rounds take five times as many. chains, trees: candidates, of which the best on other prompts are
    measured. random_weights: the checkpoint's; then speculation is timed, but no ratio to it is reported.
    Raises ValueError for sizes that are too small, or shapes that are none.
    """

    context: int = 512
    long_context: int = 8192
    max_new_tokens: int = 128
    num_prompts: int = 4
    repeats: int = 5
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    chains: tuple[str, ...] = CHAINS
    trees: tuple[str, ...] = TREES
    drafter: str = "auto"
    random_weights: bool = False

    def __post_init__(self) -> None:
        for name, least in (("context", 1), ("max_new_tokens", 2), ("num_prompts", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.long_context <= self.context:
            raise ValueError(f"long_context ({self.long_context}) must be above context ({self.context}).")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be at least 1 each, got {list(self.batch_sizes)}.")
        for name, chain in (("chains", True), ("trees", False)):
            shapes = [parse_tree(shape) for shape in getattr(self, name)]
            if not shapes or any(shape is None or (shape.top_k == 1) != chain for shape in shapes):
                kind = "chains (k1)" if chain else "trees (k2 or more)"
                raise ValueError(f"{name} must name {kind}, got {' '.join(getattr(self, name)) or 'none'}.")
