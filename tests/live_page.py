"""Fields of `/stats` that the live page reads, by its own script."""

import re
from typing import Any

from moetool.serving.live_page import PAGE

_OF_ARRAYS = {"filter", "flat", "includes", "length"}
_READ = re.compile(
    r"""
    (?:(?P<alias>\w+)[ ]=[ ])?
    \b(?P<root>[a-z]\w*) (?P<path>(?:\.(?!map\b|forEach\b|slice\b|at\b)\w+|\[n\])*)
    (?P<last>\.at\(-1\))?
    (?:(?:\.slice\([^()]*\))?\.(?:map|forEach)\(\(?(?P<item>\w+))?
    | \[\w*,[ ](?P<entry>row)\]\)[ ]=>  # of the compared policies
    """,
    re.VERBOSE,
)


def missing_fields(view: str, stats: dict[str, Any]) -> set[str]:
    """Fields that a view of the page reads from these statistics and that they lack; of an empty list its first row."""
    found = re.search(rf"^function {view}\(stats\) {{\n(.*?)^}}", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, f"the page has no function {view}"
    oracle = stats.get("engine", {}).get("oracle") or {}
    known = {"stats": stats, "engine": stats.get("engine"), "server": stats.get("server")}
    missing, reads = set(), 0
    for read in _READ.finditer(found[1]):
        root, path, item, alias = read["root"], read["path"], read["item"], read["alias"]
        if read["entry"]:
            known["row"] = oracle.get("serving")
        if alias == "latest":
            known["latest"] = list(stats["latest"].values())
        if root not in known:
            continue
        value = known[root]
        for name in re.findall(r"\w+", path):
            if name in _OF_ARRAYS or value is None:
                value = None
                break
            reads += 1
            if isinstance(value, list) or (name == "n" and value):
                value = value[0] if isinstance(value, list) else next(iter(value.values()))
            elif isinstance(value, dict) and name in value:
                value = value[name]
            else:
                missing.add(root + path)
                value = None
                break
        if value == [] and (item or read["last"]):
            missing.add(f"{root}{path}[0]")
        if item or read["last"]:
            value = value[0] if value else None
        if item:
            known[item] = value
        elif alias and alias != "latest":
            known[alias] = value
    assert reads > 9
    return missing
