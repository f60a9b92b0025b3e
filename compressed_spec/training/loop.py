"""The training loop: a budget in minutes or steps, checkpoints to resume from, a log of losses."""

import json
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from compressed_spec.models.deepseek_v4.config import parse_config
from compressed_spec.models.deepseek_v4.load import load_model
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.training.corpus import Encoded
from compressed_spec.training.losses import Stage
from compressed_spec.training.optimizer import DemoOptimizer, balance
from compressed_spec.training.parallel import Helpers, Place, Replica
from compressed_spec.training.recipe import Recipe, initialize

STATE_FILE, LOG_FILE = "state.pt", "log.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When training ends: after so many minutes of it (pauses between runs do not count), or so many steps."""

    minutes: float | None = None
    steps: int | None = None

    def share(self, seconds: float, step: int) -> float:
        """How much of the budget is used, 0 to 1."""
        if self.steps is not None:
            return step / self.steps
        assert self.minutes is not None, "a budget is in minutes or in steps"
        return seconds / (60.0 * self.minutes)


class Trainer:
    """A model in training. `work` keeps its state; if it holds one, training goes on from there.

    start_from: a checkpoint's folder, whose weights to begin with instead of random ones. processes: of one thread
    each, with micro batches divided among them. compile: fuse with torch.compile.
    Raises ValueError if the kept state is of another recipe.
    """

    def __init__(
        self,
        config: dict[str, object],
        documents: list[Encoded],
        recipe: Recipe,
        budget: Budget,
        work: Path,
        *,
        start_from: Path | None = None,
        processes: int = 1,
        compile: bool = False,
    ) -> None:
        self.recipe, self.budget, self.work = recipe, budget, work
        self.model = DeepseekV4(parse_config(config), draft_head=DraftHeadKind.MTP, dtype=torch.float32)
        if start_from is None:
            initialize(self.model, recipe.seed)
        else:
            self.model.load_state_dict(load_model(start_from, progress=False).state_dict())
        self.optimizer = DemoOptimizer(
            self.model, lr=recipe.lr, adam_lr=recipe.adam_lr, weight_decay=recipe.weight_decay
        )
        self.step, self.consumed, self.seconds = 0, 0, 0.0
        work.mkdir(parents=True, exist_ok=True)
        if (work / STATE_FILE).exists():
            self._restore()
        self._helpers = Helpers(self.model, documents, recipe, count=processes, consumed=self.consumed, compile=compile)
        place = Place(index=0, count=processes, consumed=self.consumed, compile=compile)
        self._replica = Replica(self.model, documents, recipe, place)

    @property
    def tokens_seen(self) -> int:
        return self.consumed * self.recipe.rows * self.recipe.length

    @property
    def share(self) -> float:
        return self.budget.share(self.seconds, self.step)

    def stage(self) -> Stage:
        """What this step trains; random choices depend on seed and step alone."""
        recipe, share, count = self.recipe, self.share, self.model.config.num_hidden_layers
        choose = random.Random(recipe.seed * 1_000_003 + self.step)
        dropout = recipe.dropout if share < recipe.dropout_until else 0.0
        skip = frozenset(i for i in range(count) if choose.random() < dropout * i / max(count - 1, 1))
        chained = share >= recipe.chain_from and self.step % 2 == 0
        return Stage(
            micro_batches=recipe.micro_batches if share >= recipe.grow_from else 1,
            select=share >= recipe.select_from,
            quantize=share >= recipe.quantize_from,
            draft_steps=len(recipe.losses.draft) if chained else 1,
            exit_layer=None if chained else choose.randrange(count // 4, count - 1),
            skip=skip,
        )

    def train_step(self) -> dict[str, float]:
        """One update; the mean of its losses."""
        started = time.monotonic()
        stage, factor = self.stage(), self.recipe.factor(self.share)
        self._helpers.start(stage)
        reports = [self._replica.gradients(stage), *self._helpers.collect()]
        totals = {name: sum(report.parts.get(name, 0.0) for report in reports) for name in reports[0].parts}
        loads = {
            name: torch.tensor([report.loads[name] for report in reports if name in report.loads]).sum(0)
            for name in reports[0].loads
        }
        if not math.isfinite(totals["main"]):
            raise RuntimeError(f"The loss is {totals['main']} at step {self.step}: lower the learning rate.")
        self.optimizer.step(self.step, factor)
        balance(dict(self.model.named_parameters()), loads, self.recipe.balance_rate * factor)
        self.step += 1
        self.consumed += stage.micro_batches
        self.seconds += time.monotonic() - started
        return totals

    def close(self) -> None:
        """End the other processes."""
        self._helpers.close()

    def run(self, *, save_every: float = 180.0, progress: bool = True) -> None:
        """Train until the budget is used; the state is kept every `save_every` seconds and at the end."""
        bar = tqdm(total=100.0, desc="training", unit="%", disable=None if progress else True)
        last_save = time.monotonic()
        with (self.work / LOG_FILE).open("a", buffering=1, encoding="utf-8") as log:
            while self.share < 1.0:
                losses = self.train_step()
                row = {"step": self.step, "seconds": round(self.seconds, 2), "tokens": self.tokens_seen}
                log.write(json.dumps(row | {name: round(value, 4) for name, value in losses.items()}) + "\n")
                bar.set_postfix(step=self.step, **{k: f"{losses[k]:.3f}" for k in ("main", "draft_1")})
                bar.update(min(100.0, 100.0 * self.share) - bar.n)
                if time.monotonic() - last_save > save_every:
                    self.save()
                    last_save = time.monotonic()
        self.save()
        bar.close()

    def save(self) -> None:
        """Keep the state; the file is replaced whole, never half written."""
        state = {
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state,
            "step": self.step,
            "consumed": self.consumed,
            "seconds": self.seconds,
        }
        torch.save(state, self.work / f"{STATE_FILE}.part")
        (self.work / f"{STATE_FILE}.part").replace(self.work / STATE_FILE)

    def _restore(self) -> None:
        state = torch.load(self.work / STATE_FILE, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise ValueError(f"{self.work} holds another recipe's training: choose another --work-dir.")
        self.model.load_state_dict(state["model"])
        for name, value in state["optimizer"].items():
            self.optimizer.state[name].copy_(value)
        self.step, self.consumed, self.seconds = state["step"], state["consumed"], state["seconds"]


def tokenizer_in(work: Path) -> Path:
    """Where a work folder keeps its tokenizer."""
    return work / "tokenizer.json"


def load_tokenizer(work: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_in(work)))
