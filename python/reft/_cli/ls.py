"""`reft ls`: vaults and the snapshots in them."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table
from rich.text import Text

from reft._cli import agents, native, vaults, words


def describe(vault: vaults.Vault) -> dict[str, Any]:
    """The contents of one vault; `error` instead if it cannot be read.

    Raises:
        Failure: as `Vault.open`.
    """
    native.need()

    from reft import _C

    result: dict[str, Any] = {"vault": vault.name, "live": vault.live}
    try:
        with vault.open() as fd:
            result.update(_C.list_vault(fd))
    except (_C.Error, OSError, ValueError) as error:
        result["error"] = str(error)
    return result


def rows(listing: dict[str, Any]) -> list[tuple[int, str, int, dict[str, Any] | None]]:
    """(slot, state, step, details) of every slot; a sealed slot without details is damaged."""
    details = {int(slot["slot"]): slot for slot in listing.get("slots", [])}
    result = []
    for index, (state, step, _) in enumerate(listing.get("raw_slots", [])):
        found = details.get(index)
        result.append(
            (index, "damaged" if state == "sealed" and found is None else state, int(step), found)
        )
    return result


def _table(listings: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "slot", "state", "step", "payload", "regions", "vault"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for listing in listings:
        for index, state, step, found in rows(listing):
            first = index == 0
            table.add_row(
                str(listing["rank"]) if first else "",
                str(index),
                Text(state, style={"sealed": "green", "damaged": "bold red"}.get(state, "")),
                words.step(step) if state != "empty" else "-",
                words.size(found["payload_bytes"]) if found else "-",
                str(found["regions"]) if found else "-",
                words.size(listing["bytes"]) if first else "",
            )
    return table


@click.command("ls")
@click.option(
    "--vault-dir", metavar="DIR", help="List the vault files there instead of asking agents."
)
@agents.common_options
def command(vault_dir: str | None, job: str | None, run_dir: str | None, as_json: bool) -> None:
    """Lists the vaults of a job and what their slots hold: empty, writing, sealed or damaged.

    --json prints {"vaults": [...], "foreign": [{"path", "what"}, ...]}; foreign lists *.vault
    entries that are not regular files. Exit code 1 if a vault cannot be read or a slot is damaged.
    """
    listings, foreign = vaults.read(vaults.find(vault_dir, job, run_dir), describe)
    wrong = any(
        "error" in listing or any(row[1] == "damaged" for row in rows(listing))
        for listing in listings
    )
    if as_json:
        agents.print_json({"vaults": listings, "foreign": foreign})
    else:
        console = words.console()
        for job in dict.fromkeys(str(listing["job"]) for listing in listings if "job" in listing):
            console.print(Text(f"job {job}", style="bold"), soft_wrap=True)
            console.print(_table([listing for listing in listings if listing.get("job") == job]))
        for listing in listings:
            if "error" in listing:
                text = Text(f"{listing['vault']}: {listing['error']}", style="bold red")
                words.print_folded(console, Text(""), text)
        for entry in foreign:
            words.print_folded(console, Text(""), Text(vaults.not_a_vault(entry), style="yellow"))
    if wrong:
        raise SystemExit(agents.EXIT_WRONG)
