"""Faults that can be planted in our own source, and the test that must fail for each.

Every ``*.toml`` here is a part of one table. An entry is one change of one file::

    [[fault]]
    name = "a copy waits for its source only"
    file = "src/gradreduce/device/device.py"
    old = "for end in (src, dst):"
    new = "for end in (src,):"
    test = "tests/device/test_order.py::test_a_program_has_the_values_of_its_order"
    says = "expected"

``old`` occurs in ``file`` exactly once (``test_table.py``, in every run). With ``new`` in its place
``test`` fails, and what it prints contains ``says``, which may be left out. A key at the top of a
``*.toml`` is the default for its entries.

``PYTHONPATH=tests python -m planted_faults all`` plants them one by one; CI plants a sample.

To add a fault, write its entry and run ``PYTHONPATH=tests python -m planted_faults "its name"``.
If no test fails for it, write one or delete the code: the table has only faults that are found.

Failures that a test causes while it runs (a launch that raises, a stuck queue) are not listed: they
are inputs of that test.
"""
