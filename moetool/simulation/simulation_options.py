"""Options of a simulation."""

from dataclasses import dataclass

from moetool.config import Span, require_within
from moetool.errors import unknown_name
from moetool.simulation.event_loop import ADMISSIONS
from moetool.simulation.simulated_costs import LINKS

MIGRATIONS = ("pipelined", "overlap", "stop", "free")
COPIES = ("host", "links")
PLANNINGS = ("free", "beside", "wait")
DECISIONS = ("auto", "eq4", "always")
LOOKAHEADS = ("true", "predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Options of a simulation.

    Attributes:
        seed: of arrivals, of the requests drawn, and of planners.
        split: share of each trace's requests that placements are made from; the others are drawn.
        prompt_tokens: the most that are taken of a prompt (0: all of it), also of those that placements are made from.
        decode_tokens: the most that a request decodes.
        pace: gaps between arrivals are divided by this.
        seats: requests that a GPU has under way at a time.
        admission: `seats` or `rounds` (`moetool.simulation.event_loop.EventLoop`); `auto`: rounds for DIRECTOR's modes.
        replan_s: how often modes that place anew do so where requests don't come in rounds (0: never).
        decay: of past statistics at each of these times.
        decide: `eq4`: migrate if Prism's Eq. 4 says so, for DIRECTOR's modes if Eq. 5 gains more than moving costs;
            `always`; `auto`: always for DIRECTOR's modes.
        migrate: how experts move. `pipelined`: while requests are served, in the queues of their links; `overlap`: so
            too, but only as long as tokens leave a link idle; `stop`: a round waits for them; `free`: at once and for
            nothing (DIRECTOR's Figures 6b, 6c and 6a).
        copies: how they come from a GPU of the same server. `host`: at the rate from host memory, in no queue;
            `links`: over the link between GPUs, which tokens use too.
        planning: when it runs where requests come in rounds. `free`: it takes no time; `beside`: while the round before
            is served, and the round waits for what is left (the first keeps its placement); `wait`: the round waits for
            all of it. A mode that sees only the past plans when a round ends and does not wait: its experts begin to
            move when the plan is made.
        plan_s: seconds of one planning (0: as many of the processor as it takes here).
        predict_share: of a round's seconds, what prediction of the next one takes beside planning.
        piece_bytes: that an expert on the move puts into a link's queue at a time.
        lookahead: knowledge of the queue in modes that see it: `true` routing, of decoded tokens too, or `predicted`
            from each prompt's tokens (cascade, replica) or, by other predictors, from what its first MoE layer chose;
            tokens to be decoded are then taken to be like the prompt's.
        links: `pair` or `server` (`moetool.simulation.simulated_costs.make_network`).
        window_s: of the local compute ratio over time.
        value_bytes: bytes of one number of a hidden state.
        token_bytes: bytes of a hidden state, where the trace does not tell the model's hidden size.

    Raises:
        UsageError: a value that makes no sense.
    """

    seed: int = 0
    split: float = 0.5
    prompt_tokens: int = 0
    decode_tokens: int = 20
    pace: float = 1.0
    seats: int = 1
    admission: str = "auto"
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

    def __post_init__(self) -> None:
        for name, known in (
            ("admission", ("auto", *ADMISSIONS)),
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
        require_within(self, "--set ", seed=zero, prompt_tokens=zero, replan_s=zero, token_bytes=zero, decay=Span(0, 1))
        require_within(self, "--set ", decode_tokens=one, seats=one, piece_bytes=one, value_bytes=one)
        require_within(self, "--set ", pace=more, window_s=more, plan_s=zero, predict_share=zero)
