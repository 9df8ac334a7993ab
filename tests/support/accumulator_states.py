"""Helpers for tests of accumulator checkpoints."""

EMPTY = {
    "format": "gradreduce dense accumulator 1",
    "dtype": "float16",
    "reduction_type": "SUM",
    "shape": [None, 2],
    "global_step": 0,
    "num_accumulated": 0,
    "num_dropped": 0,
    "sum_shape": None,
    "kind": None,
    "partial_sums": [None],
}
EMPTY_SPARSE = EMPTY | {"format": "gradreduce sparse accumulator 1", "sparse_mean": "per_row"}


def frozen(acc):
    """The whole state of an accumulator, in a form that compares with ``==``."""
    state = acc.state_dict()
    return state, [_bits(total) for total in state.pop("partial_sums")]


def _bits(total):
    if isinstance(total, dict):
        return {key: _bits(array) for key, array in total.items()}
    return total if total is None else (str(total.dtype), total.shape, total.tobytes())


def check_refused(acc, state, error, text):
    before = frozen(acc)
    with acc.accumulator_ref.devices[0].mesh.journal() as journal:
        try:
            acc.load_state_dict(state)
        except Exception as raised:  # not stored: its traceback would keep the accumulator's memory
            found = type(raised), str(raised.args[0])
        else:
            found = None, ""
    assert found[0] is error, found
    assert text in found[1]
    assert journal.records == []
    assert frozen(acc) == before
