"""`reft replay`: recomputes a hang verdict from a saved report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from reft._cli import agents, verdict_page

_MOST_BYTES = 1 << 30
# What makes two verdicts the same for whoever reads them.
_DECIDED = (
    "state",
    "class",
    "pattern",
    "confidence",
    "culprits",
    "candidates",
    "victims",
    "group",
    "op",
    "seq",
)


def read(path: Path) -> list[dict[str, Any]]:
    """The reports in a file: of one agent (`verdicts/<time>.json`), or of all (`reft stack
    --json`).

    Raises:
        Failure: the file cannot be read, is cut off, or holds no report of this version.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise agents.Failure(
                f"{path} is larger than any report ({_MOST_BYTES >> 30} GiB)", agents.EXIT_WRONG
            )
        content = path.read_bytes()
    except OSError as error:
        raise agents.Failure(
            f"cannot read {path}: {error.strerror}", agents.EXIT_NOTHING
        ) from error
    try:
        value = json.loads(content)
    except RecursionError:
        value = None
    except ValueError as error:
        raise agents.Failure(_no_json(path, content, error), agents.EXIT_WRONG) from error
    reports = (
        value["agents"]
        if isinstance(value, dict) and isinstance(value.get("agents"), list)
        else [value]
    )
    if not reports:
        raise agents.Failure(f"{path} contains no report", agents.EXIT_WRONG)
    for report in reports:
        _check(path, report)
    return reports


def _no_json(path: Path, content: bytes, error: ValueError) -> str:
    beside = path.with_suffix(".json")
    if path.suffix == ".txt" and beside.exists():
        return f"{path} is the text of a report; its evidence is in {beside}"
    # For a string that does not end, the parser reports where it begins.
    in_a_string = str(error).startswith("Unterminated string")
    at = error.pos if isinstance(error, json.JSONDecodeError) else 0
    if content.lstrip()[:1] == b"{" and (in_a_string or at >= len(content.rstrip()) - 8):
        return f"{path} is cut off: it ends after {len(content)} bytes in the middle of the report"
    return f"{path} is not a hang report: no JSON ({error})"


def _check(path: Path, report: Any) -> None:
    from reft import _C

    if not isinstance(report, dict) or report.get("report") != "hang":
        raise agents.Failure(
            f"{path} is not a hang report; hang reports are $REFT_RUN_DIR/<job>/node-<n>/verdicts/<time>.json",
            agents.EXIT_WRONG,
        )
    version = report.get("version")
    if type(version) is not int or version != _C.verdict_version:
        raise agents.Failure(
            f"{path} is a hang report of version {version!r}; this reft reads version {_C.verdict_version}",
            agents.EXIT_WRONG,
        )
    if not isinstance(report.get("ranks"), list):
        raise agents.Failure(
            f"{path} contains a verdict without evidence (ranks[])", agents.EXIT_WRONG
        )
    if not all(isinstance(rank, dict) for rank in report["ranks"]):
        raise agents.Failure(
            f"{path} is damaged: ranks[] has an entry that is not a rank", agents.EXIT_WRONG
        )


def again(report: dict[str, Any]) -> dict[str, Any]:
    """The report that this version makes of the evidence in `report`."""
    from reft import _C

    result: dict[str, Any] = json.loads(_C.replay_verdict(json.dumps(report).encode()))
    return result


def _write_pages(path: Path, reports: list[dict[str, Any]]) -> None:
    """Writes the first to `path`, others to `path` with their node before the suffix."""
    for number, report in enumerate(reports):
        target = (
            path
            if number == 0
            else path.with_name(f"{path.stem}.node-{report['node']}{path.suffix}")
        )
        agents.write_file(target, verdict_page.page(report))


@click.command("replay")
@click.argument("evidence", type=click.Path(path_type=Path))
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the report as JSON instead of one screen of text.",
)
@click.option(
    "--html",
    "html_path",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="Write the report as a page for a browser.",
)
def command(evidence: Path, as_json: bool, html_path: Path | None) -> None:
    """Recomputes a hang verdict from a saved report.

    EVIDENCE is a report that an agent wrote, or the output of `reft stack --json`. The command
    reads only that file, so it works on any machine and long after the job. Exit code 1 if the
    file is not a report, or if the new verdict differs from the one in the file: another version
    of reft wrote the file, or the file was edited. --json prints the new report, or
    {"agents": [...]} if EVIDENCE has that form. --html writes one file that loads nothing.
    """
    import torch  # noqa: F401  (the native module needs its libraries)

    from reft import _C

    written = read(evidence)
    try:
        replayed = [again(report) for report in written]
    except (_C.Corruption, ValueError) as error:  # Python's parser accepts NaN, for example
        raise agents.Failure(f"{evidence} is damaged: {error}", agents.EXIT_WRONG) from error
    if as_json:
        whole = len(replayed) == 1 and "agents" not in json.loads(evidence.read_bytes())
        agents.print_json(replayed[0] if whole else {"agents": replayed})
    else:
        click.echo("\n".join(report["screen"].rstrip("\n") for report in replayed))
    if html_path is not None:
        _write_pages(html_path, replayed)
    changed = [
        f"{field} was {json.dumps(old.get(field))} and is {json.dumps(new.get(field))}"
        for old, new in zip(written, replayed, strict=True)
        for field in _DECIDED
        if old.get(field) != new.get(field)
    ]
    if changed:
        click.echo(
            "reft: the verdict differs from the one in the file: " + "; ".join(changed)[:1000],
            err=True,
        )
        raise SystemExit(agents.EXIT_WRONG)
