"""The timeline of a rank, computed from records: steps, gaps, copies by tier, and what is drawn of them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import Any

from reft._cli import report, timeline, timeline_page

MS = 1_000_000
STEP = 100 * MS


def op(
    kind: str, begin: int, done: int, wait: tuple[int, int] = (0, 0), seq: int = 1, **fields: Any
) -> dict[str, Any]:
    return {
        "op": kind,
        "group": 0,
        "seq": seq,
        "peer": -1,
        "bytes": 4096,
        "call_site": 7,
        "failed": False,
        "begin_ns": begin,
        "done_ns": done,
        "wait_begin_ns": wait[0],
        "wait_end_ns": wait[1],
        **fields,
    }


def span(
    what: str, step: int, begin: int, end: int, size: int = 0, tier: str | None = None
) -> dict[str, Any]:
    return {
        "what": what,
        "step": step,
        "begin_ns": begin,
        "end_ns": end,
        "bytes": size,
        "tier": tier,
    }


def vault(rank: int = 0, late_ns: int = 0, steps: int = 5) -> dict[str, Any]:
    """Iterations of 100 ms: a recv that is waited for from 20 to 60, in which all but one piece is copied."""
    ops, spans = [], []
    for number in range(1, steps + 1):
        point = number * STEP + late_ns
        ops.append(op("step", point, point, seq=number))
        ops.append(
            op(
                "recv",
                point + 10 * MS,
                point + 60 * MS,
                (point + 20 * MS, point + 60 * MS),
                seq=number,
                peer=1,
            )
        )
        spans.append(span("capture", number, point, point + 2 * MS, 77))
        spans.append(span("copy", number, point, point + MS, 10, "at once"))
        spans.append(span("copy", number, point + 21 * MS, point + 50 * MS, 900, "gap"))
        spans.append(span("copy", number, point + 62 * MS, point + 63 * MS, 90, "compute"))
        spans.append(span("seal", number, point + 70 * MS, point + 71 * MS, 1))
        spans.append(span("gate", number, point + 90 * MS, point + 94 * MS))
    return {
        "job": "demo",
        "rank": rank,
        "world": 2,
        "groups": [("world", rank, 2)],
        "call_sites": {7: "train.py:3 f"},
        "ops": ops,
        "spans": spans,
        "spans_from_ns": 0,
        "spans_from_step": -1,
    }


def test_steps_have_their_gaps_and_the_copies_of_the_snapshot_at_their_beginning() -> None:
    rank = timeline.of_vault(vault())
    assert [step.number for step in rank.steps] == [2, 3, 4, 5]
    for step in rank.steps:
        assert step.end - step.begin == STEP
        assert step.gap_ns == 40 * MS
        assert (step.capture_ns, step.gate_ns, step.seal_ns) == (2 * MS, 4 * MS, MS)
        assert step.copied == {
            "at once": 10,
            "gap": 900,
            "compute": 90,
            "communication": 0,
            "gate": 0,
        }
        assert step.copied_ns["gap"] == 29 * MS


def test_steps_whose_spans_were_overwritten_are_left_out() -> None:
    read = vault(0, 5)
    assert len(timeline.of_vault(read).steps) == 4
    kept = [it for it in read["spans"] if it["step"] >= 2]
    rank = timeline.of_vault({**read, "spans": kept, "spans_from_ns": kept[0]["begin_ns"]})
    assert [step.number for step in rank.steps] == [3, 4, 5] and all(
        sum(step.copied.values()) for step in rank.steps
    )


def device_vault(steps: int = 5) -> dict[str, Any]:
    """The same job on a device that is 3 ms behind its host, which waits for nothing; a step is told when it has ended."""
    read = vault(steps=steps)
    read["spans"] = [it for it in read["spans"] if it["what"] in ("capture", "seal", "gate")]
    for it in read["ops"]:
        if it["op"] == "recv":
            it["wait_end_ns"] = it["wait_begin_ns"] + 1000
    for number in range(1, steps):
        point = number * STEP + 3 * MS
        read["spans"].append(
            {
                **span("device wait", number, point + 20 * MS, point + 60 * MS, 4096, "gap"),
                "op": "recv",
            }
        )
        read["spans"].append(
            {
                **span(
                    "device wait",
                    number,
                    point + 70 * MS,
                    point + 75 * MS,
                    1 << 20,
                    "communication",
                ),
                "op": "all_reduce",
            }
        )
        read["spans"].append(span("copy", number, point + 20 * MS, point + 50 * MS, 900, "gap"))
        read["spans"].append(
            span("copy", number, point + 71 * MS, point + 72 * MS, 100, "communication")
        )
        read["spans"].append(span("device gate", number, point + 90 * MS, point + 91 * MS))
        read["spans"].append(span("device step", number, point, point + STEP))
    return read


def test_a_devices_own_clock_is_taken_where_there_is_one() -> None:
    rank = timeline.of_vault(device_vault())
    assert rank.device and [step.number for step in rank.steps] == [2, 3, 4, 5]
    for step in rank.steps:
        assert step.begin == (step.number - 1) * STEP + 3 * MS and step.end - step.begin == STEP
        assert step.gap_ns == 45 * MS, "not what the host waited"
        assert (step.capture_ns, step.gate_ns) == (2 * MS, MS)
        assert step.copied == {
            "at once": 0,
            "gap": 900,
            "compute": 0,
            "communication": 100,
            "gate": 0,
        }
    assert len(rank.gates) == 4 and "link is busy" in rank.gaps[1].details
    said = report.sentence([rank])
    assert "90 % of the bytes were copied while the device waited" in said
    assert (
        "the device waited 1.0 ms per step for copies at the gate on average (1.0 %; the host, ahead of its device, spent 2.0 ms"
        in said
    )
    drawn = timeline_page.page("demo", said, (STEP, 5 * STEP), [rank], (["rank"], [["0"]]))
    assert "gap: the device waits for others" in drawn and "rank 0, device" in drawn
    names = {event["args"].get("name") for event in timeline.trace([rank], "demo")["traceEvents"]}
    assert {"gaps (the device waits)", "device: gate", "training thread: capture"} <= names


def test_steps_of_a_device_whose_spans_were_overwritten_are_left_out() -> None:
    read = device_vault(9)
    read["spans_from_step"] = 3  # and the one after it may have lost what the host did in it
    assert [step.number for step in timeline.of_vault(read).steps] == [6, 7, 8, 9]


def test_ranks_of_another_time_are_left_out() -> None:
    now = timeline.of_vault(vault(0, late_ns=3600 * 10**9))
    _, _, ranks = timeline.newest([timeline.of_vault(vault(1)), now], 3)
    assert [rank.rank for rank in ranks] == [0], (
        "the one that runs is shown, not the one that stopped an hour ago"
    )


def test_each_rank_shows_so_many_steps() -> None:
    ranks = [timeline.of_vault(vault(rank, late_ns=rank * 30 * MS, steps=9)) for rank in range(3)]
    for count in (1, 4):
        _, _, cut = timeline.newest(ranks, count)
        assert [len(rank.steps) for rank in cut] == [count] * 3


def test_waits_inside_of_waits_count_once_and_what_is_under_way_not_at_all() -> None:
    read = vault(steps=2)
    read["ops"].append(
        op("all_reduce", STEP + 30 * MS, STEP + 40 * MS, (STEP + 30 * MS, STEP + 40 * MS))
    )
    read["ops"].append(
        op("all_reduce", STEP + 55 * MS, STEP + 70 * MS, (STEP + 55 * MS, STEP + 70 * MS))
    )
    read["ops"].append(op("recv", STEP + 80 * MS, 0, (STEP + 80 * MS, 0)))
    read["spans"].append(span("copy", 1, STEP + 95 * MS, 0, 5, "gap"))
    (step,) = timeline.of_vault(read).steps
    assert step.gap_ns == 50 * MS
    assert step.copied["gap"] == 900


def test_the_newest_steps_of_ranks_that_are_not_at_the_same_place() -> None:
    ranks = [
        timeline.of_vault(vault(0)),
        timeline.of_vault(vault(1, late_ns=30 * MS)),
        timeline.of_vault(vault(2, steps=1)),
    ]
    begin, end, cut = timeline.newest(ranks, 2)
    assert [rank.rank for rank in cut] == [0, 1], "a rank without a whole step is not drawn"
    assert (begin, end) == (3 * STEP - 70 * MS, 5 * STEP), "two whole steps of each"
    assert [step.number for step in cut[0].steps] == [4, 5]
    assert [step.number for step in cut[1].steps] == [3, 4], (
        "what had not ended by then is left out"
    )
    assert all(
        copy.end > begin and copy.begin < end
        for rank in cut
        for copies in rank.copies.values()
        for copy in copies
    )
    assert timeline.newest(ranks[2:], 2)[2] == []
    assert timeline.newest([], 2)[2] == []
    assert timeline.newest(ranks[:1], 99)[0] == STEP


def test_the_summary_says_what_it_comes_to() -> None:
    _, _, ranks = timeline.newest([timeline.of_vault(vault())], 3)
    facts = report.summary(ranks[0])
    assert facts["steps"] == 3 and facts["step_ns"] == STEP and facts["gap_share"] == 0.4
    assert facts["copied_bytes"] == {
        "at_once": 30,
        "gap": 2700,
        "compute": 270,
        "communication": 0,
        "gate": 0,
    }
    assert "90 % of the bytes" in report.sentence(
        ranks
    ) and "6.0 ms per step for reft on average (6.0 %)" in report.sentence(ranks)
    nothing = vault()
    nothing["spans"] = []
    assert report.sentence([timeline.of_vault(nothing)]).startswith("Nothing was copied")


def test_the_sentence_tells_what_snapshots_were_measured_to_cost() -> None:
    read = vault()
    read["cost"] = {"every": 2, "overhead_ppm": 15_000, "overhead_noise_ppm": 2_000}
    rank = timeline.of_vault(read)
    assert report.summary(rank)["overhead_ppm"] == 15_000
    assert (
        "Over the run: a snapshot every 2 steps costs 1.5 % ± 0.20 % of the mean step (measured)."
        in report.sentence([rank])
    )
    read["cost"]["overhead_noise_ppm"] = -1
    assert "not measured yet" in report.sentence([timeline.of_vault(read)])


def test_the_trace_has_every_rank_and_no_row_overlaps_itself() -> None:
    read = vault()
    read["ops"] += [
        op("all_reduce", begin, begin + 30 * MS) for begin in (STEP, STEP + 10 * MS, STEP + 20 * MS)
    ]
    events = json.loads(
        json.dumps(timeline.trace([timeline.of_vault(read), timeline.of_vault(vault(1))], "demo"))
    )["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["ph"] for event in events} == {"M", "X"}
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    names = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert set(rows) <= names
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        assert all(
            one["ts"] + one["dur"] <= two["ts"] + 1e-6
            for one, two in zip(row, row[1:], strict=False)
        ), row
    gap = next(event for event in events if event["name"] == "copy: gap")
    recv = next(event for event in events if event["name"] == "recv")
    assert (
        recv["args"]["details"]
        == "waits for recv of group world, seq 1, peer 1, 4,096 bytes, called at train.py:3 f"
    )
    assert (
        gap["ts"] == (STEP + 21 * MS) / 1e3 and gap["dur"] == 29e3 and gap["args"]["bytes"] == 900
    )


def test_the_page_is_well_formed_and_escapes_what_the_job_says() -> None:
    read = vault()
    read["groups"] = [("<script>alert(1)</script>", 0, 2)]
    begin, end, ranks = timeline.newest([timeline.of_vault(read)], 3)
    page = timeline_page.page(
        "<b>job</b>", "sentence", (begin, end), ranks, (("rank",), [("<i>0</i>",)])
    )
    assert "<script" not in page and "<b>job" not in page and "<i>0" not in page
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])
    rects = list(svg.iter("rect"))
    for kind, count in (
        ("gap", 3),
        ("under", 3),
        ("now", 3),
        ("stall", 6),
        ("seal", 3),
        ("idle", 3),
    ):
        assert sum(rect.get("class") == kind for rect in rects) == count, kind
    for rect in rects:
        assert float(rect.get("width", 0)) > 0 and 96 <= float(rect.get("x", 0)) <= 1340
    assert (
        sum(
            element.text == f"step {number}" for number in (3, 4, 5) for element in svg.iter("text")
        )
        == 3
    )
    # A gap's copy is drawn inside of the gap.
    (gap, *_), (copy, *_) = (
        [rect for rect in rects if rect.get("class") == kind] for kind in ("idle", "gap")
    )
    left = float(gap.get("x", 0))
    assert left < float(copy.get("x", 0)) < left + float(gap.get("width", 0))


def test_ten_thousand_small_ops_make_no_ten_thousand_bars() -> None:
    read = vault(steps=3)
    read["ops"] += [
        op("all_reduce", STEP + i * 1000, STEP + i * 1000 + 500) for i in range(100_000)
    ]
    begin, end, ranks = timeline.newest([timeline.of_vault(read)], 2)
    page = timeline_page.page("job", "", (begin, end), ranks, ((), []))
    assert page.count("<rect") < 5000


def test_ticks_are_round_and_few() -> None:
    for length in (1, 7, 999, 12 * MS, 100 * MS, 3_333_333_333, 10**12):
        ticks = timeline_page._ticks(length)
        assert 1 <= len(ticks) <= 13 and ticks[0] == 0 and ticks[-1] < length, (length, ticks)
