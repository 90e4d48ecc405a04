"""`lingbot keys`: make, list, revoke."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from compose.cli import output
from compose.cli.options import JsonOption, KeyOption, UrlOption, connected
from compose.cli.paths import path

app = typer.Typer(help="API keys: make, list, revoke (needs a key with the scope admin).", no_args_is_help=True)


@app.command()
def create(
    scopes: Annotated[str, typer.Option(help="Any of submit, read, admin, with commas between.")] = "submit,read",
    tenant: Annotated[str | None, typer.Option(help="Whose key; yours when it is not given.")] = None,
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    direct: Annotated[
        bool, typer.Option("--direct", help="Straight into the store of the settings: the first key.")
    ] = False,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Make a key. It is shown once."""
    granted = [scope.strip() for scope in scopes.split(",")]
    if direct:
        sys.stdout.write(_create_directly(tenant, granted, name) + "\n")
        return
    body: dict[str, Any] = {"scopes": granted, "name": name}
    with connected(url, key) as client:
        made = client.post("/v1/keys", body | ({"tenant": tenant} if tenant else {}))
    sys.stdout.write(f"{made['key']}\n")
    output.remark(
        f"id {made['id']}, tenant {made['tenant']}, scopes {', '.join(made['scopes'])}; it is not shown again"
    )


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Keys that are valid now, without their secrets."""
    with connected(url, key) as client:
        found = client.get("/v1/keys", tenant=tenant)["data"]
    if as_json:
        output.show_json(found)
    else:
        rows = [(each["id"], each["tenant"], ", ".join(each["scopes"]), each["name"]) for each in found]
        output.show_table(("id", "tenant", "scopes", "name"), rows)


@app.command()
def revoke(key_id: str, url: UrlOption = None, key: KeyOption = None) -> None:
    """Revoke a key by its id. It stops working within two seconds."""
    with connected(url, key) as client:
        client.delete(path("keys", key_id))
    output.remark(f"revoked {key_id}")


def _create_directly(tenant: str | None, scopes: list[str], name: str) -> str:
    from brokers import settings
    from compose import keys

    if tenant is None:
        raise typer.BadParameter("--direct needs --tenant")
    try:
        return keys.create(settings.read(), tenant, scopes, name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
