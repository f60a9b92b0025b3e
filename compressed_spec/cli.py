"""The command line, `compressed-spec COMMAND`. A fault of the user's ends it with 2 and one sentence."""

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Annotated

import torch.distributed as dist
import tyro

from compressed_spec.commands.bench import BenchCommand
from compressed_spec.commands.generate import GenerateCommand
from compressed_spec.commands.inspect import InspectCommand
from compressed_spec.commands.plan import PlanCommand
from compressed_spec.commands.report import ReportCommand
from compressed_spec.commands.sweep import SweepCommand
from compressed_spec.launch import Process
from compressed_spec.parallel import PeerError

PROG = "compressed-spec"
Command = (
    Annotated[GenerateCommand, tyro.conf.subcommand("generate")]
    | Annotated[InspectCommand, tyro.conf.subcommand("inspect")]
    | Annotated[BenchCommand, tyro.conf.subcommand("bench")]
    | Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    | Annotated[ReportCommand, tyro.conf.subcommand("report")]
    | Annotated[SweepCommand, tyro.conf.subcommand("sweep")]
)
AnyCommand = BenchCommand | GenerateCommand | InspectCommand | PlanCommand | ReportCommand | SweepCommand

# Python's words for a number that is none.
_PLAIN_WORDS = {
    "invalid literal for int() with base 10:": "not a whole number:",
    "could not convert string to float:": "not a number:",
}


def main(argv: list[str] | None = None) -> None:
    """Run a command; exits with 2 after a user's fault, with its sentence on stderr and no traceback.

    Under torchrun the first process speaks for all, except of what happened on another one alone.
    """
    process = Process()
    try:
        process = Process.from_environment()
        with warnings.catch_warnings():
            if process.is_first:
                warnings.showwarning = _show_warning
            else:
                warnings.simplefilter("ignore")
            with _quiet_unless(process.is_first):
                command = _parse(argv)
            command.run()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has left; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError, PeerError) as error:
        if process.is_first:
            print(f"{PROG}: {error}", file=sys.stderr)
        elif dist.is_initialized() and not isinstance(error, PeerError):  # before that, all come to the same faults
            print(f"{PROG}: {process.name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


@contextmanager
def _quiet_unless(speaks: bool) -> Iterator[None]:
    if speaks:
        yield
    else:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield


def _show_warning(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    print(f"{PROG}: warning: {message}", file=sys.stderr)


def _parse(argv: list[str] | None) -> AnyCommand:
    """tyro's reading of the arguments, its boxed explanation of a fault cut down to the fault."""
    captured = io.StringIO()
    try:
        with redirect_stderr(captured):
            command: AnyCommand = tyro.cli(Command, prog=PROG, args=argv)
    except SystemExit as stop:
        if stop.code == 2:
            print(f"{PROG}: {_fault(captured.getvalue())} (see {PROG} --help)", file=sys.stderr)
        raise
    return command


def _fault(box: str) -> str:
    """What a box of tyro's says below its title and above its help; rules part them, of dashes where not of lines."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()[1:]]
    lines = lines[1:] if lines and not lines[0].strip("─-") else lines
    end = next((i for i, line in enumerate(lines) if not line.strip("─-")), len(lines))
    fault = " ".join(lines[:end])
    for words, plain in _PLAIN_WORDS.items():
        fault = fault.replace(words, plain)
    return fault
