"""Every part of the package keeps its budget of lines."""

import budgets


def test_every_part_is_within_its_budget():
    assert budgets.above() == []


def test_a_part_above_its_budget_and_one_without_are_named(tmp_path):
    for name, count in {"small": 3, "large": 12, "new": 1}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text("x = 1\n" * count)
    found = budgets.above({"small": 3, "large": 11}, tmp_path)
    assert found == ["large/ has 12 lines; its budget is 11.", "new/ has 1 lines; its budget is 0."]
