"""Faults that were once planted in our own source, and the test that fails for each.

Every ``*.toml`` here is a part of one table. An entry is one change of one file::

    [[fault]]
    name = "a copy waits for its source only"
    file = "src/gradreduce/device/base.py"
    old = "for end in (src, dst):"
    new = "for end in (src,):"
    test = "tests/cuda/test_programs.py::test_a_program_has_no_fault"
    says = "unordered"

``old`` occurs in ``file`` exactly once (``test_table.py``, in every run). With ``new`` in its place
``test`` fails, and what it prints contains ``says``, which may be left out. What stands at the top
of a ``*.toml`` holds for each of its entries that does not say otherwise.

``PYTHONPATH=tests python -m planted_faults all`` plants them one by one; CI plants a sample. To add
one: write the entry, then ``PYTHONPATH=tests python -m planted_faults "its name"``. A test fails
without a fault too, and a fault that no test fails for is code that can go: no entry for these.
Failures that a test brings about while it runs (an exception out of a launch, a stuck queue) belong
to that test and are not listed.
"""
