"""What commands believe and print: an agent, or a report, may be anybody's and say anything."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_agent import AgentSocket

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner, Result  # noqa: E402

from reft import _voice  # noqa: E402
from reft._cli import agents, pages, vaults, words  # noqa: E402
from reft._cli.main import cli  # noqa: E402
from reft._link import agent_protocol as protocol  # noqa: E402

# Clears the screen, sets the title, answers to itself, turns text around, hides text, ends lines.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\u200b\u2066\u3164\r\nrm\x00\x7f[bold]x[/bold]\udcff"
FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\u3164\ud800-\udfff]")


class FakeAgent(AgentSocket):
    """Says hello as agents do, and answers a request of each type with the bytes in `answers`."""

    def __init__(self, run_dir: Path, job: str = "demo") -> None:
        self.answers: dict[int, tuple[int, bytes]] = {}
        self.received = bytearray()
        self.drip: Callable[[socket.socket, bytes], None] = socket.socket.sendall
        super().__init__(run_dir, job)

    def say(self, kind: int, answer_kind: int, value: Any) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.answers[kind] = (answer_kind, body)

    def talk(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        try:
            while header := stream.read(protocol.HEADER.size):
                _, _, kind, size, _ = protocol.HEADER.unpack(header)
                self.received += header + stream.read(size)
                answer, body = self.answers.get(kind, (protocol.WELCOME, b"{}"))
                frame = protocol.HEADER.pack(protocol.MAGIC, protocol.VERSION, answer, len(body), 0)
                if kind == protocol.HELLO:
                    connection.sendall(frame + body)
                else:
                    self.drip(connection, frame + body)
        except OSError:  # the tool has given up
            pass


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="reft") as path:  # short, for the socket
        yield Path(path)


@pytest.fixture
def agent(run_dir: Path) -> Iterator[FakeAgent]:
    fake = FakeAgent(run_dir)
    yield fake
    fake.close()


def reft(run_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), env={"REFT_RUN_DIR": str(run_dir), "COLUMNS": "200"})


def is_one_line_of_error(done: Result) -> bool:
    return isinstance(done.exception, SystemExit) and done.stderr.count("\n") == 1


# -- peers


def test_an_agent_of_another_user_is_not_spoken_to(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(protocol.os, "geteuid", lambda: own + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {own}, and this is user {own + 1}"):
        protocol.AgentConnection(agent.path)
    monkeypatch.undo()
    protocol.AgentConnection(agent.path).close()
    hello = protocol.HEADER.size + protocol.HEADER.unpack_from(agent.received)[3]
    assert len(agent.received) == hello  # of the second connection


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_root_does_not_believe_what_a_user_has_put_into_its_place(run_dir: Path) -> None:
    for folder in (run_dir, run_dir / "demo", run_dir / "demo" / "node-0"):
        folder.mkdir(exist_ok=True)
        os.chown(folder, 65534, -1)
    os.seteuid(65534)
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(run_dir / "demo" / "node-0" / "agent.sock"))
        listener.listen()
    finally:
        os.seteuid(0)
    done = reft(run_dir, "top", "--once")
    listener.close()
    assert done.exit_code == agents.EXIT_NO_ANSWER and is_one_line_of_error(done), done.output
    assert "belongs to user 65534" in done.stderr


def test_an_answer_has_one_deadline_however_it_drips(agent: FakeAgent) -> None:
    def drip(connection: socket.socket, data: bytes) -> None:
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)  # a deadline for each byte alone would take 20 s

    agent.drip = drip
    agent.say(protocol.STATUS_REQUEST, protocol.STATUS, {"text": "x" * 1000})
    with protocol.AgentConnection(agent.path, timeout_sec=0.3) as connection:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            connection.request(protocol.STATUS_REQUEST)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 1_000_000,
        b'{"ranks":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"ranks": NaN}',
        b'{"world": ' + b"9" * 4000 + b"}",
        b"[" + b"[]," * 5_000_000 + b"0]",
        b"\xff",
        b"7",
    ],
    ids=["open", "deep", "nan", "digits", "many", "bytes", "number"],
)
def test_hostile_json_is_one_line_of_error(body: bytes, agent: FakeAgent, run_dir: Path) -> None:
    agent.say(protocol.STATUS_REQUEST, protocol.STATUS, body)
    done = reft(run_dir, "top", "--once")
    assert done.exit_code == agents.EXIT_NO_ANSWER and is_one_line_of_error(done), done.output


def test_a_short_ballot_is_a_value_error(agent: FakeAgent) -> None:
    agent.say(protocol.STATUS_REQUEST, protocol.OUTCOME, b"12345678")
    with protocol.AgentConnection(agent.path) as connection, pytest.raises(ValueError, match="ballot"):
        connection.request(protocol.STATUS_REQUEST)


def test_descriptors_that_nobody_asked_for_do_not_pile_up(agent: FakeAgent) -> None:
    def drip(connection: socket.socket, data: bytes) -> None:
        for byte in data:
            socket.send_fds(connection, [bytes([byte])], [0, 0])

    agent.drip = drip
    before = len(os.listdir("/proc/self/fd"))
    with protocol.AgentConnection(agent.path) as connection, pytest.raises(ValueError, match="descriptors"):
        connection.request(protocol.STATUS_REQUEST)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # of the agent's own thread


# -- what is printed


def hostile_status() -> dict[str, Any]:
    rank = {"rank": HOSTILE, "pid": 1, "alive": True, "stats": {"note": HOSTILE, "dropped": HOSTILE}}
    return {
        "job": HOSTILE, "node": HOSTILE, "agent_pid": HOSTILE, "world": 1, "ranks": [rank],
        "disagreements": [{"text": HOSTILE}],
    }  # fmt: skip


def hostile_stacks() -> dict[str, Any]:
    return {"ranks": [{"rank": 0, "pid": 1, "alive": True}], "text": HOSTILE}


def hostile_native() -> dict[str, Any]:
    frame = {"kind": "python", "file": HOSTILE, "line": 1, "function": HOSTILE}
    native = {"kind": "native", "function": HOSTILE, "object": HOSTILE, "offset": "0x1"}
    thread = {"tid": 1, "name": HOSTILE, "state": HOSTILE, "main": True, "problem": HOSTILE, "frames": [frame, native]}
    return {"native": {"threads": [thread], "error": HOSTILE}, **hostile_stacks()}


@pytest.mark.parametrize(
    ("command", "kind", "value"),
    [
        (["stack"], protocol.STACKS_REQUEST, hostile_stacks()),
        (["stack", "--native"], protocol.STACKS_REQUEST, hostile_native()),
        (["doctor"], protocol.STATUS_REQUEST, {"ranks": [{"rank": 0, "notes": [[HOSTILE] * 4]}]}),
        (["top", "--once"], protocol.STATUS_REQUEST, {**hostile_status(), "ranks": []}),
        (["ls"], protocol.VAULT_LIST, {"what": HOSTILE}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_foreign_text_moves_no_cursor(
    command: list[str], kind: int, value: dict[str, Any], agent: FakeAgent, run_dir: Path
) -> None:
    agent.say(kind, protocol.ERROR if "what" in value else kind + 1, value)
    for text in reft(run_dir, *command).output, reft(run_dir, *command, "--json").stdout:
        assert not FORBIDDEN.search(text.replace("\n", "")), text
        assert "x1b" in text or "u001b" in text, text
    json.loads(reft(run_dir, *command, "--json").stdout)


def test_the_name_of_a_job_moves_no_cursor(run_dir: Path) -> None:
    for name in ("a\x1b[2J", "b\u202e"):
        FakeAgent(run_dir, job=name)
    done = reft(run_dir, "stack")
    assert done.exit_code == 2 and not FORBIDDEN.search(done.stderr.strip()), done.stderr
    assert "\\x1b" in done.stderr and "\\u202e" in done.stderr


def test_tables_and_sentences_show_escapes_and_no_markup() -> None:
    from rich.table import Table
    from rich.text import Text

    console = words.console()
    table = Table()
    table.add_column("[red]title[/red]")
    table.add_row(HOSTILE)
    with console.capture() as capture:
        console.print(table, Text(HOSTILE), HOSTILE)
    shown = capture.get()
    assert not FORBIDDEN.search(shown.replace("\n", "")) and "[bold]x[/bold]" in shown and "[red]title" in shown


def test_styles_of_our_own_remain() -> None:
    from rich.text import Text

    console = words.console()
    console._force_terminal, console._color_system = True, words.Console(force_terminal=True, color_system="standard")._color_system
    with console.capture() as capture:
        console.print(Text("\x1b[2Jred", style="red"))
    assert capture.get() == "\x1b[31m\\x1b[2Jred\x1b[0m\n"


def test_what_is_shown_has_a_length() -> None:
    assert _voice.shown("x" * 5000) == "x" * 4096 + "... (904 more characters)"
    assert _voice.shown("a\n" * 60_000).endswith("a\n... (10001 more lines)")
    assert _voice.shown("\x1b" * 10_000_000).__len__() < 20_000
    assert _voice.shown("caf\u00e9 \u4e2d\u6587 \U0001f600 \u00b1 \u00b7\nnext") == "caf\u00e9 \u4e2d\u6587 \U0001f600 \u00b1 \u00b7\nnext"


def test_ranks_print_through_the_same_sanitiser(capsys: pytest.CaptureFixture[str]) -> None:
    _voice.warn(HOSTILE)
    assert not FORBIDDEN.search(capsys.readouterr().err.replace("\n", ""))


def test_commands_print_in_no_other_way() -> None:
    folder = Path(agents.__file__).parent
    other = re.compile(r"click\.s?echo\(|(?<![\w.])print\(|\bConsole\(|sys\.std(out|err)\.(write|buffer)")
    found = {
        f"{path.name}: {line.strip()}"
        for path in folder.rglob("*.py")
        if path.name != "words.py"
        for line in path.read_text().splitlines()
        if other.search(line)
    }
    assert found == {"agents.py: click.echo(json.dumps(value, indent=2))"}  # ASCII


# -- files and pages


def test_what_is_no_regular_file_is_no_report(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("reft._C", reason="needs the native module")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "socket").symlink_to("/dev/zero")
    for path in ("/dev/zero", "/dev/null", tmp_path / "pipe", tmp_path / "socket", tmp_path):
        done = reft(tmp_path, "replay", str(path))
        assert done.exit_code in (1, 3) and is_one_line_of_error(done), done.output
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    done = reft(tmp_path, "replay", str(tmp_path / "huge"))
    assert done.exit_code == 1 and is_one_line_of_error(done) and "larger than any report" in done.stderr


@pytest.mark.parametrize("content", [b"[" * 1_000_000, b'{"a":' * 500_000, b'{"report": "hang", "x": ' + b"[[" * 99 + b"]]" * 99 + b"}"])
def test_a_deep_report_is_one_line_of_error(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("reft._C", reason="needs the native module")
    (tmp_path / "report.json").write_bytes(content)
    done = reft(tmp_path, "replay", str(tmp_path / "report.json"))
    assert done.exit_code == 1 and is_one_line_of_error(done), done.output


def test_a_vault_of_another_user_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank-0.vault").write_bytes(b"x")
    own = os.geteuid() or 4711
    os.chown(tmp_path / "rank-0.vault", own, -1)
    monkeypatch.setattr(vaults.os, "geteuid", lambda: own + 1)
    (vault,) = vaults.find(str(tmp_path), None, None)
    with pytest.raises(OSError, match=f"belongs to user {own}"), vault.open():
        pass


def test_every_page_forbids_scripts_and_loads(tmp_path: Path) -> None:
    folder = Path(pages.__file__).parent
    frames = sorted(folder.glob("*.html"))
    assert [frame.stem for frame in frames] == ["chart", "timeline", "verdict"]
    for frame in frames:
        text = frame.read_text()
        assert text.index("$policy") < text.index("$title")
        assert not re.search(r"<script|\bsrc=|\bhref=|\bon\w+=|@import|url\(", text)
        assert not re.search(r"@import|url\(|expression", (folder / f"{frame.stem}.css").read_text())
    filled = pages.fill("chart", f"<script>{HOSTILE}", lead="", chart="", table="", notes="")
    assert "default-src 'none'" in filled and "<script" not in filled
    assert not FORBIDDEN.search(filled.replace("\n", "")) and "&lt;script&gt;\\x1b[2J" in filled
