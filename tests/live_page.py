"""What the live page reads from `/stats`, by its own script."""

import re
from typing import Any

from moetool.serving.live_page import PAGE

_OF_ARRAYS = {"at", "filter", "flat", "includes", "length", "map", "slice"}


def missing_fields(view: str, stats: dict[str, Any]) -> set[str]:
    """Fields that a view of the page reads from these statistics, and that they lack."""
    found = re.search(rf"^function {view}\(stats\) {{\n(.*?)^}}", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, f"the page has no function {view}"
    roots = {"stats": stats, "engine": stats.get("engine", {}), "server": stats.get("server", {})}
    roots["counters"] = roots["engine"].get("counters", {})
    read = re.findall(r"\b(stats|engine|server|counters)((?:\.\w+)+)", found[1].replace("(server, n) =>", ""))
    assert len(read) > 9
    missing = set()
    for root, path in read:
        value = roots[root]
        if root == "server" and not value:  # a server of a cluster
            value = stats["servers"][0]
        for name in path.split(".")[1:]:
            if name in _OF_ARRAYS or not isinstance(value, dict):
                break
            if name not in value:
                missing.add(root + path)
                break
            value = value[name]
    return missing
