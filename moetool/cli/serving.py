"""The commands of the server and its client: `moetool serve` and `chat`."""

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetool.base import garbage, tables
from moetool.base.config import parse, parse_bytes, parse_settings
from moetool.base.errors import MismatchError, Problems, UsageError
from moetool.cli import cluster as cli_cluster
from moetool.cli.cluster_command import ClusterCommand
from moetool.cli.flags import ApiKey, Model, Recipe, Revision, ServedDevice, ServedHostMemory, open_predictor, settable
from moetool.models.files.hub import is_downloaded, parse_hub_name, with_revision

if TYPE_CHECKING:
    from moetool.caching.machine_split import SplitCosts
    from moetool.models.checkpoint import Checkpoint
    from moetool.runtime.automatic import ServeSetup


def serve(
    model: Model,
    plan: Annotated[Path | None, typer.Option(help="Cache plan, or placement plan with --cluster.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Serve on a cluster: local:N for N local servers, or HOST:PORT of a Ray head.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="Cluster mode: edge, or ep for expert parallelism (default: edge).")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Cache policy, or auto (default: the plan's, else auto).")] = None,
    predictor: Annotated[
        Path | None, typer.Option(help="Directory of a trained predictor (default: the plan's).")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Machine costs from 'moetool profile', for --mode ep.")] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for weights, KV cache and experts, e.g. 16GB (default: the plan's, else what is free)."
        ),
    ] = None,
    process_memory: Annotated[
        str | None,
        typer.Option(help="Limit of the process's resident memory on a CPU, e.g. 12GB (default: free memory)."),
    ] = None,
    device: ServedDevice = None,
    host_memory: ServedHostMemory = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on (0: any free one).")] = 8000,
    api_key: ApiKey = None,
    allowed_host: Annotated[
        list[str],
        typer.Option(help="Additional host name that clients may use, e.g. lab.example; * allows any. Repeatable."),
    ] = [],
    cors_origin: Annotated[
        list[str],
        typer.Option(help="Web origin that may call the server, e.g. https://chat.example; * allows any. Repeatable."),
    ] = [],
    ssl_certfile: Annotated[Path | None, typer.Option(help="PEM certificate chain; enables HTTPS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="PEM private key (default: in --ssl-certfile).")] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Trace directory to record gate logits and cache decisions in, for 'moetool replay'."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Download a model without asking on a terminal.")] = False,
    settings: Annotated[
        list[str],
        settable(
            "Further setting: kv_tokens=8192, dtype, devices, io_threads, host_compute=off, policy.OPTION, "
            "server.max_queue, ... (see 'moetool guide serving')."
        ),
    ] = [],
    revision: Revision = None,
    recipe: Recipe = None,
) -> None:
    """Serve a model larger than memory through an OpenAI-compatible API."""
    from moetool.caching.plan import CachePlan
    from moetool.caching.policy import policy_class

    model = with_revision(model, revision)
    flags: dict[str, Any] = {"allowed_hosts": allowed_host, "cors_origins": cors_origin}
    flags |= {"ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile}
    values = _with_access_flags(settings, flags, host, api_key)
    values |= {} if device is None else {"device": device}
    with Problems() as problems:
        sizes: dict[str, int | None] = {}
        for name, text in (("device", device_memory), ("process", process_memory), ("host", host_memory)):
            with problems.of(f"--{name}-memory: "):
                sizes[name] = None if text is None else parse_bytes(text)
        with problems.of():
            _require_api_key(api_key)
        if policy is not None and policy != "auto":
            with problems.of():
                policy_class(policy)
        if cluster is None and predictor is not None and not predictor.is_dir():
            with problems.of():
                open_predictor(predictor)
    values |= {} if host_memory is None else {"host_memory_bytes": sizes["host"]}
    if cluster is not None:
        given = {"--policy": policy, "--device-memory": device_memory, "--process-memory": process_memory, "--log": log}
        cli_cluster.serve_cluster(
            ClusterCommand(
                model=model,
                plan=plan,
                cluster=cluster,
                mode=mode or "edge",
                host=host,
                port=port,
                api_key=api_key,
                values=values,
                refused={name: value is not None for name, value in given.items()},
                predictor=predictor,
                profile=profile,
            )
        )
        return
    if profile is not None:
        raise UsageError("--profile is for --cluster --mode ep; on one machine the plan already includes one")
    if mode is not None:
        raise UsageError("--mode needs --cluster, e.g. --cluster local:3")
    if policy == "auto":
        policy = None
    try:
        chosen = CachePlan.load(plan) if plan is not None else None
    except (UsageError, MismatchError):
        assert plan is not None
        cli_cluster.require_no_placement(plan)
        raise
    values = _policy_options(values, policy, chosen)
    planned: list[str] = []
    if chosen is not None:
        taken = {"kv_tokens": chosen.kv_tokens, "dtype": chosen.dtype}
        planned = [name for name in taken if name not in values]
        planned += [name for name, flag in (("memory", device_memory), ("policy", policy)) if flag is None]
        values = {**taken, **values}
    if log is not None:  # a remembered policy without its state would be worse than the default
        values = {**values, "warm_start": False}
    from moetool.models.checkpoint import Checkpoint
    from moetool.runtime.assembly import build_engine, predictor_bytes
    from moetool.runtime.automatic import choose
    from moetool.runtime.budget import AUTO
    from moetool.serving import server
    from moetool.serving.server_options import ServerOptions
    from moetool.serving.status_line import status_line

    allowed = parse(ServerOptions, values.pop("server", {}), "--set server")
    server.tls_context(allowed)  # refuse an unusable file before a model is loaded
    sock = server.bind(host, port)
    try:
        memory = sizes["device"]
        named = policy or (chosen.policy if chosen is not None else AUTO)
        choose_for = partial(
            choose,
            values=values,
            device_memory_bytes=chosen.device_memory_bytes if chosen is not None and memory is None else memory,
            process_memory_bytes=sizes["process"],
            predictor_bytes=predictor_bytes("foresight" if named == AUTO else named, predictor, chosen),
            policy=named,
            planned=planned,
            slots=chosen.slots if chosen is not None and memory is None and named == chosen.policy else None,
        )
        if (on_hub := parse_hub_name(model)) is not None and not (Path(model).exists() or is_downloaded(on_hub)):
            config = Checkpoint.open(model, weights=False)
            choose_for(config)  # refuse too little memory before a long download
            _ask_before_download(config, sizes["process"], yes)
        checkpoint = Checkpoint.open(model)
        if chosen is not None:
            chosen.check(checkpoint.spec)  # before the plan's memory is found too small for another model
        setup = choose_for(checkpoint)
        options = setup.options
        if options.deterministic:
            allowed = replace(allowed, preempt_after_s=0.0)  # a resumed answer would be computed in other shapes
        engine = build_engine(
            checkpoint,
            options=options,
            plan=chosen,
            policy=setup.policy if chosen is None else policy,
            predictor=predictor,
            device_memory_bytes=setup.budget,
            log=log,
        )
    except BaseException:
        sock.close()
        raise
    engine.start()
    choices = [_used_slots(row, engine.store.num_slots, engine.spec.total_experts, setup) for row in setup.choices]
    for line in tables.aligned(choices):
        tables.narrate(f"moetool: {line}")
    garbage.as_usual()  # in a long-lived server a full collection over torch would add to latency
    slots = engine.store.num_slots
    among = f" on {options.devices} devices" if options.devices > 1 else ""
    below = (
        f", {tables.count(engine.store.host_pool_bytes, 'B')} in host memory" if engine.store.host_pool_bytes else ""
    ) + (f", read {engine.host_order}" if engine.host_order else "")
    tables.narrate(
        f"moetool: {model} under {setup.policy}: {slots} of "
        f"{engine.spec.total_experts} experts fit{among} ({tables.count(engine.store.pool_bytes, 'B')}{below})"
    )

    if engine.split is not None:
        tables.narrate(f"moetool: {_host_compute(engine.split.costs, engine.spec.slot_bytes)}")

    def ready(url: str) -> None:
        tables.narrate(f"moetool: serving on {url}/v1")

    try:
        with status_line(engine):
            server.warn_if_open(sock, api_key)
            server.HttpServer(
                engine, sock, on_ready=ready, options=allowed, api_key=api_key, settings=choices
            ).serve_forever()
    finally:
        engine.close()
    if log is not None:
        tables.narrate(f"moetool: gate log written to {log}")


def _host_compute(costs: "SplitCosts", expert_bytes: int) -> str:
    """Return the line on the split of misses: measured rates of link and host, alone and together."""
    link, host = (tables.count(round(expert_bytes / seconds), "B") for seconds in (costs.load_s, costs.host_s))
    return (
        f"misses are loaded over the link ({link}/s) or computed on the host ({host}/s), together at "
        f"{costs.link_share:.2f} and {costs.host_share:.2f} of these rates (costs {costs.digest})"
    )


def _used_slots(row: tuple[str, str, str], slots: int, total_experts: int, setup: "ServeSetup") -> tuple[str, str, str]:
    """Return a row of the settings, that of expert slots with those of a policy that uses fewer than fit."""
    if row[0] != "expert slots" or slots >= setup.budget.slots:
        return row
    return row[0], f"{slots} of {total_experts}", f"all that {setup.policy} uses; {setup.budget.slots} fit"


def _ask_before_download(config: "Checkpoint", host_bytes: int | None, yes: bool) -> None:
    """Print the estimate of a model that is not here yet, and on a terminal ask whether to download it.

    Raises:
        typer.Abort: the user declines.
    """
    from moetool.cli.fit import headline
    from moetool.measuring.fit import FitOptions, fit

    found = fit(config, FitOptions(host_bytes=host_bytes))
    tables.narrate(f"moetool: {headline(found)}")
    tables.narrate(f"moetool: more with 'moetool fit {config.name}'")
    if not yes and tables.asks():
        typer.confirm("Download it and serve it?", default=True, abort=True, err=True)


def _policy_options(values: dict[str, Any], policy: str | None, plan: Any) -> dict[str, Any]:
    """Return the values with `POLICY.OPTION`, the spelling of `moetool replay`, as `policy.OPTION`.

    Raises:
        UsageError: an option of another policy than the served one.
    """
    from moetool.base import plugins

    given = {name for name, value in values.items() if isinstance(value, dict)} & {*plugins.names("policy"), policy}
    if not given:
        return values
    served = policy or (None if plan is None else plan.policy)
    if others := sorted(given - {served}):
        where = f"this server uses {served}" if served else "the policy is chosen automatically"
        raise UsageError(f"--set {others[0]}.OPTION is for policy {others[0]}, but {where}; add --policy {others[0]}")
    options = values.get("policy", {})
    kept = {name: value for name, value in values.items() if name != served}
    return {**kept, "policy": {**options, **values[str(served)]}} if isinstance(options, dict) else values


def _with_access_flags(
    given: Sequence[str], flags: Mapping[str, Any], host: str, api_key: str | None
) -> dict[str, Any]:
    """Return the values of `--set` with the access flags among the server's."""
    from moetool.serving.web_names import host_name

    values = parse_settings(given)
    server = values.get("server", {})
    if not isinstance(server, dict):
        return values  # the reader refuses it
    hosts = [*_listed(server.get("allowed_hosts", [])), *flags["allowed_hosts"]]
    if (hosts or api_key is None) and host_name(host):
        hosts.append(host)
    origins = [*_listed(server.get("cors_origins", [])), *flags["cors_origins"]]
    files = {name: str(flags[name]) for name in ("ssl_certfile", "ssl_keyfile") if flags[name] is not None}
    return {**values, "server": {**server, "allowed_hosts": hosts, "cors_origins": origins, **files}}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _require_api_key(api_key: str | None) -> None:
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise UsageError("an API key is printable ASCII without spaces around it, at least one character")


def chat(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Server URL, e.g. http://127.0.0.1:8000.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="MOETOOL_API_KEY", show_default=False, help="API key of the server.")
    ] = None,
    settings: Annotated[list[str], settable("Field of every request, e.g. temperature=0.")] = [],
) -> None:
    """Chat with a server in the terminal. Ctrl-C stops an answer; Ctrl-D or an empty line quits."""
    from moetool.serving.chat import Conversation, ServerRefused

    fields = parse_settings(settings)
    conversation = Conversation(url, api_key, fields)
    _warn_of_ignored(fields)
    tables.narrate(tables.printable(f"moetool: {conversation.model}"))
    while text := _next_line():
        dropped = conversation.num_dropped
        try:
            for piece in conversation.ask(text):
                print(tables.printable(piece, keep=_SPOKEN), end="", flush=True)
            print()
            if conversation.num_dropped > dropped:
                tables.narrate("moetool: the chat outgrew the model's context; its oldest turns were dropped")
        except ServerRefused as refused:
            if not refused.is_recoverable:
                raise
            tables.narrate(tables.printable(f"moetool: {refused}"))
        except KeyboardInterrupt:
            tables.narrate("\nmoetool: stopped; the answer is discarded")


def _warn_of_ignored(fields: Mapping[str, Any]) -> None:
    """Warn about fields that a moetool server ignores, as OpenAI's does; other servers may know more."""
    from moetool.serving.request_schema import ChatRequest, CompletionRequest

    known = {**ChatRequest.model_fields, **CompletionRequest.model_fields}
    for name in fields:
        if name not in known and (near := difflib.get_close_matches(name, known, n=1)):
            tables.narrate(f"moetool: moetool servers ignore {name!r}; did you mean {near[0]!r}?")


_SPOKEN = "\n\t\xa0\u3000\u200c\u200d"
"""Characters of written language that Python calls unprintable: blanks, and joiners of scripts and emoji."""


def _next_line() -> str:
    """Return the user's next line; empty at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""
