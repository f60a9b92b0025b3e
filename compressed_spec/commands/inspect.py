"""`compressed-spec inspect`: what a checkpoint is and what is wrong with it, without loading weights."""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from compressed_spec.inspection import Inspection, inspect_headers, print_inspection
from compressed_spec.launch import Process
from compressed_spec.layout import CacheShape, StateSpec
from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint, read_checkpoint
from compressed_spec.models.deepseek_v4.load import DTYPES, checkpoint_folder
from compressed_spec.models.deepseek_v4.manifest import described_checkpoint
from compressed_spec.models.deepseek_v4.modules import Precision
from compressed_spec.models.deepseek_v4.state import state_spec
from compressed_spec.models.deepseek_v4.weight_plan import WeightPlan
from compressed_spec.needs import Needs, process_needs
from compressed_spec.target import DEFAULT_CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectCommand:
    """Read a checkpoint's config and headers and hold them against each other; exits with 2 on any fault.

    Without a checkpoint, give its config.json, and a list of its tensors unless it is stored as upstream stores it.
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Checkpoint: a folder, a hub id, or "demo"."""
    config: Path | None = None
    """A config.json, in place of MODEL."""
    manifest: Path | None = None
    """With --config: a table of the checkpoint's tensors (name, dtype and shape with tabs between), may be gzipped."""
    tp: int | None = None
    """Tell what each of so many processes needs that share the model."""
    memory: float | None = None
    """With --tp: GiB that a device has; a problem if that is not enough."""
    batch_size: int = 1
    """Sequences of the cache whose bytes are told."""
    max_length: Annotated[int, tyro.conf.arg(aliases=["--context"])] = 4096
    """Tokens of each."""
    max_nodes: int = 64
    """Nodes of one verify, all sequences together."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Of the cache, and of weights once loaded."""
    json: bool = False
    """Print one JSON object only."""

    def run(self) -> None:
        """Print the inspection. Raises ValueError where there is nothing to inspect."""
        if not Process.from_environment().is_first:
            return
        inspection = self._inspection()
        if self.json:
            print(json.dumps(asdict(inspection)))
        else:
            print_inspection(inspection, Console(highlight=False))
        if inspection.problems:
            count = len(inspection.problems)
            where = self.model or self.config
            print(f"compressed-spec: {count} problem{'s' if count > 1 else ''} found in {where}.", file=sys.stderr)
            sys.exit(2)

    def _inspection(self) -> Inspection:
        if self.memory is not None and self.tp is None:
            raise ValueError("--memory says what a process may need: add --tp.")
        inspection = inspect_headers(
            self._checkpoint(),
            batch_size=self.batch_size,
            max_length=self.max_length,
            cache_nbytes=lambda checkpoint, *_: self._shape().nbytes(self._spec(checkpoint)),
            needs=None if self.tp is None else self._needs,
        )
        if self.memory is None or inspection.needs is None:
            return inspection
        problem = inspection.needs.problem(int(self.memory * 2**30))
        return inspection if problem is None else replace(inspection, problems=(*inspection.problems, problem))

    def _checkpoint(self) -> Checkpoint:
        if (self.model is None) == (self.config is None):
            raise ValueError("Give either a MODEL or a --config to inspect.")
        if self.model is not None:
            if self.manifest is not None:
                raise ValueError(
                    "--manifest lists the tensors of a checkpoint that is not here: give --config with it."
                )
            return read_checkpoint(checkpoint_folder(self.model))
        assert self.config is not None
        return described_checkpoint(self.config, self.manifest)

    def _needs(self, checkpoint: Checkpoint, plan: WeightPlan) -> Needs:
        assert self.tp is not None
        return process_needs(checkpoint, plan, self._shape(), num_processes=self.tp, dtype=DTYPES[self.dtype])

    def _shape(self) -> CacheShape:
        return CacheShape(
            batch_size=self.batch_size,
            max_length=self.max_length,
            max_nodes=self.max_nodes,
            prefill_chunk=DEFAULT_CHUNK,
            max_draft_nodes=4 * self.max_nodes,
        )

    def _spec(self, checkpoint: Checkpoint) -> StateSpec:
        return state_spec(
            checkpoint.config,
            draft_head=checkpoint.draft_head,
            num_draft_layers=checkpoint.num_draft_layers,
            precision=Precision(dtype=DTYPES[self.dtype]),
        )
