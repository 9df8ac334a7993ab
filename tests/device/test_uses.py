"""Which operations on a block an operation waits for: those that used its bytes."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from gradreduce.device.order.uses import END, MAX_RANGES, DeviceQueue, Use, Uses, counts_of

NBYTES = 40
bytes_used = st.tuples(st.integers(0, NBYTES - 1), st.integers(1, NBYTES))
operations = st.lists(st.tuples(bytes_used, st.integers(0, 2), st.booleans()), max_size=50)
# Each operation cuts a block at two places at most. With more ranges an operation may wait for more
# than it needs.
NUM_EXACT = (MAX_RANGES - 1) // 2


def last_of(uses: list[dict], into: dict) -> dict:
    for use in uses:
        for queue, count in use.items():
            into[queue] = max(count, into.get(queue, 0))
    return into


@given(operations, st.booleans())
def test_an_operation_waits_for_the_last_uses_of_its_bytes(operations, has_failed):
    """Not for reads of a queue that has failed, but these count when memory is freed."""
    mesh_state = SimpleNamespace(failed={2: "for a test"} if has_failed else {})
    home, *_ = queues = [
        DeviceQueue(SimpleNamespace(physical=number, mesh_state=mesh_state), "compute")
        for number in range(3)
    ]
    uses: DeviceQueue | Uses = home
    writes: list[dict] = [{home: 0} for _ in range(NBYTES)]
    reads: list[dict] = [{} for _ in range(NBYTES)]
    for number, ((start, size), place, is_written) in enumerate(operations, 1):
        queue, stop = queues[place], min(start + size, NBYTES)
        expected = last_of(writes[start:stop], {})
        if is_written:
            used = last_of(reads[start:stop], {})
            last_of([{each: used[each] for each in used if not each.has_failed}], expected)
        end = END if stop == NBYTES else stop
        found = counts_of(uses.before(start, end, is_written=is_written))
        uses = uses.after(start, end, Use(queue, number), is_written=is_written)
        queue.submitted = number
        for byte in range(start, stop):
            if is_written:
                writes[byte], reads[byte] = {queue: number}, {}
            else:
                reads[byte][queue] = number
        if uses is home:  # which counts all its work, whatever it uses
            writes, reads = [{home: number} for _ in range(NBYTES)], [{} for _ in range(NBYTES)]
        every = last_of([*writes, *reads], {})
        if number <= NUM_EXACT:
            assert found == expected
            assert uses.counts() == every
        else:
            assert all(found[each] >= count for each, count in expected.items())
            assert all(uses.counts()[each] >= count for each, count in every.items())
