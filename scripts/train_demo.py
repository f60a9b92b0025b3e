"""Train the bundled demo checkpoint: `python scripts/train_demo.py --data ../shared/data --minutes 75`."""

import json
import shutil
from pathlib import Path

import torch
import tyro

from compressed_spec.models.deepseek_v4.load import DEMO
from compressed_spec.training.card import (
    PICTURE,
    Phase,
    draw_losses,
    final_losses,
    model_card,
    read_log,
    read_phases,
    write_phases,
)
from compressed_spec.training.corpus import encode, read_corpus, read_gsm8k, train_tokenizer
from compressed_spec.training.export import export_checkpoint
from compressed_spec.training.gate import measure_gate
from compressed_spec.training.loop import LOG_FILE, Budget, Trainer, load_tokenizer, tokenizer_in
from compressed_spec.training.polish import Polishing, polishing_documents
from compressed_spec.training.recipe import VOCAB_SIZE, Recipe, demo_config


def main(
    *,
    data: Path = Path("../shared/data"),
    work_dir: Path = Path("/tmp/compressed_spec_demo"),
    output: Path = DEMO,
    minutes: float = 75.0,
    steps: int | None = None,
    start_from: Path | None = None,
    polish_runs: int = 4,
    polish_minutes: float = 7.0,
    polish_texts: int = 1200,
    seed: int = 0,
    processes: int = 2,
    compile: bool = True,
    gate_prompts: int = 100,
) -> None:
    """Train, resuming where WORK_DIR left off; then export to OUTPUT and measure what was exported.

    Args:
        data: folder with gsm8k_train.jsonl, mbpp.jsonl and, to measure, gsm8k_test.jsonl.
        work_dir: keeps the tokenizer, and each run's training state, log of losses and checkpoint.
        output: folder of the checkpoint.
        minutes: length of the first run, over the corpus; the learning rate ends with it.
        steps: its length in steps instead of minutes (reproducible).
        start_from: a checkpoint of this architecture, to polish instead of what a first run makes.
        polish_runs: short runs after the first, each on texts that the checkpoint before it wrote, against loops.
        polish_minutes: length of each.
        polish_texts: texts that each begins with.
        seed: of weights, order and choices.
        processes: of one thread each; on shared cores faster than threads, which wait for each other.
        compile: fuse with torch.compile (needs a C++ compiler).
        gate_prompts: test problems to measure on, 0 for none.
    """
    torch.set_num_threads(1)
    texts = read_corpus(data)
    work_dir.mkdir(parents=True, exist_ok=True)
    if not tokenizer_in(work_dir).exists():
        if start_from is None:
            train_tokenizer(texts, VOCAB_SIZE).save(str(tokenizer_in(work_dir)))
        else:
            tokenizer_in(work_dir).write_bytes(tokenizer_in(start_from).read_bytes())
    tokenizer, config, recipe = load_tokenizer(work_dir), demo_config(), Recipe(seed=seed)
    documents = encode(texts, tokenizer)
    last = start_from
    for number in range(0 if start_from is None else 1, polish_runs + 1):
        work, told, used = work_dir / f"run_{number}", documents, recipe
        budget = Budget(minutes=minutes if steps is None else None, steps=steps)
        if last is not None:
            used = recipe.polishing(number)
            budget = Budget(minutes=polish_minutes)
            polishing = Polishing(
                number=number,
                folder=last,
                num_texts=polish_texts,
                earlier=tuple(work_dir / f"run_{i}" for i in range(1, number)),
            )
            told = polishing_documents(documents, recipe, polishing, work, processes=processes, compile=compile)
        torch.set_float32_matmul_precision("medium")  # bfloat16 products where the CPU has them
        trainer = Trainer(config, told, used, budget, work, start_from=last, processes=processes, compile=compile)
        trainer.run()
        trainer.close()
        torch.set_float32_matmul_precision("highest")
        phase = Phase(
            what="corpus" if last is None else "own texts",
            steps=trainer.step,
            tokens=trainer.tokens_seen,
            seconds=trainer.seconds,
            lr=used.lr,
            adam_lr=used.adam_lr,
            unlikely=0.0 if last is None else used.losses.unlikely,
        )
        phases = [*([] if last is None else read_phases(last)), phase]
        last = work / "checkpoint"
        export_checkpoint(trainer.model, config, tokenizer, last)
        write_phases(last, phases)

    assert last is not None, "there was a run"
    if last != output:
        shutil.copytree(last, output, dirs_exist_ok=True)
    logs = [read_log(file) for file in sorted(work_dir.glob(f"run_*/{LOG_FILE}"))]
    draw_losses(logs, output / PICTURE, first=read_phases(start_from) if start_from is not None else [])
    gate = None
    if gate_prompts:
        problems = read_gsm8k(data / "gsm8k_test.jsonl")[:gate_prompts]
        gate = measure_gate(output, [p.prompt for p in problems], [p.completion for p in problems])
        print(json.dumps({name: getattr(gate, name) for name in gate.__slots__} | {"passed": gate.passed}))
    card = model_card(recipe, read_phases(output), final_losses(logs), gate)
    (output / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
