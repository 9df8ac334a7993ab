"""The table: every entry of every ``*.toml`` beside this file."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Fault", "read_table"]

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent


@dataclass(frozen=True)
class Fault:
    """One change of one file, and the test that fails for it.

    Attributes:
        name: what the fault is; unique.
        file: path in the repository.
        old: text that occurs in the file exactly once.
        new: the text that replaces it.
        test: pytest's node id; its first failure counts.
        says: text that the failure prints.
        needs: a package without which the test is skipped; then the fault is not planted.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    says: str = ""
    needs: str = ""

    def planted(self, root: Path) -> str:
        """The text of the file with the fault in it.

        Raises:
            ValueError: the old text is not there exactly once, or nothing changes.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.name}: {self.file} contains the old text {count} times, expected once: "
                f"{self.old!r}. Update the entry in tests/planted_faults/."
            )
        if self.old == self.new:
            raise ValueError(f"{self.name}: old and new are the same")
        return text.replace(self.old, self.new)


def read_table() -> list[Fault]:
    """All faults, in the order of the files.

    Raises:
        TypeError: an entry lacks a field, or has one that is not of ``Fault``.
    """
    faults = []
    for path in sorted(FOLDER.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = content.pop("fault")
        faults += [Fault(**(content | entry)) for entry in entries]
    return faults
