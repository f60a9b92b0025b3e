"""`compressed-spec inspect`: what a checkpoint is and what is wrong with it, without loading weights."""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console

from compressed_spec.inspection import inspect_checkpoint, print_inspection
from compressed_spec.layout import CacheShape
from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint
from compressed_spec.models.deepseek_v4.load import DTYPES, checkpoint_folder
from compressed_spec.models.deepseek_v4.modules import Precision
from compressed_spec.models.deepseek_v4.state import state_spec
from compressed_spec.target import DEFAULT_CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectCommand:
    """Read a checkpoint's config and headers and hold them against each other; exits with 2 on any fault."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint: a folder, a hub id, or "demo"."""
    batch_size: int = 1
    """Sequences of the cache whose bytes are told."""
    max_length: int = 4096
    """Tokens of each."""
    max_nodes: int = 64
    """Nodes of one verify, all sequences together."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Of the cache."""
    json: bool = False
    """Print one JSON object only."""

    def run(self) -> None:
        """Print the inspection. Raises ValueError where there is nothing to inspect."""
        inspection = inspect_checkpoint(
            checkpoint_folder(self.model),
            batch_size=self.batch_size,
            max_length=self.max_length,
            cache_nbytes=self._cache_nbytes,
        )
        if self.json:
            print(json.dumps(asdict(inspection)))
        else:
            print_inspection(inspection, Console(highlight=False))
        if inspection.problems:
            count = len(inspection.problems)
            print(f"compressed-spec: {count} problem{'s' if count > 1 else ''} found in {self.model}.", file=sys.stderr)
            sys.exit(2)

    def _cache_nbytes(self, checkpoint: Checkpoint, batch_size: int, max_length: int) -> int:
        shape = CacheShape(
            batch_size=batch_size,
            max_length=max_length,
            max_nodes=self.max_nodes,
            prefill_chunk=DEFAULT_CHUNK,
            max_draft_nodes=4 * self.max_nodes,
        )
        spec = state_spec(
            checkpoint.config,
            draft_head=checkpoint.draft_head,
            num_draft_layers=checkpoint.num_draft_layers,
            precision=Precision(dtype=DTYPES[self.dtype]),
        )
        return shape.nbytes(spec)
