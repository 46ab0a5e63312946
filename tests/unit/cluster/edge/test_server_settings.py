"""Keys and tokens stand in no representation, for those end up in logs and tracebacks."""

import importlib
import pkgutil
from dataclasses import fields, is_dataclass
from types import ModuleType

import pytest

import moetool
from moetool.cli.cluster_command import ClusterCommand
from moetool.cluster.edge.server_settings import Endpoints
from moetool.serving.chat import Conversation

KEY = "sk-do-not-print-me"
HOLD_KEYS = ("moetool.serving.chat", "moetool.cli", "moetool.cluster", "moetool.serving")


def _modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(moetool.__path__, "moetool.")
    return [importlib.import_module(module.name) for module in found if module.name.startswith(HOLD_KEYS)]


def test_no_dataclass_shows_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conversation, "first_model", lambda self: "reference")  # nobody is asked
    command = ClusterCommand(
        model="reference",
        plan=None,
        cluster="local:3",
        mode="edge",
        host="127.0.0.1",
        port=0,
        api_key=KEY,
        values={},
        refused={},
    )
    for one in (command, Endpoints(api_key=KEY), Conversation("http://localhost", KEY)):
        assert one.api_key == KEY and KEY not in repr(one)


def test_no_field_that_is_named_for_a_secret_is_shown() -> None:
    kinds = {
        kind
        for module in _modules()
        for kind in vars(module).values()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__.startswith("moetool.")
    }
    secrets = [
        (kind.__name__, field)
        for kind in kinds
        for field in fields(kind)
        if field.name in ("api_key", "key", "password", "secret") or (field.name == "token" and field.type is bytes)
    ]
    assert {name for name, _ in secrets} >= {"ClusterCommand", "Conversation", "Endpoints", "Identity", "Authority"}
    assert not [f"{name}.{field.name}" for name, field in secrets if field.repr]
