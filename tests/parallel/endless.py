"""Processes that decode until something ends them; each says its id once it is at it."""

import argparse
import itertools
import os

from compressed_spec import generate, load_model
from compressed_spec.launch import Process, join


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--raising-rank", type=int, default=-1)
    parser.add_argument("--raise", dest="message", default="")
    args = parser.parse_args()
    process = Process.from_environment()
    with join(process, device="cpu") as run:
        model = load_model(args.folder, group=run.group, progress=False)
        generate(model, [[3, 4, 5]], max_new_tokens=4)
        os.write(1, f"pid {os.getpid()}\n".encode())  # at once: the others write there too
        if process.rank == args.raising_rank:
            calls = itertools.count()

            def fail(*_: object) -> None:
                if next(calls) == 9:
                    raise ValueError(args.message)

            model.layers[1].register_forward_hook(fail)
        while True:
            generate(model, [[3, 4, 5]], max_new_tokens=200, stop_token_ids=[])


if __name__ == "__main__":
    main()
