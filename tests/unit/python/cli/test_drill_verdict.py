"""What follows from the events of a drill's runs."""

from __future__ import annotations

from typing import Any

from reft._cli import drill_verdict
from reft._cli.drill_verdict import INPUT, RANDOM, TENSOR, VARIABLE, Run, judge

Rows = list[list[Any]]


def step(number: int, attempt: int = 0, rows: Rows | None = None, fed: str = "") -> dict[str, Any]:
    return {
        "event": "step",
        "attempt": attempt,
        "step": number,
        "at": 100.0 * attempt + number,
        "fed": [["Net", "float32 [2]", fed or f"batch {number}"]],
        "differences": rows or [],
    }


def started(world: int = 1) -> dict[str, Any]:
    return {"event": "started", "attempt": 0, "at": 0.0, "world": world}


def undisturbed(last: int = 6, **changed: str) -> Run:
    """`step_4="batch 9"` feeds another batch in step 4."""
    fed = {int(name.removeprefix("step_")): value for name, value in changed.items()}
    return Run({0: [started(), *(step(n, fed=fed.get(n, "")) for n in range(1, last + 1))]})


def killed(
    before: Rows | None = None,
    restored: Rows | None = None,
    after: Rows | None = None,
    fed: str = "",
    last: int = 6,
) -> Run:
    """Rank 0 dies in step 4, and is put back at step 3."""
    return Run(
        {
            0: [
                started(),
                *(step(n, rows=before) for n in range(1, 4)),
                {"event": "kill", "attempt": 0, "step": 4, "at": 3.5},
                {
                    "event": "resumed",
                    "attempt": 1,
                    "step": 3,
                    "at": 103.0,
                    "differences": restored or [],
                },
                *(step(n, 1, after if n == 4 else None, fed) for n in range(4, last + 1)),
            ]
        }
    )


VARIABLE_ROW = [VARIABLE, "main:total", "was 1, is 0", False]
TENSOR_ROW = [TENSOR, "o0.p0", "3 of 8 items differ, max |Δ| 0.5", False]


def test_equal_runs_are_exact() -> None:
    verdict = judge(undisturbed(), killed())
    assert (verdict.outcome, verdict.differences, verdict.unsteady) == (drill_verdict.EXACT, [], [])
    assert verdict.steps == (4, 6)
    assert not drill_verdict.is_repeat_needed(undisturbed(), killed())


def test_a_difference_after_the_resume_is_not_exact() -> None:
    run = killed(after=[TENSOR_ROW, VARIABLE_ROW])
    assert drill_verdict.is_repeat_needed(undisturbed(), run)
    verdict = judge(undisturbed(), run, undisturbed())
    assert verdict.outcome == drill_verdict.NOT_EXACT
    named = [(one.kind, one.where, one.step, one.ranks) for one in verdict.differences]
    assert named == [(VARIABLE, "main:total", 4, (0,)), (TENSOR, "o0.p0", 4, (0,))]


def test_what_was_not_put_back_is_named_first_and_nothing_excuses_it() -> None:
    run = killed(before=[VARIABLE_ROW], restored=[VARIABLE_ROW], after=[TENSOR_ROW])
    verdict = judge(undisturbed(), run, undisturbed())
    assert verdict.outcome == drill_verdict.NOT_EXACT
    assert [(one.where, one.restored) for one in verdict.differences] == [
        ("main:total", True),
        ("o0.p0", False),
    ]


def test_a_batch_of_another_step_is_recognised() -> None:
    verdict = judge(undisturbed(), killed(fed="batch 2"), undisturbed())
    (one,) = verdict.differences
    assert (one.kind, one.where, one.step) == (INPUT, "input of Net", 4)
    assert "step 2 was fed" in one.why


def test_an_input_that_is_not_known_is_not_compared() -> None:
    run = killed()
    for event in run.events[0]:
        if event["event"] == "step" and event["step"] == 4 and event["attempt"] == 1:
            event["fed"] = [["Net", "float32 [2]", ""]]
    assert judge(undisturbed(), run).outcome == drill_verdict.EXACT


def test_a_variable_that_differs_before_the_kill_is_the_script_s_own() -> None:
    run = killed(before=[VARIABLE_ROW], after=[VARIABLE_ROW])
    assert not drill_verdict.is_repeat_needed(undisturbed(), run)
    verdict = judge(undisturbed(), run)
    assert verdict.outcome == drill_verdict.EXACT
    assert [one.where for one in verdict.unsteady] == ["main:total"]


def test_a_generator_that_nobody_seeds_and_nobody_uses_leaves_it_exact() -> None:
    row = [RANDOM, "global['python']", "2500 bytes differ", False]
    assert judge(undisturbed(), killed(before=[row], after=[row])).outcome == drill_verdict.EXACT


def test_a_value_that_the_repeated_run_has_differently_is_the_script_s_own() -> None:
    late = Run({0: [started(), *(step(n, rows=[VARIABLE_ROW] * (n == 5)) for n in range(1, 7))]})
    run = killed(after=[VARIABLE_ROW])
    assert judge(undisturbed(), run, undisturbed()).outcome == drill_verdict.NOT_EXACT
    assert judge(undisturbed(), run, late).outcome == drill_verdict.EXACT


def test_a_script_that_trains_differently_each_time_is_never_exact() -> None:
    for run in (killed(before=[TENSOR_ROW]), killed(before=[TENSOR_ROW], after=[TENSOR_ROW])):
        verdict = judge(undisturbed(), run)
        assert verdict.outcome == drill_verdict.NOT_DETERMINISTIC
        assert [one.where for one in verdict.unsteady] == ["o0.p0"]
    other = judge(undisturbed(), killed(after=[TENSOR_ROW]), undisturbed(step_5="batch 9"))
    assert other.outcome == drill_verdict.NOT_DETERMINISTIC


def test_a_run_that_starts_again_is_not_resumed() -> None:
    events = killed().events[0]
    again = Run({0: [one for one in events if one["event"] != "resumed"]})
    assert not drill_verdict.is_repeat_needed(undisturbed(), again)
    verdict = judge(undisturbed(), again)
    assert verdict.outcome == drill_verdict.NOT_RESUMED and "step 4" in verdict.reason


def test_a_run_that_ends_early_is_not_exact() -> None:
    verdict = judge(undisturbed(), killed(last=5), undisturbed())
    assert verdict.outcome == drill_verdict.NOT_EXACT
    assert verdict.reason == "the run ended after step 5, the undisturbed one after step 6"


def test_a_step_that_was_not_compared_is_not_exact() -> None:
    run = killed()
    run.events[0][-1]["differences"] = None
    verdict = judge(undisturbed(), run, undisturbed())
    assert verdict.outcome == drill_verdict.NOT_EXACT
    assert "step 6" in verdict.reason


def test_findings_of_several_ranks_are_one() -> None:
    one = killed(after=[TENSOR_ROW]).events[0]
    both = Run({0: [started(2), *one[1:]], 1: [started(2), *one[1:]]})
    reference = undisturbed().events[0]
    verdict = judge(Run({0: reference, 1: reference}), both, None)
    assert [(found.where, found.ranks) for found in verdict.differences] == [("o0.p0", (0, 1))]


def test_how_a_value_differs_at_the_end_is_kept() -> None:
    run = killed(after=[TENSOR_ROW])
    run.events[0][-1]["differences"] = [[TENSOR, "o0.p0", "8 of 8 items differ", False]]
    (one,) = judge(undisturbed(), run).differences
    assert (one.why, one.at_end) == (TENSOR_ROW[2], "8 of 8 items differ")


def test_a_kill_costs_what_lies_between_it_and_the_first_new_step() -> None:
    (kill,) = drill_verdict.kills_of(killed())
    assert (kill.rank, kill.step, kill.resumed_at, kill.lost) == (0, 4, 3, 0)
    assert kill.seconds == 104.0 - 3.5


def test_the_cost_of_a_step_is_that_of_the_slowest_rank() -> None:
    def timed(spent_ns: int) -> list[dict[str, Any]]:
        return [
            {"event": "timed", "step": n, "sec": 0.1, "spent_ns": n * spent_ns} for n in range(5)
        ]

    run = Run({0: [started(2), *timed(1_000_000)], 1: [started(2), *timed(3_000_000)]})
    assert drill_verdict.step_cost(run) == (0.1, 0.003)
    assert drill_verdict.step_cost(undisturbed()) is None
