"""Error messages change on purpose alone."""

import ast

from support import golden_files


def test_messages_are_those_of_the_file():
    golden_files.check("error_messages.txt")


def test_fields_and_parts_of_a_message_are_one_line():
    tree = ast.parse(
        "def check(value):\n"
        "    if value:\n"
        "        raise ValueError(f'value={value!r} must be ' 'positive' + why)\n"
        "    error = errors.CancelledError('closed')\n"
        "    raise about('value', error) from None\n"
        "    raise error\n"
        "    raise OSError(value)\n"
    )
    assert sorted(golden_files.messages_of(tree)) == [
        "ValueError: value={…} must be positive{…}",
        "about: value, {…}",
        "errors.CancelledError: closed",
    ]
