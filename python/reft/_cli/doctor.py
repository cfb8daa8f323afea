"""`reft doctor`: what prevents reft from working on this machine, and how to fix it."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from reft import _voice
from reft._cli import agents, stale, words
from reft._link import agent_protocol as protocol
from reft._link import folders, host_memory, job_identity

OK, WARN, FAIL = "ok", "warn", "fail"
_SOCKET_PATH_BYTES = 107  # sun_path of Linux, without the NUL
_LOW_MEMORY = 2 << 30
_LOG_PROBE = "import torch; from reft import _C; _C.log_debug('')"
_PROBE_SEC = 60


@dataclass(frozen=True)
class Finding:
    """One line of the result.

    Attributes:
        result: ok, warn (works, but) or fail (does not work).
        todo: what to do, "" if nothing.
    """

    result: str
    check: str
    text: str
    todo: str = ""


def check_python() -> list[Finding]:
    return [
        Finding(OK, "python", f"{platform.python_version()} ({platform.python_implementation()})")
    ]


def check_torch() -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        return [
            Finding(
                FAIL, "torch", f"cannot be imported: {error}", "install torch into this environment"
            )
        ]
    if not torch.distributed.is_available():
        return [
            Finding(
                FAIL,
                "torch",
                f"{torch.__version__}, without torch.distributed",
                "install a build with distributed",
            )
        ]
    inner = ["gloo"] if torch.distributed.is_gloo_available() else []
    inner += ["nccl"] if torch.distributed.is_nccl_available() else []
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    findings = [
        Finding(
            OK, "torch", f"{torch.__version__}, backends {' '.join(inner) or 'none'}, {gpus} GPUs"
        )
    ]
    if not inner:
        findings.append(
            Finding(
                FAIL, "torch", "has neither gloo nor nccl", "install a torch that has one of them"
            )
        )
    return findings


def check_native() -> list[Finding]:
    try:
        import torch  # noqa: F401

        from reft import _C
    except ImportError as error:
        return [
            Finding(
                FAIL,
                "native",
                f"reft._C does not load: {error}",
                "install a reft wheel built for this torch and python",
            )
        ]
    return [Finding(OK, "native", str(_C.__file__))]


def check_autoload() -> list[Finding]:
    groups = ("torch.backends", "torch.distributed.backends")
    named = [
        entry
        for group in groups
        for entry in metadata.entry_points(group=group)
        if entry.value.startswith("reft")
    ]
    if not named:
        return [
            Finding(
                WARN,
                "autoload",
                "torch does not find reft: no entry point in torch.backends",
                "install reft as a package, or `import reft` before init_process_group",
            )
        ]
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        return [
            Finding(
                WARN,
                "autoload",
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches entry points off",
                "unset it, or `import reft` before init_process_group",
            )
        ]
    try:
        import torch.distributed as dist

        if "reft" not in dist.Backend.backend_list:
            return [
                Finding(
                    FAIL,
                    "autoload",
                    "torch did not register the backend",
                    "add `import reft` to the script",
                )
            ]
    except (ImportError, AttributeError):
        pass  # check_torch reports it
    return [
        Finding(
            OK, "autoload", ", ".join(sorted({f"{entry.group}: {entry.name}" for entry in named}))
        )
    ]


def agent_path() -> Path:
    """The agent that a rank would start."""
    given = os.environ.get("REFT_AGENT_PATH", "")
    return Path(given) if given else Path(__file__).resolve().parent.parent / "bin" / "reft-agent"


def check_agent() -> list[Finding]:
    path = agent_path()
    todo = (
        "unset REFT_AGENT_PATH or set it to the path of reft-agent"
        if os.environ.get("REFT_AGENT_PATH")
        else "reinstall reft"
    )
    if not os.access(path, os.X_OK):
        return [Finding(FAIL, "agent", f"{path} is missing or not executable", todo)]
    try:
        done = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding(FAIL, "agent", f"{path} does not run: {error}", todo)]
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        return [Finding(FAIL, "agent", f"{path} does not run: {said}", todo)]
    return [Finding(OK, "agent", done.stdout.strip() or str(path))]


def _relative(check: str, name: str, directory: Path) -> Finding:
    """Agents refuse a relative path: ranks and commands may start in another directory."""
    return Finding(
        FAIL, check, f"{directory} is not an absolute path", f"set {name}={directory.absolute()}"
    )


def _unsafe(check: str, name: str, directory: Path) -> list[Finding]:
    """What ranks and agents refuse a directory for, whether it exists or not."""
    if not (problem := folders.problem(directory)):
        return []
    text = f"{directory} is not safe: {problem}"
    return [Finding(FAIL, check, text, f"mend that, or set {name} to another place")]


def check_run_dir(given: str | None) -> list[Finding]:
    directory = agents.run_dir(given)
    if given is None and not directory.is_absolute():
        return [_relative("run dir", "REFT_RUN_DIR", directory)]
    findings = []
    longest = len(str(directory / "node-0000" / "agent.sock")) + 1 + 40
    if longest > _SOCKET_PATH_BYTES:
        findings.append(
            Finding(
                WARN,
                "run dir",
                f"{directory} is long: a socket's path has at most {_SOCKET_PATH_BYTES} bytes",
                "set REFT_RUN_DIR",
            )
        )
    if not directory.exists():
        parent = next(path for path in directory.absolute().parents if path.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            return [
                *findings,
                Finding(
                    FAIL,
                    "run dir",
                    f"cannot create {directory}: {parent} is not writable",
                    "set REFT_RUN_DIR",
                ),
            ]
        made = Finding(OK, "run dir", f"{directory} (the first job creates it)")
        return [*findings, *(_unsafe("run dir", "REFT_RUN_DIR", directory) or [made])]
    info = directory.stat()
    if not directory.is_dir():
        findings.append(
            Finding(
                FAIL, "run dir", f"{directory} is not a directory", "remove it or set REFT_RUN_DIR"
            )
        )
    elif info.st_uid != os.getuid():
        findings.append(
            Finding(
                FAIL, "run dir", f"{directory} belongs to user {info.st_uid}", "set REFT_RUN_DIR"
            )
        )
    elif stat.S_IMODE(info.st_mode) & 0o077:
        findings.append(
            Finding(
                FAIL, "run dir", f"{directory} is open to other users", f"chmod 700 {directory}"
            )
        )
    elif not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        findings.append(
            Finding(FAIL, "run dir", f"{directory} is not writable", f"chmod 700 {directory}")
        )
    else:
        findings += _unsafe("run dir", "REFT_RUN_DIR", directory)
    return (
        findings
        if any(f.result == FAIL for f in findings)
        else [*findings, Finding(OK, "run dir", str(directory))]
    )


def check_memory() -> list[Finding]:
    available = host_memory.available_bytes()
    if available is None:
        return [Finding(WARN, "memory", "cannot read free memory from /proc/meminfo")]
    text = (
        f"{words.size(available)} available; by default, a vault holds two snapshots of a rank's"
        " share of the state"
    )
    if available < _LOW_MEMORY:
        return [Finding(WARN, "memory", text, "free memory, or raise the container's limit")]
    return [Finding(OK, "memory", text)]


def check_environment() -> list[Finding]:
    names = sorted(name for name in os.environ if name.startswith("REFT_"))
    try:
        import torch  # noqa: F401

        from reft import _C
        from reft._link import settings
    except ImportError:
        return [Finding(WARN, "settings", "not checked: the native module does not load")]
    findings = []
    for name, near in settings.unknown():
        todo = f"did you mean {near}?" if near else "see docs/environment.md"
        findings.append(Finding(WARN, "settings", f"{name} is not a setting of reft", todo))
    try:
        _C.configure_faults(settings.read()["fault"], 0)
        _C.configure_faults("", 0)
    except _C.InvalidArgument as error:
        findings.append(Finding(FAIL, "settings", str(error), "correct or unset it"))
    if problem := _log_problem():
        findings.append(Finding(WARN, "settings", problem, "correct or unset it"))
    job = os.environ.get("REFT_JOB_ID", "")
    if job and job_identity.safe_id(job) != job:
        safe = job_identity.safe_id(job)
        text = f"REFT_JOB_ID={job!r} is not a valid name; the job is named {safe}"
        todo = f"use at most {job_identity.ID_CHARS} letters, digits, . _ - and no leading dot"
        findings.append(Finding(WARN, "settings", text, todo))
    if os.environ.get("REFT_DISABLE") == "1":
        findings.append(Finding(WARN, "settings", "REFT_DISABLE=1 switches reft off", "unset it"))
    if findings:
        return findings
    return [
        Finding(
            OK,
            "settings",
            ", ".join(f"{name}={os.environ[name]}" for name in names)
            or "no REFT_* variable is set",
        )
    ]


def _log_problem() -> str:
    """What a rank reports about REFT_LOG: on stderr, once in a process, when it logs first."""
    if not os.environ.get("REFT_LOG"):
        return ""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LOG_PROBE],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_PROBE_SEC,
        check=False,
    )
    _, name, problem = done.stderr.partition("REFT_LOG has ")
    return name + problem.partition("\n")[0]


def check_secret() -> list[Finding]:
    """The file that REFT_JOB_SECRET_FILE names, read as ranks do."""
    try:
        import torch  # noqa: F401

        from reft._link import secret
    except ImportError:
        return []  # another check reports it
    path = os.environ.get(secret.FILE, "")
    if not path:
        return []
    try:
        secret.given(Path(path))
    except OSError as error:
        fix = "name a file of 32 to 4096 bytes that only this user can read, or unset it"
        return [Finding(FAIL, "secret", f"{secret.FILE}: {error}", fix)]
    return [Finding(OK, "secret", f"{secret.FILE}={path}")]


def check_vault_dir() -> list[Finding]:
    given = os.environ.get("REFT_VAULT_DIR", "")
    if not given:
        return []
    directory = Path(given)
    if not directory.is_absolute():
        return [_relative("vault dir", "REFT_VAULT_DIR", directory)]
    exists = directory.is_dir()
    place = next(path for path in (directory, *directory.parents) if path.exists())
    if problem := _vault_place_problem(place):
        fix = "set REFT_VAULT_DIR to a directory on tmpfs, ext4 or xfs, or unset it"
        return [Finding(FAIL, "vault dir", f"{directory} {problem}", fix)]
    if unsafe := _unsafe("vault dir", "REFT_VAULT_DIR", directory):
        return unsafe
    if not exists:
        parent = next(path for path in directory.absolute().parents if path.exists())
        if directory.exists() or not os.access(parent, os.W_OK | os.X_OK):
            return [
                Finding(
                    FAIL,
                    "vault dir",
                    f"cannot create {directory}",
                    "set REFT_VAULT_DIR to a writable place",
                )
            ]
        return [Finding(OK, "vault dir", f"{directory} (the first job creates it)")]
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return [
            Finding(
                FAIL,
                "vault dir",
                f"{directory} is not writable",
                "set REFT_VAULT_DIR to a writable place",
            )
        ]
    return [
        Finding(
            OK, "vault dir", f"{directory}, {words.size(shutil.disk_usage(directory).free)} free"
        )
    ]


def _vault_place_problem(place: Path) -> str:
    try:
        from reft import _C
    except ImportError:
        return ""  # another check reports it
    return _C.vault_place_problem(str(place))


def check_agents(given: str | None) -> list[Finding]:
    findings = []
    for agent in agents.find(agents.run_dir(given)):
        try:
            status, _ = agent.ask(protocol.STATUS_REQUEST)
            count = len(status.get("ranks", []))
            findings.append(Finding(OK, "job", f"{agent.job}, node {agent.node}: {count} ranks"))
            findings += notes_of(agent.job, status) + copies_of(agent.job, status)
        except agents.Failure as problem:
            findings.append(
                Finding(WARN, "job", problem.message, "if the job is over: reft doctor --clean")
            )
    return findings or [Finding(OK, "job", "no job runs here")]


def notes_of(job: str, status: dict[str, Any]) -> list[Finding]:
    """The notes of a running job's ranks on their state, each once with its ranks."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank in status.get("ranks", []):
        for note in rank.get("notes", []):
            ranks_of.setdefault(tuple(note), []).append(int(rank["rank"]))
    inexact = {
        int(rank["rank"])
        for rank in status.get("ranks", [])
        if rank.get("stats", {}).get("resume_verdict") == protocol.RESUME_DIFFERS
    }
    findings = []
    for (about, where, kind, why), ranks in ranks_of.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        what = f"{where} ({kind})" if kind else where
        is_good = about == protocol.RESUME_NOTE and ranks[0] not in inexact
        is_bad = not is_good and about != protocol.ASSUMED_NOTE
        findings.append(Finding(WARN if is_bad else OK, job, f"{who}: {about} {what}: {why}"))
    return findings


def copies_of(job: str, status: dict[str, Any]) -> list[Finding]:
    """Which copies this node keeps for another one, and whether its own are kept."""
    mesh = status.get("mesh")
    if not mesh:
        return []
    kept = _voice.ranks(mesh["copies"]) if mesh["copies"] else "no rank"
    how = ", over encrypted connections" if mesh.get("tls") else ""
    findings = [Finding(OK, job, f"this node keeps copies of {kept} of other nodes{how}")]
    if mesh["connected"] < mesh["sources"]:
        missing = mesh["sources"] - mesh["connected"]
        why = mesh["problem"] or "not connected"
        findings.append(Finding(WARN, job, f"cannot reach {missing} of these nodes: {why}"))
    if mesh["keepers"] == 0:
        what = "no other node keeps copies of this one's snapshots: its loss is not survived"
        findings.append(Finding(WARN, job, what, "look into agent.log of the nodes"))
    return findings


def _guarded(check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  # a check that fails is a finding, the others go on
        return [
            Finding(FAIL, check.__name__.removeprefix("check_"), f"{type(error).__name__}: {error}")
        ]


def examine(run_dir: str | None) -> list[Finding]:
    """All findings; a check comes after those that it depends on."""

    def check_run_directory() -> list[Finding]:
        return check_run_dir(run_dir)

    def check_running() -> list[Finding]:
        return check_agents(run_dir)

    checks = [
        check_python,
        check_torch,
        check_native,
        check_autoload,
        check_agent,
        check_environment,
        check_secret,
    ]
    checks += [check_run_directory, check_vault_dir, check_memory, check_running]
    return [finding for check in checks for finding in _guarded(check)]


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option(
    "--run-dir", metavar="DIR", help="Directory of the agents' sockets. Default: REFT_RUN_DIR."
)
@click.option("--clean", is_flag=True, help="First remove and list what dead agents left.")
def command(as_json: bool, run_dir: str | None, clean: bool) -> None:
    """Checks this machine and its settings, and prints how to fix each problem.

    --clean first removes, and lists, what dead agents of this user left in the run directory:
    sockets, locks, logs, empty directories. It keeps hang reports and the logs next to them.

    --json prints {"result": ok|warn|fail, "findings": [{result, check, text, todo}, ...],
    "removed": [path, ...]}. Exit code 1 if a check fails; warnings alone leave 0.
    """
    removed = [str(path) for path in stale.clean(agents.run_dir(run_dir))] if clean else []
    findings = examine(run_dir)
    results = {finding.result for finding in findings}
    overall = FAIL if FAIL in results else WARN if WARN in results else OK
    if as_json:
        listed = [asdict(finding) for finding in findings]
        agents.print_json({"result": overall, "findings": listed, "removed": removed})
    else:
        for path in removed:
            words.console().print(Text(f"removed {path}"), soft_wrap=True)
        if clean and not removed:
            words.console().print("nothing to remove")
        _print(findings)
    if overall == FAIL:
        raise SystemExit(agents.EXIT_WRONG)


def _print(findings: list[Finding]) -> None:
    """Prints one line per finding; continues a longer text indented below."""
    console = words.console()
    styles: dict[str, Any] = {OK: "green", WARN: "yellow", FAIL: "bold red"}
    width = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        head = Text.assemble(
            (f"{finding.result:4}", styles[finding.result]), "  ", f"{finding.check:{width}}  "
        )
        words.print_folded(console, head, Text(finding.text))
        if finding.todo:
            words.print_folded(
                console, Text(" " * len(head)), Text(f"-> {finding.todo}", style="bold")
            )
