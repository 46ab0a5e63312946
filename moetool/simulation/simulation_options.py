"""Options of a simulation."""

from dataclasses import dataclass

from moetool.base.config import Span, require_within
from moetool.base.errors import UsageError, unknown_name
from moetool.simulation.lockstep import EXCHANGES
from moetool.simulation.simulated_costs import LINKS

MODES = ("auto", "edge", "ep")
ADMISSIONS = ("auto", "seats", "rounds")
MIGRATIONS = ("pipelined", "overlap", "stop", "free")
COPIES = ("host", "links")
PLANNINGS = ("free", "beside", "wait")
DECISIONS = ("auto", "eq4", "printed", "always")
LOOKAHEADS = ("true", "predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Options of a simulation.

    Attributes:
        seed: seed of arrivals, drawn requests and planners.
        split: share of each trace's requests for placements; the others are drawn.
        prompt_tokens: maximum length of prompts (0: no limit), also of those for placements.
        decode_tokens: maximum number of new tokens.
        pace: gaps between arrivals are divided by this.
        mode: as of `serve`. `edge`: servers that call each other's experts; `ep`: ranks in lockstep; `auto`: ep for
            DIRECTOR's modes.
        seats: concurrent requests per GPU.
        admission: of ranks. `seats`: a request joins when a seat is free; `rounds`: static batches, each as large as
            the seats; `auto`: rounds for DIRECTOR's modes.
        chunk_tokens: tokens of a rank in a step; longer prompts take several steps (0: no limit).
        exchange: `rows` or `gather` (`moetool.simulation.lockstep.RankMachines`).
        replan_s: seconds between re-placement decisions of edge servers (0: never).
        decay: factor of past statistics at each decision of edge servers; ranks count the last batch alone.
        decide: `eq4`: migrate if Prism's Eq. 4 holds, or, in DIRECTOR's modes, if Eq. 5 gains more than moving costs;
            `printed`: if Eq. 4 holds as printed; `always`; `auto`: always for DIRECTOR's modes.
        migrate: form of migration (DIRECTOR's Figures 6b, 6c and 6a). `pipelined`: during serving; `free`: at once and
            without cost. For ranks also `overlap`: during serving, while ranks compute; `stop`: a batch waits for the
            moves.
        copies: source of copies within a server of ranks. `host`: host memory at its rate; `links`: the link between
            GPUs, which tokens use too, as copies from another server always do.
        planning: time of planning for ranks. `free`: none; `beside`: during the previous batch, and the batch waits for
            the rest (the first keeps its placement); `wait`: the batch waits for all of it. A mode that sees only the
            past plans when a batch ends and does not wait: its experts move when the plan is ready.
        plan_s: seconds of one planning (0: the processor time measured here).
        predict_share: share of a batch's seconds for the prediction of the next, in addition to planning.
        piece_bytes: bytes of a moving expert per entry in the queue of a link between edge servers.
        lookahead: routing of the queue in modes that see it. `true`: the real one, decoded tokens included;
            `predicted`: from each prompt's tokens (cascade, replica), or by other predictors from the experts of its
            first MoE layer. New tokens then count like the prompt's.
        links: of edge servers, `pair` or `server` (`moetool.simulation.simulated_costs.make_network`); ranks have
            a link for each GPU (`moetool.simulation.lockstep.LockstepRanks`).
        window_s: seconds per window of the local compute share over time.
        value_bytes: bytes of one number of a hidden state.
        token_bytes: bytes of a hidden state, if the trace lacks the hidden size.
        expert_bytes: bytes of a moved expert, to simulate larger experts than the trace's (0: the trace's).

    Raises:
        UsageError: a value is invalid.
    """

    seed: int = 0
    split: float = 0.5
    prompt_tokens: int = 0
    decode_tokens: int = 20
    pace: float = 1.0
    mode: str = "auto"
    seats: int = 1
    admission: str = "auto"
    chunk_tokens: int = 0
    exchange: str = "rows"
    replan_s: float = 300.0
    decay: float = 0.5
    decide: str = "auto"
    migrate: str = "pipelined"
    copies: str = "host"
    planning: str = "free"
    plan_s: float = 0.0
    predict_share: float = 0.0
    piece_bytes: int = 1 << 16
    lookahead: str = "true"
    links: str = "pair"
    window_s: float = 60.0
    value_bytes: int = 2
    token_bytes: int = 0
    expert_bytes: int = 0

    def __post_init__(self) -> None:
        for name, known in (
            ("mode", MODES),
            ("admission", ADMISSIONS),
            ("exchange", EXCHANGES),
            ("decide", DECISIONS),
            ("migrate", MIGRATIONS),
            ("copies", COPIES),
            ("planning", PLANNINGS),
            ("lookahead", LOOKAHEADS),
            ("links", LINKS),
        ):
            if getattr(self, name) not in known:
                raise unknown_name(f"--set {name}", getattr(self, name), known)
        zero, one, more = Span(0), Span(1), Span(0, above=True)
        require_within(self, "--set ", seed=zero, prompt_tokens=zero, replan_s=zero, decay=Span(0, 1))
        require_within(self, "--set ", decode_tokens=one, seats=one, piece_bytes=one, value_bytes=one)
        require_within(self, "--set ", pace=more, window_s=more, plan_s=zero, predict_share=zero)
        require_within(self, "--set ", token_bytes=zero, expert_bytes=zero, chunk_tokens=zero)

    def in_lockstep(self, batches: bool) -> bool:
        """Return whether ranks in lockstep serve a mode.

        Args:
            batches: `PlacementMode.batches` of the mode.
        """
        return batches if self.mode == "auto" else self.mode == "ep"

    def require_edge(self) -> None:
        """Raises: UsageError: an option needs ranks in lockstep."""
        for name, value, known in (
            ("migrate", self.migrate, ("pipelined", "free")),
            ("admission", self.admission, ("auto", "seats")),
            ("chunk_tokens", self.chunk_tokens, (0,)),
            ("exchange", self.exchange, ("rows",)),
            ("copies", self.copies, ("host",)),
            ("planning", self.planning, ("free",)),
            ("plan_s", self.plan_s, (0.0,)),
            ("predict_share", self.predict_share, (0.0,)),
        ):
            if value not in known:
                raise UsageError(f"--set {name}={value} needs ranks in lockstep; add --set mode=ep, or leave it out")
