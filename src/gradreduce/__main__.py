"""The ``gradreduce`` command; ``python -m gradreduce`` runs it too."""

from __future__ import annotations


def main() -> None:
    """Runs the command; exits with its status."""
    try:
        from gradreduce.cli.app import command
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("click", "rich"):
            raise
        raise SystemExit(
            f"the gradreduce command needs {library}, which is not installed: "
            "pip install 'gradreduce[cli]'"
        ) from None
    command(prog_name="gradreduce")


if __name__ == "__main__":
    main()
