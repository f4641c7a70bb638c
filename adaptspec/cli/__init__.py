"""The command `adaptspec`. `import adaptspec.cli` is light: each command imports what it needs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from adaptspec.processor import prefer_fast_kernels

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Bad input of any kind gives one line on stderr and status 2. Set ADAPTSPEC_TRACEBACK=1 to see where it was found.

    Args:
        argv: arguments without the program's name; None for those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    prefer_fast_kernels()
    if argv is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # finished results are kept then as well
    try:
        import rich  # noqa: F401
        import typer
    except ImportError:
        return _fail("the command line needs the packages typer and rich: pip install 'adaptspec[cli]'")

    from adaptspec.cli.app import app

    usage_error = typer.BadParameter.__mro__[2]  # newer typer carries its own copy of click
    command = typer.main.get_command(app)
    try:
        with command.make_context("adaptspec", arguments or ["--help"], obj=arguments) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except typer.Exit as done:
        return done.exit_code
    except usage_error as error:
        return _fail(error.format_message())  # type: ignore[attr-defined]
    except KeyboardInterrupt:
        print("adaptspec: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("ADAPTSPEC_TRACEBACK"):
            raise
        return _fail(_describe(error))


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _fail(message: str) -> int:
    print(f"adaptspec: error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_ERROR
