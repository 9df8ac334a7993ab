"""Arithmetic on one device: per kernel a launcher and its NumPy reference."""

from __future__ import annotations

from .accumulate_n import ACCUMULATE_N, accumulate_n, add_to_rows
from .add_n import ADD_N, add_into_new, add_n, add_on_host
from .add_words import ADD_WORDS, add_words, as_num_words, canonical_words
from .all_sum import ALL_SUM, all_sum
from .clip import CLIP, clip
from .distance_scale import DISTANCE_SCALE, distance_scale
from .divide import DIVIDE, divide
from .exact_sum import EXACT_SUM, exact_sum
from .pack import PACK, pack, pack_rows, pack_to_rows
from .ranges import Ranges
from .row_index import RowIndex, merge_row_index
from .row_words import (
    add_rows_command,
    negate_zeros,
    segments_for_all_kernels,
    split_rows,
    sum_rows,
)
from .scale import ADD_SCALED, SCALE, add_scaled, scale, scale_rows
from .segment_sum import SEGMENT_SUM, Divisor, segment_sum_command
from .segments import Indices, Segments, concatenate_indices, plan_segments, single_row_segments
from .square_sum import BLOCK, SQUARE_SUM, block_sums, norm_of, num_blocks, square_sum
from .take_rows import TAKE_ROWS, take_rows_command
from .update import RULE_KERNELS, RuleKernel, Update, Variant, update_rows
from .update_rules import RULES, UpdateRule
from .words import NUM_WORDS

KERNELS = (
    ADD_N, ACCUMULATE_N, ALL_SUM, PACK, SCALE, ADD_SCALED, DIVIDE, SEGMENT_SUM, TAKE_ROWS,
    SQUARE_SUM, CLIP, DISTANCE_SCALE, EXACT_SUM, ADD_WORDS, *RULE_KERNELS.values(),
)  # fmt: skip
