"""For tests of this package, and of drafters, caches and models that others write for it."""

from compressed_spec.testing.drafters import (
    AlternatingDrafter,
    OracleDrafter,
    RandomDrafter,
    ScriptedDrafter,
    WrongDrafter,
    random_tree,
)
from compressed_spec.testing.markov import MarkovModel, cycle, mixed_table
from compressed_spec.testing.models import (
    Reference,
    ReferenceState,
    greedy_text,
    prefilled,
    random_model,
    random_text,
    tiny_config,
)
from compressed_spec.testing.state import (
    assert_near,
    assert_same_bits,
    assert_same_state,
    live_rows,
    live_state,
    poison,
    raw_bytes,
)

__all__ = [
    "AlternatingDrafter",
    "MarkovModel",
    "OracleDrafter",
    "RandomDrafter",
    "Reference",
    "ReferenceState",
    "ScriptedDrafter",
    "WrongDrafter",
    "assert_near",
    "assert_same_bits",
    "assert_same_state",
    "cycle",
    "greedy_text",
    "live_rows",
    "live_state",
    "mixed_table",
    "poison",
    "prefilled",
    "random_model",
    "random_text",
    "random_tree",
    "raw_bytes",
    "tiny_config",
]
