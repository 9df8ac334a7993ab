"""Error messages change on purpose alone."""

from support import golden_files


def test_messages_are_those_of_the_file():
    golden_files.check("error_messages.txt")
