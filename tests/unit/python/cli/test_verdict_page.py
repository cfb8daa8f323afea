"""The HTML page of a verdict: what stands in it, and that nothing of the job gets out of its text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("click")

from reft._cli import verdict_page  # noqa: E402

SITE = "/venv/lib/python3.11/site-packages/torch"


def frame(file: str, line: int, function: str) -> dict[str, Any]:
    return {"file": file, "line": line, "function": function}


def op(name: str, group: str, seq: int, phase: str, peer: int = -1) -> dict[str, Any]:
    return {
        "op": name,
        "group": group,
        "seq": seq,
        "phase": phase,
        "peer": peer,
        "tag": 0,
        "age_sec": 31.0,
        "call_site": "x.py:1 f",
    }


def rank(
    number: int,
    groups: list[tuple[str, int, int]],
    tail: list[dict[str, Any]],
    frames: list[dict[str, Any]],
) -> dict[str, Any]:
    loader = [
        frame(f"{SITE}/utils/data/pin_memory.py", 52, "_pin_memory_loop"),
        frame("/usr/lib/python3.11/threading.py", 982, "run"),
    ]
    return {
        "rank": number, "pid": 4100 + number, "host": "gpu-a17", "alive": True, "proc_state": "S", "step": 411, "error": "",
        "groups": [{"name": name, "rank": own, "size": size} for name, own, size in groups],
        "tail": tail,
        "pending": [entry for entry in tail if entry["phase"] != "done"],
        "threads": [
            {"thread": "0x1", "name": "", "main": True, "truncated": False, "frames": frames},
            {"thread": "0x2", "name": "pin_memory", "main": False, "truncated": False, "frames": loader},
        ],
    }  # fmt: skip


def pipeline() -> dict[str, Any]:
    """Two stages of four ranks: rank 6 loads data, its group waits in a collective, and the first stage for the second."""
    user, ranks = "/home/u/pretrain/train.py", []
    start = [frame(user, 142, "<module>")]
    for number in range(8):
        stage, own = divmod(number, 4)
        groups = (
            [("pp", stage, 2), (f"tp{stage}", own, 4)] if own == 2 else [(f"tp{stage}", own, 4)]
        )
        done = op("all_reduce", f"tp{stage}", 6, "done")
        call = [
            frame(f"{SITE}/distributed/distributed_c10d.py", 2805, "all_reduce"),
            frame(user, 88, "forward"),
        ]
        if number == 6:
            now, call = (
                [],
                [
                    frame(f"{SITE}/utils/data/dataloader.py", 1285, "_try_get_data"),
                    frame(user, 61, "next_batch"),
                ],
            )
        elif number == 2:
            now = [op("recv", "pp", 3, "waiting", 1)]
            call = [
                frame(f"{SITE}/distributed/distributed_c10d.py", 2400, "recv"),
                frame(user, 90, "backward"),
            ]
        else:
            now = [op("all_reduce", f"tp{stage}", 7, "waiting")]
        ranks.append(rank(number, groups, [done, *now], [*call, *start]))
    culprit = {
        "rank": 6, "host": "gpu-a17", "pid": 4106, "thread": "0x1", "frame": frame(user, 61, "next_batch"),
        "reason": "data_loading", "text": "rank 6 waits for its data loader at train.py:61 next_batch",
    }  # fmt: skip
    return {
        "state": "hang", "class": "data_loading", "confidence": "certain", "job": "pretrain-7b", "node": 0, "world": 8,
        "detected_after_sec": 31.2, "op": "all_reduce", "seq": 7, "group": "tp0", "culprits": [culprit], "candidates": [],
        "victims": [0, 1, 2, 3, 4, 5, 7], "disagreements": [], "ranks": ranks, "text": "job pretrain-7b, node 0: 8 of 8 ranks\n",
        "evidence": ["rank 6 has not begun all_reduce seq 7 of group tp1, in which ranks 4 5 7 wait", "worker pid 5120 is dead", "ranks disagree:\nrank 1 calls barrier"],
        "advice": "look at that rank's data workers and at its storage",
    }  # fmt: skip


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "path", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_the_page_says_who_where_why_and_what_next() -> None:
    page = verdict_page.page(pipeline())
    text = read(page).text
    for expected in (
        "rank 6", "pid 4106 on gpu-a17", "/home/u/pretrain/train.py:61 in next_batch", "data_loading", "ranks 0-5 7",
        "look at that rank's data workers", "worker pid 5120 is dead", "certain",
    ):  # fmt: skip
        assert expected in text, expected
    assert "<li>ranks disagree:<br>rank 1 calls barrier</li>" in page


def test_stacks_of_all_ranks_are_one_tree_by_rank_sets() -> None:
    root = verdict_page.stack_tree(pipeline()["ranks"])
    (start,) = root.children.values()
    assert (start.label, start.ranks) == ("<module>", set(range(8)))
    below = {node.label: node.ranks for node in start.children.values()}
    assert below == {"forward": {0, 1, 3, 4, 5, 7}, "backward": {2}, "next_batch": {6}}
    (inner,) = next(
        node for node in start.children.values() if node.label == "next_batch"
    ).children.values()
    assert inner.library and inner.place == "dataloader.py:1285"


def test_a_rank_without_a_stack_is_in_the_tree_too() -> None:
    report = pipeline()
    report["ranks"][3] |= {"threads": [], "alive": False}
    root = verdict_page.stack_tree(report["ranks"])
    assert {node.label: node.ranks for node in root.children.values()}["process is gone"] == {3}


def test_the_graph_leads_from_those_who_wait_to_the_one_who_does_not() -> None:
    found = {
        wait.op: (wait.held, wait.missing, wait.unseen) for wait in verdict_page.waits(pipeline())
    }
    assert found == {
        "all_reduce seq 7 of group tp0": ((0, 1, 3), (2,), 0),
        "recv tag 0 of group pp": ((2,), (6,), 0),
        "all_reduce seq 7 of group tp1": ((4, 5, 7), (6,), 0),
    }
    boxes = [
        attributes for tag, attributes in read(verdict_page.page(pipeline())).tags if tag == "rect"
    ]
    left = [int(box["x"] or 0) for box in boxes]
    # Ops come first, then ranks: 0 1 3, then 2, then 4 5 7, then 6.
    assert (
        len(boxes) == 3 + 4
        and left[6] == max(left)
        and left[3] == min(left)
        and left[3] < left[4] < left[6]
    )


def test_who_waits_for_futures_is_in_the_graph_and_whoever_only_has_ops_under_way_is_not() -> None:
    report = pipeline()
    for entry in report["ranks"]:
        for under_way in entry["pending"]:
            under_way["phase"] = "enqueued"
    report["ranks"][0]["pending"].append(op("all_reduce", "tp0", 8, "enqueued"))
    assert [wait.held for wait in verdict_page.waits(report)] == [(0, 1, 3), (4, 5, 7), (2,)]
    report["victims"] = []
    assert verdict_page.waits(report) == []


def test_processes_that_a_rank_started_are_with_the_other_threads() -> None:
    report = pipeline()
    worker = {"main": True, "name": "", "frames": [frame("/home/u/data.py", 12, "__getitem__")]}
    report["ranks"][6]["children"] = [
        {"pid": 5120, "name": "pt_data_worker", "threads": [worker]},
        {"pid": 5121, "threads": []},
    ]
    root = verdict_page.stack_tree(report["ranks"], main=False)
    assert {node.label: node.ranks for node in root.children.values()} == {
        "pin_memory": set(range(8)),
        "process pt_data_worker": {6},
    }


def test_members_on_other_nodes_are_counted_and_circles_end() -> None:
    report = pipeline()
    report["ranks"] = report["ranks"][:2]
    (wait,) = verdict_page.waits(report)
    assert wait.unseen == 2 and "2 ranks elsewhere" in verdict_page.page(report)
    for number in (0, 1):
        entry = report["ranks"][number]
        entry["groups"] = [{"name": "pp", "rank": number, "size": 2}]
        entry["tail"] = entry["pending"] = [op("recv", "pp", 1, "waiting", 1 - number)]
    assert [(wait.held, wait.missing) for wait in verdict_page.waits(report)] == [
        ((0,), (1,)),
        ((1,), (0,)),
    ]
    read(verdict_page.page(report))


def test_nothing_of_the_job_leaves_its_text_and_nothing_is_loaded() -> None:
    evil = "<script>alert(1)</script><img src=//x onerror=y>\"' style='z"

    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poison(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [poison(inner) for inner in value]
        return (
            value + evil
            if isinstance(value, str) and value not in ("waiting", "done", "hang")
            else value
        )

    clean, page = read(verdict_page.page(pipeline())), verdict_page.page(poison(pipeline()))
    poisoned = read(page)
    assert {tag for tag, _ in poisoned.tags} == {tag for tag, _ in clean.tags}
    for tag, attributes in poisoned.tags:
        assert tag not in ("script", "img", "link", "iframe")
        assert not {"src", "onerror", "href"} & set(attributes)
        assert "z" not in attributes.get("style", "") if tag == "div" else True
    assert not re.search(r"url\((?!#tip)|@import|https?:", page)
