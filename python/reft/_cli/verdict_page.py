"""A verdict as one HTML file: who, where and why on top, who waits for whom, and the stacks of all
ranks as one tree.

The page loads nothing and runs no script. All text of the job is escaped; it may come from
anybody's file names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reft import _voice
from reft._cli import pages
from reft._cli.pages import escape as _text

_MOST_DEPTH = 60
_MOST_OPS = 12
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")


def _named(report: dict[str, Any]) -> list[dict[str, Any]]:
    return list(report.get("culprits") or report.get("candidates") or [])


# -- stacks
# --------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    label: str
    place: str
    library: bool = False
    ranks: set[int] = field(default_factory=set)
    children: dict[tuple[Any, ...], _Node] = field(default_factory=dict)


def stack_tree(ranks: Sequence[dict[str, Any]], main: bool = True) -> _Node:
    """Stacks of all ranks from the outermost call inwards; equal calls of several ranks are one
    node.

    Args:
        ranks: `ranks[]` of a report.
        main: of main threads; else of all others, and of the main threads of processes that ranks
            started, each below its name.
    """
    root = _Node("all stacks", "")
    for entry in ranks:
        rank = entry["rank"]
        root.ranks.add(rank)
        threads = [
            thread for thread in entry.get("threads", []) if bool(thread.get("main")) == main
        ]
        if not main:
            threads += [
                thread | {"name": f"process {child.get('name') or child.get('pid')}"}
                for child in entry.get("children", [])
                for thread in child.get("threads", [])
                if thread.get("main") and thread.get("frames")
            ]
        if not threads and main:
            why = "process is gone" if not entry.get("alive") else "no stack"
            root.children.setdefault((why,), _Node(why, str(entry.get("error", "")))).ranks.add(
                rank
            )
        for thread in threads:
            node = root
            frames = list(reversed(thread.get("frames", [])))
            keys = [(frame["file"], frame["function"], frame["line"]) for frame in frames]
            if not main:
                keys.insert(0, ("", thread.get("name") or "thread", 0))
            for file, function, line in keys[:_MOST_DEPTH]:
                place = f"{file.rsplit('/', 1)[-1]}:{line or '?'}" if file else ""
                library = any(part in file for part in _LIBRARIES)
                node = node.children.setdefault(
                    (file, function, line), _Node(function, place, library)
                )
                node.ranks.add(rank)
    return root


def _tree_html(node: _Node, bad: set[int]) -> str:
    """One node and what is below it; the width is the number of ranks."""
    out = []
    todo: list[_Node | str] = [node]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            out.append(item)
            continue
        kind = "bad" if item.ranks <= bad else "" if item.ranks & bad else "wait"
        who = _voice.ranks(item.ranks)
        tip = f"{item.label}\n{item.place}\n{who}"
        out.append(
            f'<div class="node {kind}" style="flex-grow:{len(item.ranks)}"><div class="frame{" lib" if item.library else ""}"'
            f' title="{_text(tip)}"><b>{_text(item.label)}</b><span>{_text(" · ".join(filter(None, (who, item.place))))}</span></div><div class="row">'
        )
        todo.append("</div></div>")
        below: list[_Node] = sorted(item.children.values(), key=lambda child: -min(child.ranks))
        todo += below
    return "".join(out)


# -- who waits for whom
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wait:
    """Ranks that are held in one op, and those who have not begun their part of it."""

    op: str
    held: tuple[int, ...]
    missing: tuple[int, ...]
    unseen: int  # members whose ranks are not in the report


def held_ops(entry: dict[str, Any], victims: Sequence[int]) -> list[dict[str, Any]]:
    """The ops that a rank is in the call or the wait of.

    If there is none although the verdict lists the rank as waiting, the oldest open op: DDP waits
    for the futures of its ops at the end of backward, and does not call `wait()`.
    """
    pending = [op for op in entry.get("pending", []) if op["op"] != "step"]
    held = [op for op in pending if op["phase"] in ("waiting", "in the call")]
    return held or (pending[:1] if entry["rank"] in victims else [])


def waits(report: dict[str, Any]) -> list[Wait]:
    """Which rank waits for which, by `ranks[]` of a report; `missing` empty: all have begun."""
    members: dict[str, dict[int, int]] = defaultdict(dict)  # group → rank in it → rank
    sizes: dict[str, int] = {}
    begun: dict[tuple[str, int], int] = {}  # newest collective that a rank has begun
    for entry in report["ranks"]:
        for group in entry.get("groups", []):
            members[group["name"]][group["rank"]] = entry["rank"]
            sizes[group["name"]] = group["size"]
        for op in entry.get("tail", []):
            if op["op"] not in ("send", "recv", "recv_anysource", "step"):
                of = (op["group"], entry["rank"])
                begun[of] = max(begun.get(of, -1), op["seq"])
    key: tuple[Any, ...]
    held: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    missing: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    unseen: dict[tuple[Any, ...], int] = {}
    for entry in report["ranks"]:
        if not entry.get("alive"):
            continue
        for op in held_ops(entry, report.get("victims", [])):
            group = op["group"]
            if op["op"] in ("send", "recv"):
                key = (op["op"], group, op["tag"], op["peer"], entry["rank"])
                peer = members[group].get(op["peer"])
                missing[key] |= set() if peer is None else {peer}
                unseen[key] = int(peer is None)
            else:
                key = (op["op"], group, op["seq"])
                known = members[group].values()
                missing[key] |= {rank for rank in known if begun.get((group, rank), -1) < op["seq"]}
                unseen[key] = max(0, sizes.get(group, 0) - len(members[group]))
            held[key].add(entry["rank"])
    result = []
    for key, ranks in held.items():
        name = f"{key[0]} tag {key[2]}" if len(key) == 5 else f"{key[0]} seq {key[2]}"
        result.append(
            Wait(
                f"{name} of group {key[1]}",
                tuple(sorted(ranks)),
                tuple(sorted(missing[key])),
                unseen[key],
            )
        )
    return sorted(result, key=lambda wait: (-len(wait.held), wait.op))


def _classes(found: Sequence[Wait]) -> dict[tuple[int, ...], tuple[list[int], list[int]]]:
    """Ranks with the same role, and the ops (by index) that they are held in and missing from."""
    roles: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for index, wait in enumerate(found):
        for rank in wait.held:
            roles[rank][0].append(index)
        for rank in wait.missing:
            roles[rank][1].append(index)
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, (held, missing) in sorted(roles.items()):
        alike[tuple(held), tuple(missing)].append(rank)
    return {tuple(ranks): (list(role[0]), list(role[1])) for role, ranks in alike.items()}


def _graph_svg(report: dict[str, Any], bad: set[int]) -> str:
    """Boxes in columns: a rank that waits is left of what it waits for."""
    found = waits(report)
    left_out = len(found) - _MOST_OPS
    found = found[:_MOST_OPS]
    if not found:
        return '<p class="soft">No rank is held in an op.</p>'
    labels: list[tuple[str, str, str]] = []  # first line, second line, class
    edges: list[tuple[int, int]] = []
    for wait in found:
        who = _voice.ranks(wait.missing)
        needed = (
            "all have begun it"
            if not wait.missing
            else f"not begun by {who}"
            if " seq " in wait.op
            else f"with {who}"
        )
        labels.append((wait.op, needed, ""))
    for ranks, (held, missing) in _classes(found).items():
        kind = "bad" if set(ranks) <= bad else "wait" if held and not set(ranks) & bad else ""
        box = len(labels)
        labels.append((_voice.ranks(ranks), "waits" if held else "does not wait", kind))
        edges += [(box, op) for op in held] + [(op, box) for op in missing]
    for index, wait in enumerate(found):
        if wait.unseen:
            labels.append((f"{wait.unseen} ranks elsewhere", "not in this report", ""))
            edges.append((index, len(labels) - 1))
    # The longest way to an end is the column from the right; a circle stops growing after as many
    # rounds as there are boxes.
    column = [0] * len(labels)
    for _ in range(min(len(labels), 24)):
        for start, end in edges:
            if column[start] <= column[end] < len(labels) - 1:
                column[start] = column[end] + 1
    used = sorted(set(column), reverse=True)
    rows: dict[int, int] = defaultdict(int)
    clipped = [
        tuple(line if len(line) <= 40 else line[:39] + "…" for line in label[:2])
        for label in labels
    ]
    widths = {
        c: max(len(line) for i in range(len(labels)) if column[i] == c for line in clipped[i]) * 7.4
        + 24
        for c in used
    }
    lefts, x = {}, 4.0
    for c in used:
        lefts[c] = x
        x += widths[c] + 70
    # From right to left, each box at the mean height of what it leads to: fewer edges cross.
    row = [0.0] * len(labels)
    for c in reversed(used):
        boxes = [i for i in range(len(labels)) if column[i] == c]
        ends = {
            i: [row[end] for start, end in edges if start == i and column[end] < c] for i in boxes
        }
        boxes.sort(key=lambda i: (sum(ends[i]) / len(ends[i]) if ends[i] else 0.0, i))
        rows[c] = len(boxes)
        for place, i in enumerate(boxes):
            row[i] = place - (len(boxes) - 1) / 2
    tallest = max(rows.values())
    at = [
        (int(lefts[column[i]]), int(6 + 62 * (row[i] + (tallest - 1) / 2)))
        for i in range(len(labels))
    ]
    width, height = int(x - 62), 6 + 62 * tallest
    out = [
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="who waits for whom">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>'
    ]
    for start, end in edges:
        x1, y1 = at[start][0] + widths[column[start]], at[start][1] + 23
        x2, y2 = at[end][0], at[end][1] + 23
        bend = 35 if x2 > x1 else 90
        out.append(
            f'<path marker-end="url(#tip)" d="M{x1:.0f} {y1}C{x1 + bend:.0f} {y1} {x2 - bend} {y2} {x2} {y2}"/>'
        )
    for i, (_, _, kind) in enumerate(labels):
        left, top = at[i]
        out.append(
            f'<g class="{kind}"><title>{_text(labels[i][0])}\n{_text(labels[i][1])}</title>'
            f'<rect x="{left}" y="{top}" width="{widths[column[i]]:.0f}" height="46" rx="5"/>'
            f'<text x="{left + 12}" y="{top + 20}">{_text(clipped[i][0])}</text>'
            f'<text class="soft" x="{left + 12}" y="{top + 37}">{_text(clipped[i][1])}</text></g>'
        )
    out.append("</svg>")
    if left_out > 0:
        out.append(f'<p class="soft">and {left_out} more ops</p>')
    return "".join(out)


# -- the page
# --------------------------------------------------------------------------------------------------


def _head(report: dict[str, Any]) -> str:
    state, sure = report["state"], report["confidence"]
    out = [
        f'<h1>{_text(report["job"])}: {_text(state)} <span class="badge {"hang" if state in ("hang", "crash") else ""}">'
        f'{_text(report["class"])}</span> <span class="badge">{_text(sure)}</span></h1>'
    ]
    facts = [f"{len(report['ranks'])} of {report['world']} ranks, node {report['node']}"]
    if report["detected_after_sec"] > 0:
        facts.append(f"no progress for {report['detected_after_sec']:.1f} s")
    if report["op"]:
        facts.append(f"most wait in {report['op']} seq {report['seq']} of group {report['group']}")
    out.append(f'<div class="soft">{_text(" · ".join(facts))}</div>')
    named = bool(report["culprits"])
    for one in _named(report)[:16]:
        frame = one.get("frame")
        where = f"{frame['file']}:{frame['line']} in {frame['function']}" if frame else "unknown"
        title = f"rank {one['rank']}" + ("" if named else ", possibly")
        out.append(
            f'<div class="card {"bad" if named else ""}"><p><span class="key">who</span><b>{_text(title)}</b>'
            f' <span class="soft">pid {_text(one["pid"])} on {_text(one["host"] or "?")}</span></p>'
            f'<p><span class="key">where</span><code>{_text(where)}</code></p>'
            f'<p><span class="key">why</span>{_text(one["reason"])}: {_text(one["text"])}</p></div>'
        )
    if not _named(report):
        out.append('<div class="card"><p>The evidence names no rank.</p></div>')
    out.append('<div class="card">')
    if report["victims"]:
        they = "followed" if state == "crash" else "waiting"
        out.append(
            f'<p><span class="key">{they}</span>{_text(_voice.ranks(report["victims"]))}</p>'
        )
    if report.get("remedy", "none") != "none":
        out.append(f'<p><span class="key">class</span>{_text(report["remedy"])}</p>')
    out.append(f'<p><span class="key">next</span><b>{_text(report["advice"])}</b></p></div>')
    sentences = [*report["evidence"], *(found["text"] for found in report["disagreements"])]
    if sentences:
        out.append(
            "<h2>Evidence</h2><ul>"
            + "".join(f"<li>{_text(sentence).replace(chr(10), '<br>')}</li>" for sentence in sentences)
            + "</ul>"
        )
    return "".join(out)


def _ranks_html(report: dict[str, Any], bad: set[int]) -> str:
    rows = []
    for entry in report["ranks"]:
        held = held_ops(entry, report.get("victims", []))
        place = "; ".join(
            f"{op['op']} seq {op['seq']} of {op['group']}, {op['age_sec']:.1f} s"
            + (f", {op['call_site']}" if op.get("call_site") else "")
            for op in held[:2]
        )
        state = "gone" if not entry["alive"] else entry["proc_state"] or "?"
        mark = ' style="color:var(--bad)"' if entry["rank"] in bad else ""
        cells = (
            entry["rank"],
            entry["pid"],
            entry["host"],
            state,
            entry["step"],
            place or "in no op",
            entry["error"],
        )
        rows.append(f"<tr{mark}>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    titles = ("rank", "pid", "host", "state", "step", "held in", "problem")
    return (
        "<table><tr>"
        + "".join(f"<th>{title}</th>" for title in titles)
        + "</tr>"
        + "".join(rows)
        + "</table>"
    )


def page(report: dict[str, Any]) -> str:
    """The whole HTML file for one report (docs/hang.md lists its fields)."""
    ranks = report["ranks"]
    bad = {one["rank"] for one in _named(report)}
    others = stack_tree(ranks, main=False)
    below = ""
    if others.children:
        below = (
            '<details><summary><h2 style="display:inline-block">Other threads and processes</h2>'
            f'</summary><div class="scroll">{_tree_html(others, bad)}</div></details>'
        )
    return pages.fill(
        "verdict",
        f"{report['job']}: {report['state']}, {report['class']}",
        head=_head(report),
        graph=_graph_svg(report, bad),
        stacks=_tree_html(stack_tree(ranks), bad),
        others=below,
        ranks=_ranks_html(report, bad),
        text=_text(report["text"]),
    )
