"""`reft verify`: hashes every sealed snapshot again."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from reft._cli import agents, ls, native, vaults, words


def check(vault: vaults.Vault) -> dict[str, Any]:
    """Hashes all chunks of the sealed slots of one vault.

    Returns:
        `{vault, rank, job, slots: [{slot, step, result, faults}], error}`; result is ok, corrupt or
        overwritten.

    Raises:
        Failure: as `Vault.open`.
    """
    native.need()

    from reft import _C

    result: dict[str, Any] = {"vault": vault.name, "slots": []}
    try:
        with vault.open() as fd:
            verified = _C.verify_vault(fd)
            result.update({key: verified[key] for key in ("job", "rank")})
            for slot in verified["slots"]:
                state = (
                    "overwritten" if slot["overwritten"] else "corrupt" if slot["faults"] else "ok"
                )
                result["slots"].append({**slot, "result": state})
            # A slot whose header, table or objects do not check out is no slot for a reader.
            seen = {slot["slot"] for slot in result["slots"]}
            for index, state, step, _ in ls.rows(_C.list_vault(fd)):
                if state == "damaged" and index not in seen:
                    result["slots"].append(
                        {"slot": index, "step": step, "result": "corrupt", "faults": []}
                    )
    except (_C.Error, OSError, ValueError) as error:
        result["error"] = str(error)
    return result


@click.command("verify")
@click.option(
    "--vault-dir", metavar="DIR", help="Check the vault files there instead of asking agents."
)
@agents.common_options
def command(vault_dir: str | None, job: str | None, run_dir: str | None, as_json: bool) -> None:
    """Hashes all chunks of all sealed snapshots again, and compares the hashes with those that
    the copy stored.

    A running job continues meanwhile. If it overwrites a snapshot during the check, the result is
    "overwritten". --json prints {"ok", "vaults": [...], "foreign": [{"path", "what"}, ...]};
    foreign lists *.vault entries that are not regular files. Exit code 1 if anything is corrupt or
    a vault cannot be read.
    """
    results, foreign = vaults.read(vaults.find(vault_dir, job, run_dir), check)
    corrupt = any(
        "error" in result or any(slot["result"] == "corrupt" for slot in result["slots"])
        for result in results
    )
    if as_json:
        agents.print_json({"ok": not corrupt, "vaults": results, "foreign": foreign})
    else:
        console = words.console()
        for result in results:
            if "error" in result:
                console.print(
                    Text(f"{result['vault']}: cannot be read: {result['error']}", style="bold red")
                )
                continue
            if not result["slots"]:
                console.print(Text(f"rank {result['rank']}: no sealed snapshot", style="yellow"))
            for slot in result["slots"]:
                _print_slot(console, result["rank"], slot)
        for entry in foreign:
            words.print_folded(console, Text(""), Text(vaults.not_a_vault(entry), style="yellow"))
    if corrupt:
        raise SystemExit(agents.EXIT_WRONG)


def _print_slot(console: Any, rank: int, slot: dict[str, Any]) -> None:
    head = f"rank {rank} slot {slot['slot']} step {words.step(slot['step'])}: "
    if slot["result"] == "ok":
        size = words.size(slot["payload_bytes"])
        console.print(
            Text(head) + Text("ok", style="green") + Text(f", {slot['chunks']} chunks, {size}")
        )
    elif slot["result"] == "overwritten":
        console.print(Text(head) + Text("overwritten while it was read", style="yellow"))
    elif not slot["faults"]:
        console.print(
            Text(head) + Text("corrupt", style="bold red") + Text(": header, table or objects")
        )
    else:
        count = len(slot["faults"])
        console.print(
            Text(head)
            + Text("corrupt", style="bold red")
            + Text(f", {count} of {slot['chunks']} chunks")
        )
        for fault in slot["faults"][:8]:
            console.print(
                Text(
                    f"  chunk at byte {fault['payload_offset']}: hash {fault['found']}, expected {fault['expected']}"
                )
            )
        if count > 8:
            console.print(Text(f"  and {count - 8} more"))
