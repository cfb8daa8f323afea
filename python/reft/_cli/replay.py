"""`reft replay`: recomputes a hang verdict from a saved report."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import click

from reft._cli import agents, native, verdict_page, words
from reft._link import bounded_json

_MOST_BYTES = 256 << 20
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


def read(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The reports in a file: of one agent (`verdicts/<number>-<time>.json`), or (then also True)
    of all (`reft stack --json`).

    Raises:
        Failure: the file cannot be read, is cut off, or holds no report of this version.
    """
    content = _content(path)
    try:
        value = bounded_json.loads(content, limit=_MOST_BYTES)
    except ValueError as error:
        raise agents.Failure(_no_json(path, content, error), agents.EXIT_WRONG) from error
    of_many = isinstance(value, dict) and isinstance(value.get("agents"), list)
    reports = value["agents"] if of_many else [value]
    if not reports:
        raise agents.Failure(f"{path} contains no report", agents.EXIT_WRONG)
    for report in reports:
        _check(path, report)
    return reports, of_many


def _content(path: Path) -> bytes:
    try:
        # O_NONBLOCK: a pipe without a writer does not block.
        with open(path, "rb", opener=lambda at, flags: os.open(at, flags | os.O_NONBLOCK)) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise agents.Failure(f"{path} is no regular file", agents.EXIT_WRONG)
            content = file.read(_MOST_BYTES + 1) if info.st_size <= _MOST_BYTES else b""
    except OSError as error:
        raise agents.Failure(
            f"cannot read {path}: {error.strerror}", agents.EXIT_NOTHING
        ) from error
    if max(info.st_size, len(content)) > _MOST_BYTES:
        raise agents.Failure(
            f"{path} is larger than any report ({words.size(_MOST_BYTES)})", agents.EXIT_WRONG
        )
    return content


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
            f"{path} is not a hang report; hang reports are"
            " $REFT_RUN_DIR/<job>/node-<n>/verdicts/<number>-<time>.json",
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
    native.need()

    from reft import _C

    written, of_many = read(evidence)
    try:
        replayed = [again(report) for report in written]
    except (_C.Corruption, ValueError) as error:  # Python's parser accepts NaN, for example
        raise agents.Failure(f"{evidence} is damaged: {error}", agents.EXIT_WRONG) from error
    if as_json:
        agents.print_json({"agents": replayed} if of_many else replayed[0])
    else:
        words.echo("\n".join(report["screen"].rstrip("\n") for report in replayed))
    if html_path is not None:
        _write_pages(html_path, replayed)
    changed = [
        f"{field} was {json.dumps(old.get(field))} and is {json.dumps(new.get(field))}"
        for old, new in zip(written, replayed, strict=True)
        for field in _DECIDED
        if old.get(field) != new.get(field)
    ]
    if changed:
        words.echo(
            "reft: the verdict differs from the one in the file: " + "; ".join(changed)[:1000],
            err=True,
        )
        raise SystemExit(agents.EXIT_WRONG)
