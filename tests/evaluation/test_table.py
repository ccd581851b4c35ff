"""The table of before and after: its groups, its explanations, and what it leaves out."""

import torch

from rl_train.evaluation.bootstrap import rows_of
from rl_train.evaluation.table import (
    LOOP1_TITLE,
    LOOP2_TITLE,
    POINTS_TITLE,
    before_after_table,
    main_figures,
)

BEFORE = {
    "seg_intersection": torch.tensor([0.0, 1.0, 1.0]),
    "seg_union": torch.ones(3),
    "seg_iou": torch.tensor([0.0, 1.0, 1.0]),
    "cycle_iou": torch.tensor([0.0, 0.5, 0.25]),
    "caption_words": torch.full((3,), 8.0),
    "caption_distinct": torch.tensor([1.0, 0, 0]),
    "no_seg": torch.zeros(3),
}


def test_rows_have_the_difference_its_interval_and_an_explanation_by_loop():
    after = BEFORE | {"cycle_iou": BEFORE["cycle_iou"] + 0.5, "caption_distinct": torch.ones(3)}
    lines = before_after_table(BEFORE, after | {"mask_whole": torch.ones(3)}).split("\n")
    assert lines[0] == "evaluation split, n = 3: before and after"
    names = [line.split()[0] for line in lines[2:-1] if line.startswith("  ")]
    assert names == ["cycle_iou", "caption_distinct", "seg_iou", "seg_ciou", "seg_p50"]
    assert [line for line in lines[2:-1] if not line.startswith("  ")] == [LOOP1_TITLE, LOOP2_TITLE]
    words = "cycle_iou 0.2500 0.7500 +0.5000 [+0.5000, +0.5000] IoU of a region with the mask"
    assert " ".join(lines[3].split()).startswith(words)
    distinct = " ".join(lines[4].split())
    assert distinct == "caption_distinct 0.3333 1.0000 +0.6667 different captions / regions"
    assert rows_of(BEFORE, "seg_ciou").tolist() == [[0, 1], [1, 1], [1, 1]]


def test_what_is_the_same_on_every_sample_is_named_below():
    """But a metric that differs from sample to sample, or that changed, stays."""
    last = before_after_table(BEFORE, BEFORE).split("\n")[-1]
    assert last == (
        "left out, the same on every sample before and after: caption_words 8, no_seg 0"
    )
    changed = before_after_table(BEFORE, BEFORE | {"no_seg": torch.ones(3)})
    assert "  no_seg " in changed
    one = {name: column[:1] for name, column in BEFORE.items()}
    of_one = before_after_table(one, one)  # of one sample nothing is known
    assert "  caption_words " in of_one and "  no_seg " in of_one and "left out" not in of_one


def test_a_ratio_without_cases_in_some_rows_can_be_constant():
    columns = dict(color_known=torch.tensor([1.0, 0, 1]), color_said=torch.tensor([1.0, 0, 1]))
    columns |= dict(color_right=torch.tensor([1.0, 0, 0]))
    table = before_after_table(columns, columns)
    assert "color_stated 1" in table.split("\n")[-2] and "  color_accuracy " in table


def test_precision_is_left_out_where_it_is_the_accuracy():
    columns = dict(color_known=torch.ones(2), color_said=torch.ones(2))
    columns |= dict(color_right=torch.tensor([1.0, 0]))
    last = before_after_table(columns, columns).split("\n")[-1]
    assert last == "not repeated, equal to the accuracy: color_precision"
    silent = columns | dict(color_said=torch.tensor([1.0, 0]))
    assert "  color_precision " in before_after_table(columns, silent)


def test_masks_of_points_have_a_group_of_their_own():
    values = dict(seg_iou=BEFORE["seg_iou"], parsable=torch.ones(3))
    assert before_after_table(values, values).split("\n")[2] == POINTS_TITLE


def test_main_figures():
    assert main_figures(dict(no_seg=0.0, seg_iou=0.5, cycle_iou=0.25)) == (
        "cycle_iou 0.2500, seg_iou 0.5000"
    )
