"""The page of rules is what the planner says today, and its verdicts follow from figures."""

from pathlib import Path

from poise import rules_of_thumb

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_planner_says():
    assert (ROOT / rules_of_thumb.PAGE).read_text() == rules_of_thumb.page(), (
        "run python -m poise.rules_of_thumb > docs/rules_of_thumb.md"
    )


def test_every_rule_has_a_figure_and_a_verdict():
    found = list(rules_of_thumb.rules())
    assert len(found) >= 11
    for rule in found:
        assert rule.said and rule.found and rule.why
        assert rule.verdict in ("right", "wrong", "depends", "not the planner's")
    said = " ".join(rule.said for rule in found)
    for part in ("4 + 2 + 12", "28 + 14 + 84", "30%", "sqrt", "30 to 40%", "ZeRO-2", "ZeRO-3",
                 "8 x A100", "4 to 16", "square root", "min(2 epoch, 8)"):  # fmt: skip
        assert part in said
