"""The command line: `hotmoe info`, `run`, `chat`, `plan`, `demo`, `trace`, `replay`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(args: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        args: The command line without the program's name; None: that of the process.

    Returns:
        The exit status: 0, 1 if the command failed, 2 if an option was bad, 130 after Ctrl-C.
    """
    import click

    from ..errors import ArgumentError, HotmoeError, PlanError, PolicyError
    from .commands import hotmoe

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # for policies that go by "module:Class"
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            result = hotmoe.main(args=args, prog_name="hotmoe", standalone_mode=False)
    except click.UsageError as error:
        help_of = error.ctx.command_path if error.ctx else "hotmoe"
        return _fail(f"{error.format_message()} (see {help_of} --help)", EXIT_USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (ArgumentError, PlanError, PolicyError) as error:  # what the user asked for cannot be had
        return _fail(str(error), EXIT_USAGE)
    except HotmoeError as error:
        return _fail(str(error), EXIT_FAILED)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", EXIT_INTERRUPTED)
    return result if isinstance(result, int) else 0


def _show_warning(
    message: Warning | str, category: object, filename: str, lineno: int, file: object = None, line: str | None = None
) -> None:
    """Print a warning as one line; in which line of ours it came up tells the user nothing."""
    print(f"hotmoe: warning: {message}", file=sys.stderr)


def _fail(message: str, status: int) -> int:
    print(f"hotmoe: {message}", file=sys.stderr)
    return status
