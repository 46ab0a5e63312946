"""The table of a replay."""

from collections.abc import Sequence

from moetool.base.tables import TextTable, count, milliseconds, percent
from moetool.tuning.replay import ReplayRow


def replay_table(
    title: str, rows: Sequence[ReplayRow], chosen: Sequence[ReplayRow] = (), whole_bytes: int = 0, sized: bool = True
) -> TextTable:
    """Compare policies, with times where there is a timeline.

    Marked are the `chosen` rows, and those whose predictor was trained on the replayed requests.

    With `whole_bytes`, the size of all experts, budgets are also shares. Host compute is not a load but reads weights,
    which have their own column if there are any. Unless experts are `sized`, their number stands for bytes.
    """
    timed = any(row.timing is not None for row in rows)
    hosted = any(row.host_bytes_per_decode_token for row in rows)
    columns = ["policy", "budget", "slots", "hit rate", "in decode", "loads"]
    columns += ["loaded", "MB/decode token"] if sized else ["loads/decode token"]
    columns += ["MB on host/token" if sized else "on host/token"] if hosted else []
    split = any(row.misses != "load" for row in rows)
    bounded = any(row.bound_s is not None for row in rows)
    columns[1:1] = ["misses"] * split
    columns += ["TTFT ms", "TPOT ms", "bound ms", "stall", "late"] if timed else []
    columns += ["link+host ms"] if bounded else []
    table = []
    for row in rows:
        size = count(row.budget_bytes, "B") if sized else f"{row.budget_bytes:,} experts"
        moved, on_host = (
            f"{number / 1e6:,.3f}" if sized else f"{number:,.1f}"
            for number in (row.bytes_per_decode_token, row.host_bytes_per_decode_token)
        )
        cells = [
            row.policy + " (auto)" * (row in chosen) + f" (trained on {row.trained_on})" * (row.trained_on > 0),
            *([row.misses] if split else []),
            f"{size} ({percent(row.budget_bytes / whole_bytes, '.4g')})" if whole_bytes else size,
            f"{row.slots:,}",
            f"{row.counts.hit_rate:.3f}",
            f"{row.decode.hit_rate:.3f}" if row.decode.needed else "-",
            count(row.counts.loads),
            *([count(row.loaded_bytes, "B")] if sized else []),
            moved if row.decode_tokens else "-",
            *([on_host] if hosted else []),
        ]
        if timed:
            assert row.timing is not None, "all rows have times, or none has"
            timing = row.timing.to_json()
            bounds = [timing["tpot_overlap_bound_s"], timing["tpot_serial_bound_s"]]
            cells += [
                *("-" if s is None else milliseconds(s) for s in (timing["ttft_p50_s"], timing["tpot_mean_s"])),
                "-" if None in bounds else " to ".join(map(milliseconds, bounds)),
                percent(timing["stall_share"]),
                count(row.timing.total.late),
                *(["-" if row.bound_s is None else milliseconds(row.bound_s)] if bounded else []),
            ]
        table.append(cells)
    notes = [f"in decode: hit rate of new tokens; loads{', loaded' * sized}: on demand and ahead"]
    if timed:
        notes.append("bound: loads and compute overlapped to in turn; stall: share of the time; late: late hits")
    if bounded:
        notes.append(
            "link+host: the bound, compute without experts and then misses at the rates of link and host together"
        )
    if hosted:
        read = "MB on host/token: weights" if sized else "on host/token: experts"
        notes.append(f"{read} that the host's cores read instead of a load; compare the sum of both")
    if any(row.trained_on for row in rows):
        notes.append("trained on: requests here that the predictor was trained on; on new ones it hits less")
    return TextTable(title=title, columns=columns, rows=table, num_keys=3 + split, notes=tuple(notes))
