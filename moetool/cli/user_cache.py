"""The command `moetool cache`: warm-start files that servers keep between runs."""

import time
from typing import Annotated

import typer

from moetool.base import tables
from moetool.base.assets import cache_folder
from moetool.base.errors import unknown_name
from moetool.cli.flags import Json


def cache(
    remove: Annotated[str | None, typer.Option(metavar="NAME|all", help="Name of the file to remove, or all.")] = None,
    as_json: Json = False,
) -> None:
    """List or remove what 'moetool serve' keeps: warm-start files, prefixes, costs of link and host."""
    from moetool.runtime.warm_start import kept_models

    kept = kept_models()
    if remove is not None:
        chosen = kept if remove == "all" else [one for one in kept if one.model == remove]
        if not chosen and remove != "all":
            raise unknown_name("model in the cache", remove, [one.model for one in kept])
        for one in chosen:
            one.path.unlink(missing_ok=True)
        tables.narrate(f"moetool: removed {tables.numbered(len(chosen), 'file')} from {cache_folder()}")
        return
    if as_json:
        facts = [{"model": k.model, "path": str(k.path), "bytes": k.num_bytes, "changed": k.changed} for k in kept]
        tables.print_json(facts)
        return
    if not kept:
        print(f"{cache_folder()} is empty")
        return
    rows = [
        [k.model, tables.count(k.num_bytes, "B"), time.strftime("%Y-%m-%d %H:%M", time.localtime(k.changed))]
        for k in kept
    ]
    tables.print_table(f"files in {cache_folder()}", ["name", "size", "date"], rows)
