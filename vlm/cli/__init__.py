"""The `vlm` command.

Commands import what they need when they run: `vlm --help` loads neither torch nor the runtime. Exit status: 0 all
done, 1 some inputs failed, 2 nothing could be done, 130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from typing import Annotated

import typer

from vlm.cli.caption import caption
from vlm.cli.chat import chat
from vlm.cli.env import env
from vlm.cli.explain import explain
from vlm.cli.models import models
from vlm.cli.streams import PIPE_CLOSED, open_closed_streams, say, write
from vlm.errors import VLMError

INTERRUPTED = 130


@dataclass
class State:
    """What the options before the command's name set."""

    debug: bool = False


app = typer.Typer(
    name="vlm",
    help="Caption pictures and ask about them with vision-language models.",
    no_args_is_help=True,
    add_completion=False,
    # Plain help: rich would double the time that it takes, and nothing here needs it.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (caption, chat, explain, models, env):
    app.command()(command)


def _print_version(asked: bool) -> None:
    if asked:
        from vlm import __version__

        write(f"vlm {__version__}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    ctx.obj.debug = debug


def run(args: list[str]) -> int:
    """Run a command line; its exit status. An error is told on stderr, with `--debug` by its traceback."""
    state = State()
    try:
        return int(app(args, prog_name="vlm", standalone_mode=False, obj=state) or 0)
    except (VLMError, OSError) as error:
        return _failed(error, str(error), state.debug)
    except SystemExit:
        # Outside its standalone mode Typer ends the process for one reason: nobody reads what it writes.
        return PIPE_CLOSED
    except Exception as error:
        # Typer's own: wrong usage knows how to show itself; Abort stands for Ctrl-C.
        if type(error).__name__ == "Abort":
            return INTERRUPTED
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            return int(error.exit_code)
        return _failed(error, f"{type(error).__name__}: {error} (vlm --debug shows where)", state.debug)


def _failed(error: Exception, message: str, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
        return 2
    say(f"error: {message}")
    return 2


def main() -> None:
    # Threads that spin while they wait for each other take the core from the one that works, on a machine that is
    # busy otherwise: a decode step was measured at ten times its duration. OpenMP reads this when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    open_closed_streams()
    sys.exit(run(sys.argv[1:]))
