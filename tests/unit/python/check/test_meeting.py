"""Messages of a check through a store: only nodes that have the key write them."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import pytest

from reft._check import evidence
from reft._check.evidence import Fault, Pair, Part, Port, Report, Verdict, link_unit, nic_unit
from reft._check.meeting import Gone, Meeting

SECRET = bytes(range(32))


class Store:
    """A store in memory, whose waits end at once."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_gone = False

    def set(self, key: str, value: bytes) -> None:
        self._live()
        self.values[key] = bytes(value)

    def get(self, key: str) -> bytes:
        self._live()
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._live()
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._live()
        if not self.check(keys):
            raise RuntimeError("timeout")

    def _live(self) -> None:
        if self.is_gone:
            raise RuntimeError("connection reset")


def pair_of(secret: bytes | None) -> tuple[Store, Meeting, Meeting]:
    store = Store()
    return store, Meeting(store, 0, secret, 1.0), Meeting(store, 1, secret, 1.0)


def soon() -> float:
    return time.monotonic() + 0.05


@pytest.mark.parametrize("secret", [None, SECRET])
def test_nodes_read_what_the_others_publish(secret: bytes | None) -> None:
    _, zero, one = pair_of(secret)
    one.put("report", {"node": 1})
    assert zero.get("report", 1, soon()) == {"node": 1}
    assert zero.get("report", 2, soon()) is None


def test_the_secret_is_not_in_the_store() -> None:
    store, zero, _ = pair_of(SECRET)
    assert not any(SECRET.hex().encode() in value or SECRET in value for value in store.values.values())
    assert json.loads(store.values["start"])[1] == ""
    assert zero.key.hex().encode() not in b"".join(store.values.values())


def test_values_of_others_and_moved_values_do_not_count() -> None:
    store, zero, one = pair_of(SECRET)
    store.set("report/1", json.dumps({"node": 1}).encode())
    assert zero.get("report", 1, soon()) is None
    one.put("report", {"node": 1})
    store.set("report/2", store.values["report/1"])
    store.set("ends/1/1", store.values["report/1"])
    assert zero.get("report", 2, soon()) is None
    assert zero.get("ends/1", 1, soon()) is None
    changed = store.values["report/1"][:-2] + b"2}"
    store.set("report/1", changed)
    assert zero.get("report", 1, soon()) is None


def test_a_check_without_the_secret_is_not_taken_part_in() -> None:
    store = Store()
    Meeting(store, 0, SECRET, 1.0)
    with pytest.raises(Gone, match="another secret"):
        Meeting(store, 1, None, 1.0)
    other = Meeting(store, 1, bytes(32), 1.0)
    other.put("report", 1)
    assert Meeting.get(Meeting(store, 2, SECRET, 1.0), "report", 1, soon()) is None


@pytest.mark.parametrize("value", [b"", b"{}", b"[1, 2]", b'["x", "zz"]', b"[[[", b'["' + b"a" * 32 + b'", "00"]'])
def test_a_start_that_no_node_writes_is_refused(value: bytes) -> None:
    store = Store()
    store.values["start"] = value
    with pytest.raises(Gone):
        Meeting(store, 1, None, 1.0)


def test_a_store_that_is_gone_ends_the_wait() -> None:
    store, zero, _ = pair_of(None)
    store.is_gone = True
    with pytest.raises(Gone, match="does not answer"):
        zero.get("report", 1, time.monotonic() + 3600)


REPORT = Report(
    3, "gpu-a03", (Part("memory", "memory X", 20.5, "GB/s"), Part("disk", "disk", 0.0, "", skipped="full")),
    (Port("10.0.0.3", 4444, "eth0", 1, 10000), Port("fe80::1", 5)), 30.0,
)  # fmt: skip


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_reports_pairs_and_verdicts_survive_json() -> None:
    assert evidence.parse_report(through_json(evidence.dump_report(REPORT)), 3) == REPORT
    pair = Pair(0, 4, 1, True, 9.5, 50.0, 1, 800)
    assert evidence.parse_pair(through_json(evidence.dump_pair(pair))) == pair
    card, link = Fault(nic_unit(1, 0), "lossy", "why"), Fault(link_unit(0, 1, 0), "slow", "")
    verdict = Verdict((card,), (((card,), (link, link)),), (1,), (link_unit(1, 2, 0),), ("note",), 3)
    assert evidence.parse_verdict(through_json(evidence.dump_verdict(verdict))) == verdict


def broken(value: Any) -> list[Any]:
    """The same with one thing changed, everywhere."""
    found: list[Any] = [None, [], "x", -1, True]
    if isinstance(value, dict):
        for key, one in value.items():
            found += [{**value, key: bad} for bad in broken(one)]
            found.append({name: other for name, other in value.items() if name != key})
        found.append({**value, "more": 1})
    elif isinstance(value, list):
        for at, one in enumerate(value):
            found += [[*value[:at], bad, *value[at + 1 :]] for bad in broken(one)]
    elif isinstance(value, float):
        found += [float("nan"), float("inf"), -0.5]
    return found


def test_what_no_node_writes_is_refused_or_harmless() -> None:
    whole = through_json(evidence.dump_report(REPORT))
    refused = 0
    for bad in broken(whole):
        try:
            parsed = evidence.parse_report(bad, 3)
        except ValueError:
            refused += 1
            continue
        assert isinstance(parsed.host, str) and parsed.node == 3
        assert all(isinstance(part.value, float) and part.value >= 0 for part in parsed.parts)
    assert refused > 50
    pair = evidence.dump_pair(Pair(0, 4, 1, True, 9.5, 50.0, 1, 800))
    for bad in broken(through_json(pair)):
        if not isinstance(bad, list) or [type(one) for one in bad] != [type(one) for one in pair] or -1 in bad:
            with pytest.raises(ValueError):
                evidence.parse_pair(bad)
    for amount in (float("nan"), float("inf"), -0.5):
        with pytest.raises(ValueError):
            evidence.parse_pair([*pair[:4], amount, *pair[5:]])


def test_host_names_are_fit_for_a_command() -> None:
    for text in ("a b;rm -rf", "$(x)", "-x", "", "…", "ok-1.example"):
        name = evidence.host_name(text)
        evidence.parse_report({**evidence.dump_report(REPORT), "parts": [], "ports": [], "host": name}, 3)
    assert evidence.host_name("ok-1.example") == "ok-1.example"
    with pytest.raises(ValueError, match="host name"):
        evidence.parse_report({**through_json(evidence.dump_report(REPORT)), "host": "a b"}, 3)
