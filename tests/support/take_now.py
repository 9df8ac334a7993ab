"""Takes without waiting, as a ``SyncStep`` does, with the results of ``take_grads``."""

from gradreduce.accumulator.multi import _results_of, reduce_now
from gradreduce.accumulator.take_queue import take_sums


def take_now(accumulators, num_required):
    """Returns a gradient of each accumulator, or None for an empty one; None if it cannot take."""
    states = [each.accumulator_ref for each in accumulators]
    taken = reduce_now(states, num_required, take_sums)
    if taken is None:
        return None
    return [_results_of([each], taken, None)[0] if each in taken else None for each in states]
