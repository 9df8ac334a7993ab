"""What tests of examples share: their modules, their options, and what they print."""

import gc
import importlib


def load_example(name):
    module = importlib.import_module(name)
    gc.freeze()  # the libraries that it imports stay; each gc.collect() would search them
    return module


def options_of(script, *flags):
    return script.read_options(script.make_parser(), ["--backend", "sim", *flags])


def train(script, digits, *flags):
    """A short training without the report."""
    options = options_of(script, *flags)
    with importlib.import_module("command_line").open_devices(options) as mesh:
        return script.train(mesh, digits, options)


def cells(text):
    """The cells of all tables."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def rows_of(text):
    """The first two cells of the rows of all tables, as names and values."""
    return {row[0]: row[1] for row in cells(text)}


def is_picture(path):
    data = path.read_bytes()
    return data.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in data[-12:] and len(data) > 5000
