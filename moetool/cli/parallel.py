"""`moetool serve --cluster … --mode ep`: expert parallelism, one endpoint for all ranks."""

import contextlib
from typing import TYPE_CHECKING

from moetool.base import garbage, tables
from moetool.base.config import parse
from moetool.cli.cluster_command import ClusterCommand
from moetool.cli.cluster_logs import folder_name, log_location, open_folder

if TYPE_CHECKING:
    from moetool.cluster.fork_server import ForkServer
    from moetool.cluster.launch import ClusterAddress


def serve_parallel(command: ClusterCommand, where: "ClusterAddress") -> None:
    """Serve a model on ranks in lockstep until an interruption.

    Raises:
        UsageError: another number of ranks than the plan has GPUs, or an unknown option.
    """
    from moetool.cluster.launch import prepare
    from moetool.cluster.ray_launch import head_address

    toward = head_address(where.address)  # before imports that take seconds
    with contextlib.ExitStack() as stack:
        if fork_server := prepare(where, "moetool.cluster.parallel.rank", 1):  # it imports while this process does
            stack.callback(fork_server.close)
        _serve(command, where, toward, fork_server)


def _serve(command: ClusterCommand, where: "ClusterAddress", toward: str, fork_server: "ForkServer | None") -> None:
    from moetool.cluster.parallel.rank_launch import RankProcesses
    from moetool.cluster.parallel.startup import open_head, rank_names, read_settings
    from moetool.cluster.transport import url_for_others
    from moetool.costing.costs import CostProfile
    from moetool.serving import server
    from moetool.serving.server_options import ServerOptions
    from moetool.serving.status_line import status_line

    plan = command.plan_for(where, "ranks", rank_names)
    names = rank_names(plan.cluster)
    rest = dict(command.values)
    allowed = parse(ServerOptions, rest.pop("server", {}), "--set server")
    if command.predictor is not None:
        rest["predictors"] = [str(command.predictor), *rest.get("predictors", ())]
        rest.setdefault("placement", "proactive")
    options, ranks = read_settings(rest)
    sock = server.bind(command.host, command.port)
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        folder = stack.enter_context(open_folder(f"ep-{folder_name(command.port)}", "ranks"))
        launcher = RankProcesses(where, names, threads=1 if where.count else 0, folder=folder, fork_server=fork_server)
        costs = None if command.profile is None else CostProfile.load(command.profile)
        head = open_head(
            *(command.model, plan, launcher, options, ranks),
            profile=costs,
            toward=toward,
            narrate=lambda line: tables.narrate(f"moetool: {line}"),
        )
        stack.callback(head.close)
        tables.narrate(f"moetool: starting {len(names)} ranks{log_location(folder, where.count)}")
        head.start()
        garbage.as_usual()
        for name, held in zip(names, head.stats()["experts_held"], strict=True):
            tables.narrate(f"moetool: rank {name} holds {held} of {plan.spec.total_experts} experts")
        url = f"moetool: placement {options.placement}, {ranks.seats} requests per rank in a batch; serving on"
        with status_line(head):
            server.warn_if_open(sock, command.api_key)
            server.HttpServer(
                head,
                sock,
                on_ready=lambda at: tables.narrate(f"{url} {url_for_others(at, command.host, toward)}/v1"),
                options=allowed,
                api_key=command.api_key,
            ).serve_forever()
