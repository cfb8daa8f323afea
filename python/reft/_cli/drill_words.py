"""The report of a drill as text: what was compared, killed and measured, then the result.

Threads: any. Errors: none.
"""

from __future__ import annotations

from typing import Any

from rich.text import Text

from reft import _voice
from reft._cli import drill_verdict, words
from reft._cli.drill_verdict import Finding

_SHOWN = 5  # differences on the terminal
_SHOWN_HARMLESS = 2
_REMEDY = {
    drill_verdict.INPUT: "the order of the data is not restored",
    drill_verdict.DATA: "the order of the data is not restored",
    drill_verdict.RANDOM: "random state is not restored",
}


def print_report(report: dict[str, Any]) -> None:
    """Prints a report, which `--json` would print as it is, as text. The result comes last, so that
    a small terminal still shows it."""
    console = words.console()
    console.print()
    for name, text in _rows(report):
        words.print_folded(console, Text(f"  {name:<13}", style="bold"), Text(text))
    console.print()
    if report["unsteady"]:
        _print_unsteady(console, report)
    head, style = _headline(report)
    words.print_folded(console, Text(""), Text(head, style=style))
    for line in report["reason"].splitlines()[1:]:
        console.print(Text(line), soft_wrap=True)
    _print_findings(console, report["differences"], _SHOWN)
    if report["outcome"] != drill_verdict.EXACT:
        _print_named(console, report)


def _print_unsteady(console: Any, report: dict[str, Any]) -> None:
    """What differs between undisturbed runs: all of it where it is the result, else a few."""
    found, most = report["unsteady"], _SHOWN_HARMLESS
    text = "Other values in each undisturbed run, without effect on training:"
    if report["outcome"] == drill_verdict.NOT_DETERMINISTIC:
        text, most = "Undisturbed runs differ from each other:", _SHOWN
    elif report["differences"]:
        text = f"{_voice.plural(len(found), 'value')} differ in each undisturbed run (--json)"
        most = 0
    words.print_folded(console, Text(""), Text(text))
    if most:
        _print_findings(console, found, most)
    console.print()


def _headline(report: dict[str, Any]) -> tuple[str, str]:
    compared = report["compared"]
    first, last = compared["first_step"], compared["last_step"]
    ranks = _voice.plural(report["ranks"], "rank")
    match report["outcome"]:
        case drill_verdict.EXACT:
            return (
                f"EXACT: after the resume, steps {first} to {last} of {ranks} are bit-identical to"
                " the undisturbed run.",
                "bold green",
            )
        case drill_verdict.NOT_RESUMED:
            return f"NOT RESUMED: {report['reason'].splitlines()[0]}", "bold red"
        case drill_verdict.NOT_DETERMINISTIC:
            return (
                "NOT DETERMINISTIC: the script trains differently in each undisturbed run, so no"
                " comparison can decide whether it resumes exactly. The resume restored the values"
                " that the killed run had.",
                "bold yellow",
            )
    if not report["differences"]:
        return f"NOT EXACT: {report['reason']}", "bold red"
    found = report["differences"]
    if report["trained_alike"]:
        return (
            f"NOT EXACT, without effect so far: tensors and inputs of steps {first} to {last} are"
            " bit-identical to the undisturbed run, but these values differ.",
            "bold yellow",
        )
    if any(one["restored"] for one in found):
        text = "NOT EXACT: the resume has not restored everything"
    else:
        step = min(one["step"] for one in found)
        text = f"NOT EXACT: from step {step} on, the resumed run differs from the undisturbed one"
    first = min(one["step"] for one in found)
    kinds = {one["kind"] for one in found if one["step"] == first}
    remedy = next((text for kind, text in _REMEDY.items() if kind in kinds), "")
    return text + (f": {remedy}" if remedy else "") + ".", "bold red"


def _print_findings(console: Any, found: list[dict[str, Any]], most: int) -> None:
    """The first ones, and all tensors together."""
    tensors = [one for one in found if one["kind"] == drill_verdict.TENSOR]
    others = [one for one in found if one["kind"] != drill_verdict.TENSOR]
    for one in others[:most]:
        when = "at the resume" if one["restored"] else f"step {one['step']}"
        text = f"{one['where']}, {when}, {_voice.ranks(one['ranks'])}: {one['why']}"
        words.print_folded(console, Text(f"  {one['kind']:<13}"), Text(text))
    if len(others) > most:
        console.print(Text(f"  {'':<13}and {len(others) - most} more, which --json lists"))
    if tensors:
        most_different = drill_verdict.most_different(Finding(**one) for one in tensors)
        assert most_different is not None
        text = f"{_voice.plural(len(tensors), 'tensor')}, from step {tensors[0]['step']} on"
        text += f"; most in the end {most_different.where}: {most_different.at_end}"
        words.print_folded(console, Text(f"  {'tensor':<13}"), Text(text))


def _print_named(console: Any, report: dict[str, Any]) -> None:
    """What reft itself has reported."""
    if report["messages"]:
        console.print()
        console.print(Text("Messages of reft:"))
        for text in report["messages"][:3]:
            words.print_folded(console, Text("  "), Text(text))
    if report["differences"] and not report["not_restorable"]:
        console.print()
        text = (
            "reft has not reported this gap. Keep the state in a plain variable, or register it:"
            " reft.register(name, object)."
        )
        words.print_folded(console, Text(""), Text(text))


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    compared, cost = report["compared"], report["cost"]
    rows = [
        (
            "compared",
            f"{_voice.plural(compared['tensors'], 'tensor')}"
            f" ({_voice.size(compared['state_bytes'])}) per rank, random state, variables,"
            " positions, "
            + (
                f"inputs of {_voice.plural(compared['model_calls'], 'model call')} a step"
                if compared["model_calls"]
                else "no input of models, as the script calls none"
            ),
        )
    ]
    for kill in report["kills"]:
        text = f"rank {kill['rank']}, in step {kill['step']}"
        if kill["resumed_at"] is not None:
            text += f": resumed at step {kill['resumed_at']}"
            text += f", {_voice.plural(kill['lost'], 'step')} lost"
        if kill["seconds"] is not None:
            text += f", {kill['seconds']:.1f} s to the first new step"
        rows.append(("killed", text))
    if cost is not None:
        share = 100 * cost["snapshot_sec"] / cost["step_sec"] if cost["step_sec"] else 0.0
        rows.append(
            (
                "cost",
                f"{words.nanoseconds(1e9 * cost['snapshot_sec'])} of a"
                f" {words.nanoseconds(1e9 * cost['step_sec'])} step ({share:.1f} %) on the training"
                f" thread; {_voice.size(cost['bytes'])} copied in the background per rank",
            )
        )
    else:
        rows.append(("cost", "not measured: the script ends too soon after the compared steps"))
    rows.append(("a lost node", report["lost_node"]["text"]))
    rows.append(("time", f"{report['seconds']:.0f} s, seed {report['seed']}"))
    return rows
