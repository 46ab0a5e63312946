"""The folder of a cluster: one head at a time, and servers of one command."""

from pathlib import Path

import pytest

from moetool.base.errors import MismatchError, UsageError
from moetool.cluster.cluster_folder import ClusterFolder
from moetool.cluster.worker_process import ProcessRecord
from tests.refusals import refused

LIVING = {"s0": ProcessRecord(host="127.0.0.1", port=1, pid=7, mark="m", started=0, certificate="")}


@pytest.mark.follows("moetool.cluster.cluster_folder ClusterFolder.__init__")
def test_two_heads_need_two_names(tmp_path: Path) -> None:
    folder = ClusterFolder("c", tmp_path)
    with refused(UsageError, "cluster c", "--set cluster.name=NAME"):
        ClusterFolder("c", tmp_path)
    ClusterFolder("d", tmp_path).close()
    folder.close()
    ClusterFolder("c", tmp_path).close()  # the first head has stopped


@pytest.mark.follows("moetool.cluster.cluster_folder ClusterFolder.require_same")
def test_servers_of_another_command_end_first_or_keep_their_name(tmp_path: Path) -> None:
    folder, other = ClusterFolder("c", tmp_path), ClusterFolder("d", tmp_path)
    folder.require_same(["a"], {})
    folder.require_same(["a"], LIVING)
    with refused(MismatchError, "7 on 127.0.0.1", "--set cluster.name=NAME"):
        folder.require_same(["b"], LIVING)
    other.require_same(["b"], other.living())
    folder.require_same(["b"], {})  # they have ended
    folder.close()
    other.close()
