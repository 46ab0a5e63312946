"""The common types of all packages, and the legend of shape letters.

Shape letters, used as suffixes of array names:

    L  MoE layers, counted 0..L-1 in the order of the model (`ModelSpec.layer_ids_L` has the absolute ids)
    E  experts of a layer            K  experts that a token uses (top-k)
    T  tokens of one forward         D  hidden size
    B  requests                      P  physical slots
    G  GPUs                          N  servers

An *expert* is logical, a *slot* is physical.
"""

from dataclasses import asdict, dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np

from moetool.base import config
from moetool.base import validation as check
from moetool.base.errors import MismatchError, UsageError, first_line

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
"""Functions from router logits to scores."""

REVISION_KIND = "r2-"
"""Prefix of every checkpoint's revision: the version of `moetool.models.files.revision`."""


class Phase(IntEnum):
    """Phase of a token's request."""

    PREFILL = 0
    DECODE = 1


UNKNOWN_BYTES = 1
"""Bytes of an expert whose size a foreign file does not say: experts are counted, and memory is a share of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Model facts that expert decisions depend on.

    Attributes:
        name: model type and path name, for display.
        revision: identity of the checkpoint (`moetool.models.files.revision`).
        layer_ids_L: absolute indices of the MoE layers among the model's layers.
        num_experts_L: routed experts of each MoE layer.
        top_k_L: experts that one token uses in each MoE layer.
        has_logits_L: whether the layer's router has logits over all experts that can be recorded.
        num_shared_experts: experts that every token uses; they are never offloaded.
        num_groups: router groups (1 where the router does not group).
        hidden_size: width D of the residual stream.
        expert_bytes_L: bytes of one routed expert as the checkpoint stores it.
        score_function: `softmax`, `sigmoid` or `sqrtsoftplus`: how the router turns logits into scores.
        renormalize: whether the top-k weights are divided by their sum.
    """

    name: str
    revision: str
    layer_ids_L: tuple[int, ...]
    num_experts_L: tuple[int, ...]
    top_k_L: tuple[int, ...]
    has_logits_L: tuple[bool, ...]
    num_shared_experts: int
    num_groups: int
    hidden_size: int
    expert_bytes_L: tuple[int, ...]
    score_function: str
    renormalize: bool

    @property
    def num_layers(self) -> int:
        """L, the number of MoE layers."""
        return len(self.layer_ids_L)

    @property
    def num_experts(self) -> int:
        """E of the widest layer; the stride of `expert_key`."""
        return max(self.num_experts_L)

    @property
    def total_experts(self) -> int:
        """Return the number of routed experts of the model."""
        return sum(self.num_experts_L)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a slot that fits any expert of the model."""
        return max(self.expert_bytes_L)

    @property
    def sized(self) -> bool:
        """Whether the size of an expert is known."""
        return self.slot_bytes != UNKNOWN_BYTES

    def require_sizes(self, path: object) -> None:
        """Refuse bytes of memory for a model whose experts have an unknown size. Raises: UsageError: they have."""
        if not self.sized:
            raise UsageError(
                f"{path} does not say how large an expert of {self.name} is; give memory as a share, such as 25%, or "
                f"import it again with --set expert_bytes=NUMBER"
            )

    @property
    def all_experts_bytes(self) -> int:
        """Return the bytes of all routed experts."""
        return sum(num * size for num, size in zip(self.num_experts_L, self.expert_bytes_L, strict=True))

    def expert_key(self, layer: int, expert: int) -> int:
        """Return the integer key of (layer, expert): layer * E + expert."""
        return layer * self.num_experts + expert

    def expert_of(self, key: int) -> tuple[int, int]:
        """Return (layer, expert) of a key."""
        return divmod(key, self.num_experts)

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for `from_json`."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ModelSpec":
        """Read a spec. Raises: MismatchError where fields are missing, unknown (another schema) or invalid."""
        try:
            spec = config.parse(cls, data, "model spec")
        except UsageError as error:
            raise MismatchError(first_line(error)) from None
        spec.validate()
        return spec

    def validate(self) -> None:
        """Raises: MismatchError for an impossible model."""
        layers = self.num_layers
        check.require_whole("spec.layer_ids_L: layers", layers, 1, check.MAX_LAYERS)
        for name in ("num_experts_L", "top_k_L", "has_logits_L", "expert_bytes_L"):
            found = len(getattr(self, name))
            check.require(found == layers, f"spec.{name}", f"{found} values", f"{layers}, as many as MoE layers")
        rising = all(a < b for a, b in pairwise(self.layer_ids_L))
        check.require(rising and self.layer_ids_L[0] >= 0, "spec.layer_ids_L", list(self.layer_ids_L), "rising from 0")
        for layer in range(layers):
            check.require_whole(f"spec.num_experts_L.{layer}", self.num_experts_L[layer], 1, check.MAX_EXPERTS)
            check.require_whole(f"spec.top_k_L.{layer}", self.top_k_L[layer], 1, self.num_experts_L[layer])
            check.require_whole(f"spec.expert_bytes_L.{layer}", self.expert_bytes_L[layer], 1)
        check.require_whole("spec: experts of all layers", self.total_experts, 1, check.MAX_TOTAL_EXPERTS)
        check.require_whole("spec.num_shared_experts", self.num_shared_experts, 0, check.MAX_EXPERTS)
        check.require_whole("spec.num_groups", self.num_groups, 1, check.MAX_EXPERTS)
        check.require_whole("spec.hidden_size", self.hidden_size, 0, check.MAX_WIDTH)  # 0 where it is not known
        check.require_one_of("spec.score_function", self.score_function, SCORE_FUNCTIONS)

    def require_same(self, other: "ModelSpec", mine: str, theirs: str) -> None:
        """Refuse two artefacts of different models.

        Args:
            mine: owner of this spec, for messages ("the trace").
            theirs: owner of `other` ("the predictor").

        Raises:
            MismatchError: the revisions differ.
        """
        if self.revision == other.revision:
            return
        kinds = {one.revision.startswith(REVISION_KIND) for one in (self, other)}
        earlier = len(kinds) == 2 and self.name == other.name
        why = " (an earlier moetool made one of them, with another rule for revisions)" if earlier else ""
        raise MismatchError(
            f"{theirs} was made for {other.name} ({other.revision[:12]}), but {mine} is of "
            f"{self.name} ({self.revision[:12]}){why}; make {theirs} again for this model"
        )

    def require_alike(self, other: "ModelSpec", mine: str, theirs: str) -> None:
        """Refuse two artefacts of models whose experts differ in number, layers or known width.

        Arguments as for `require_same`.

        Raises:
            MismatchError: they differ.
        """

        def facts(spec: ModelSpec) -> dict[str, int]:
            by_layer = {
                "layer {} as MoE layer": spec.layer_ids_L,
                "{} experts in MoE layer": spec.num_experts_L,
                "top-{} in MoE layer": spec.top_k_L,
            }
            numbered = {f"{fact} {i}": n for fact, values_L in by_layer.items() for i, n in enumerate(values_L)}
            known = {"a hidden size of {}": spec.hidden_size} if spec.hidden_size else {}
            return {"{} MoE layers": spec.num_layers, **numbered, **known}

        ours = facts(self)
        for fact, found in facts(other).items():
            if ours.get(fact, found) != found:
                raise MismatchError(
                    f"{theirs} has {fact.format(found)}, but {mine} is of {self.name} with {ours[fact]}; give --model "
                    f"the model of {mine}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInfo:
    """One forward pass of a batch, prefill and decode tokens mixed.

    Attributes:
        forward_id: running number of the forward.
        request_T: request of each token, as the scheduler's running numbers.
        phase_T: `Phase` of each token, from the state of its request (never from the query length).
        position_T: position of each token in its sequence.
        embedding_TD: for each token the mean output of the embedding layer over its request's tokens of this forward
            (float32), or None if not requested.
        token_id_T: token ids, -1 where a trace withholds them, or None without tokens.
        recorded_id: recorded number of the forward of its first token, -1 outside a trace.
    """

    forward_id: int
    request_T: tuple[int, ...]
    phase_T: tuple[int, ...]
    position_T: tuple[int, ...]
    embedding_TD: np.ndarray | None = None
    token_id_T: tuple[int, ...] | None = None
    recorded_id: int = -1

    @property
    def prefill(self) -> bool:
        """Whether any token of this forward belongs to a prompt."""
        return Phase.PREFILL in self.phase_T


@dataclass(frozen=True, slots=True, kw_only=True)
class GateEvent:
    """The experts that one forward needs at one MoE layer.

    Attributes:
        layer: index of the MoE layer, 0..L-1.
        experts_TK: experts of each token, by the model's own router.
        weights_TK: their weights in the sum (float32), or None if not requested.
        scores_TE: the router's scores over all experts (float32), or None.
        hidden_TD: hidden states at the router's input (float32), or None.
        ahead_ATE: scores of the next A MoE layers' routers on these hidden states (float32): row a is for layer + 1 +
            a, with fewer rows near the last layer; or None.
        resident_TE: scores of the next MoE layer's router if only resident and shared experts were computed (float32; 0
            at the last layer), or None.
        needed: the distinct experts of the event, ascending.
    """

    forward: ForwardInfo
    layer: int
    experts_TK: tuple[tuple[int, ...], ...]
    weights_TK: np.ndarray | None = None
    scores_TE: np.ndarray | None = None
    hidden_TD: np.ndarray | None = None
    ahead_ATE: np.ndarray | None = None
    resident_TE: np.ndarray | None = None
    needed: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needed", tuple(sorted({e for row in self.experts_TK for e in row})))

    @property
    def is_bare(self) -> bool:
        """Whether it has no column beyond the experts."""
        optional = (self.weights_TK, self.scores_TE, self.hidden_TD, self.ahead_ATE, self.resident_TE)
        return all(column is None for column in optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a server.

    Attributes:
        memory_bytes: its total memory.
        reserved_bytes: the part that experts may not use: the dense weights, keys and values, activations.
        host_to_device_bytes_s: rate of experts from host memory.
        speed: compute speed relative to the GPU of the cost profile.
    """

    memory_bytes: int
    reserved_bytes: int = 0
    host_to_device_bytes_s: float = 12e9
    speed: float = 1.0

    @property
    def expert_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server.

    Attributes:
        name: name in traces and links.
        gpus: at least one.
        cpu_threads: threads that may compute or copy.
        host_memory_bytes: memory to stage experts when no GPU has room.
        disk_bytes_s: rate of expert reads.
        gpu_link_bytes_s: rate between two of its GPUs.
    """

    name: str
    gpus: tuple[Gpu, ...]
    cpu_threads: int = 1
    host_memory_bytes: int = 16 * 2**30
    disk_bytes_s: float = 1e9
    gpu_link_bytes_s: float = 20e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A symmetric link between two servers.

    Attributes:
        between: names of the two servers.
        bytes_s: rate of the link.
        latency_s: seconds until the first byte arrives.
    """

    between: tuple[str, str]
    bytes_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Servers and the links between them. Its GPUs are numbered server by server.

    Attributes:
        servers: at least one.
        link_bytes_s: rate between servers without an entry in `links`.
        link_latency_s: latency between these servers.
    """

    servers: tuple[Server, ...]
    link_bytes_s: float = 125e6
    link_latency_s: float = 0.0
    links: tuple[Link, ...] = ()

    def validate(self) -> None:
        """Raises: MismatchError for no server or GPU, a name twice, a link to nowhere, or sizes and rates below 0."""
        check.require_whole("servers", len(self.servers), 1, check.MAX_GPUS)
        names = [server.name for server in self.servers]
        for n, server in enumerate(self.servers):
            at = f"servers.{n}"
            check.require(bool(server.name), f"{at}.name", server.name, "a name")
            check.require(bool(server.gpus), f"{at}.gpus", f"none of {server.name}", "at least one [[servers.gpus]]")
            check.require_positive(f"{at}.disk_bytes_s", server.disk_bytes_s)
            check.require_positive(f"{at}.gpu_link_bytes_s", server.gpu_link_bytes_s)
            check.require_whole(f"{at}.cpu_threads", server.cpu_threads, 1)
            check.require_whole(f"{at}.host_memory_bytes", server.host_memory_bytes, 0)
            for g, gpu in enumerate(server.gpus):
                check.require_whole(f"{at}.gpus.{g}.memory_bytes", gpu.memory_bytes, 1)
                check.require_whole(f"{at}.gpus.{g}.reserved_bytes", gpu.reserved_bytes, 0, gpu.memory_bytes)
                check.require_positive(f"{at}.gpus.{g}.host_to_device_bytes_s", gpu.host_to_device_bytes_s)
                check.require_positive(f"{at}.gpus.{g}.speed", gpu.speed)
        check.require_distinct("servers.name", names)
        check.require_whole("gpus of all servers", len(self.gpus), 1, check.MAX_GPUS)
        check.require_positive("link_bytes_s", self.link_bytes_s)
        check.require_number("link_latency_s", self.link_latency_s)
        known = set(names)
        for i, link in enumerate(self.links):
            for name in link.between:
                check.require(name in known, f"links.{i}.between", name, f"two of the servers {', '.join(names)}")
            check.require_distinct(f"links.{i}.between", link.between)
            check.require_positive(f"links.{i}.bytes_s", link.bytes_s)
            check.require_number(f"links.{i}.latency_s", link.latency_s)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Return all GPUs, in the order of their numbers."""
        return tuple(gpu for server in self.servers for gpu in server.gpus)

    @property
    def server_G(self) -> tuple[int, ...]:
        """Return the server of each GPU."""
        return tuple(n for n, server in enumerate(self.servers) for _ in server.gpus)

    def slots_G(self, slot_bytes: int) -> tuple[int, ...]:
        """Return the number of experts of `slot_bytes` that fit on each GPU."""
        return tuple(gpu.expert_bytes // slot_bytes for gpu in self.gpus)

    def link(self, a: int, b: int) -> tuple[float, float]:
        """Return (bytes/s, latency) between two servers, by number; within a server, that between its GPUs."""
        if a == b:
            return self.servers[a].gpu_link_bytes_s, 0.0
        names = {self.servers[a].name, self.servers[b].name}
        for link in self.links:
            if set(link.between) == names:
                return link.bytes_s, link.latency_s
        return self.link_bytes_s, self.link_latency_s

    def round_trip_s(self, a: int, b: int, num_bytes: float) -> float:
        """Return the seconds of sending bytes from one server to another and as many back."""
        bytes_s, latency_s = self.link(a, b)
        return 2 * (latency_s + num_bytes / bytes_s)
