"""The command line: `compressed-spec generate | inspect`. A fault of the user's ends it with 2 and one sentence."""

import io
import os
import sys
from contextlib import redirect_stderr
from typing import Annotated

import tyro

from compressed_spec.commands.generate import GenerateCommand
from compressed_spec.commands.inspect import InspectCommand

PROG = "compressed-spec"
Command = (
    Annotated[GenerateCommand, tyro.conf.subcommand("generate")]
    | Annotated[InspectCommand, tyro.conf.subcommand("inspect")]
)


def main(argv: list[str] | None = None) -> None:
    """Run a command; exits with 2 after a user's fault, with its sentence on stderr and no traceback."""
    try:
        _parse(argv).run()
    except BrokenPipeError:
        # The reader of our output has left; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _parse(argv: list[str] | None) -> GenerateCommand | InspectCommand:
    """tyro's reading of the arguments, its boxed explanation of a fault cut down to the fault."""
    captured = io.StringIO()
    try:
        with redirect_stderr(captured):
            command: GenerateCommand | InspectCommand = tyro.cli(Command, prog=PROG, args=argv)
    except SystemExit as stop:
        if stop.code == 2:
            lines = [line.strip("│╭╮╰╯─| ") for line in captured.getvalue().splitlines()]
            # The first line is the box's title, an empty one the rule after which tyro repeats its help.
            fault = " ".join(lines[1 : lines.index("", 1)] if "" in lines[1:] else lines)
            print(f"{PROG}: {fault} (see {PROG} --help)", file=sys.stderr)
        raise
    return command
