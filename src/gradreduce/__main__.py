"""The ``gradreduce`` command; ``python -m gradreduce`` runs it too."""

from __future__ import annotations

import os
import sys

from gradreduce.errors import install_hint


def main() -> None:
    """Runs the command; exits with its status."""
    try:
        from gradreduce.cli.app import command
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("click", "rich"):
            raise
        raise SystemExit(
            f"the gradreduce command needs {library}, which is not installed: {install_hint('cli')}"
        ) from None
    try:
        command(prog_name="gradreduce")
    except OSError as error:  # of standard output, on a full disk for example
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest
        raise SystemExit(f"gradreduce: {error}") from None


if __name__ == "__main__":
    main()
