"""Measurements between two ends in one process, and what hostile or broken peers get from them."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from reft._check import links
from reft._check.links import Amount, Door, End, Key

SMALL = Amount(10, 1.0, 0.05)
KEY = Key(bytes(32), b"run 1 0 1 0")


@pytest.fixture
def door() -> Iterator[Door]:
    one = Door("127.0.0.1")
    yield one
    one.close()


def answering(door: Door, key: Key, amount: Amount = SMALL) -> tuple[threading.Thread, list[End]]:
    ends: list[End] = []
    thread = threading.Thread(target=lambda: ends.append(door.answer(key, amount)))
    thread.start()
    return thread, ends


def test_both_ends_see_rates_round_trips_and_no_loss(door: Door) -> None:
    thread, ends = answering(door, KEY)
    mine = links.open_to("127.0.0.1", door.port, door, KEY, SMALL)
    thread.join()
    pair = links.merged(0, 1, 0, mine, ends[0], False)
    assert pair.reached and pair.gbits > 0.01 and 0 < pair.rtt_us < 1e6
    assert not pair.is_corrupt and pair.sent >= 80 and pair.lost < 4
    assert pair.gbits == min(mine.gbits, ends[0].gbits)


@pytest.mark.parametrize("wrong", [Key(secrets.token_bytes(32), KEY.context), Key(KEY.value, b"run 2 0 1 0")])
def test_another_key_or_another_measurement_reaches_nothing(
    door: Door, wrong: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "CONNECT_SEC", 0.5)
    monkeypatch.setattr(links, "_PROVE_SEC", 0.5)
    thread, ends = answering(door, KEY)
    assert links.open_to("127.0.0.1", door.port, door, wrong, SMALL) == End(False)
    thread.join()
    assert ends == [End(False)]


def test_the_opener_trusts_no_door_without_the_key(door: Door) -> None:
    def pose() -> None:
        peer, _ = door._socket.accept()
        with peer:
            peer.recv(100)
            peer.sendall(bytes(48) + b"\x01")

    thread = threading.Thread(target=pose)
    thread.start()
    assert links.open_to("127.0.0.1", door.port, door, KEY, SMALL) == End(False)
    thread.join()


def test_strangers_neither_hold_the_door_nor_pass_it(door: Door) -> None:
    strangers = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(40))
    strangers[1].sendall(links._MAGIC)  # and nothing more
    thread, ends = answering(door, KEY)
    mine = links.open_to("127.0.0.1", door.port, door, KEY, SMALL)
    thread.join()
    assert mine.reached and ends[0].reached
    for stranger in strangers:
        stranger.close()


def test_a_recorded_proof_is_no_proof_again(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CONNECT_SEC", 0.5)
    monkeypatch.setattr(links, "_PROVE_SEC", 0.5)
    hello, proof = links._MAGIC + bytes(16), KEY.proof(b"opens", bytes(16), bytes(16))
    thread, ends = answering(door, KEY)
    with socket.create_connection(("127.0.0.1", door.port)) as replayer:
        replayer.sendall(hello)
        replayer.recv(48)
        replayer.sendall(proof)
        thread.join()
    assert ends == [End(False)]


def test_changed_bytes_are_seen(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = iter([b"\0" * links.BLOCK, b"\1" * links.BLOCK])
    monkeypatch.setattr(Key, "block", lambda self: next(blocks))
    thread, ends = answering(door, KEY)
    mine = links.open_to("127.0.0.1", door.port, door, KEY, SMALL)
    thread.join()
    assert mine.is_corrupt and ends[0].is_corrupt
    assert links.merged(0, 1, 0, mine, ends[0], False).is_corrupt


def test_a_peer_that_stalls_ends_the_measurement_in_time(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_STALL_SEC", 0.2)
    done = threading.Event()

    def stall() -> None:
        with socket.create_connection(("127.0.0.1", door.port)) as peer:
            mine = bytes(16)
            peer.sendall(links._MAGIC + mine)
            answer = peer.recv(48, socket.MSG_WAITALL)
            peer.sendall(KEY.proof(b"opens", mine, answer[:16]))
            done.wait(30)

    thread = threading.Thread(target=stall)
    thread.start()
    began = time.monotonic()
    end = door.answer(KEY, Amount(10, 0.1, 0.1))
    assert time.monotonic() - began < Amount(10, 0.1, 0.1).longest_sec
    assert end.reached and end.gbits == 0
    done.set()
    thread.join()


def test_measurements_at_one_time_overlap_and_others_show_that_they_do_not() -> None:
    doors = [Door("127.0.0.1") for _ in range(2)]
    together, amount = links.Together(2), Amount(0, 1.0, 0.3)
    answers = [answering(one, KEY, amount) for one in doors]
    opening = [
        threading.Thread(target=links.open_to, args=("127.0.0.1", one.port, one, KEY, amount, together))
        for one in doors
    ]
    for thread in [*opening, *(one for one, _ in answers)]:
        if not thread.is_alive():
            thread.start()
    for thread in [*opening, *(one for one, _ in answers)]:
        thread.join()
    assert all(ends[0].reached and ends[0].gbits > 0 for _, ends in answers)
    assert together.overlap > 0.2
    for door in doors:
        door.close()
    apart = links.Together(2)
    for what, spans in (("sent", [(0, 1), (0, 1)]), ("received", [(1, 2), (1.5, 2.5)])):
        for span in spans:
            apart.add(what, *span)
    assert apart.overlap == pytest.approx(1 / 3)
    assert links.Together(2).overlap == 0


def test_one_of_two_measurements_that_fails_does_not_hold_the_other(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_TOGETHER_SEC", 0.1)
    together = links.Together(2)
    thread, _ = answering(door, KEY)
    links.open_to("127.0.0.1", door.port, door, KEY, SMALL, together)
    thread.join()
    assert together.overlap == 0


def test_nobody_listens() -> None:
    door = Door("127.0.0.1")
    other = Door("127.0.0.1")
    port = other.port
    other.close()
    assert links.open_to("127.0.0.1", port, door, KEY, SMALL) == End(False)
    door.close()


def test_an_end_that_was_not_reached_makes_the_pair_unreached() -> None:
    assert not links.merged(2, 5, 1, End(True, 1.0), End(False), False).reached
    pair = links.merged(2, 5, 1, End(True, 3.0, 70.0, 1, 100), End(True, 2.0, 0.0, 9, 100), True)
    assert (pair.a, pair.b, pair.rail, pair.gbits, pair.rtt_us) == (2, 5, 1, 2.0, 70.0)
    assert (pair.lost, pair.sent, pair.is_shared) == (9, 100, True)
