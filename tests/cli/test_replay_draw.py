"""`moetool replay --draw`: loaded bytes and hit rate by memory."""

from pathlib import Path
from xml.etree import ElementTree

from moetool.trace.foreign.importing import import_trace
from tests.command_line import Run


def texts(file: Path) -> set[str | None]:
    return {text.text for text in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")}


def test_curves_of_every_policy(run: Run, trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "memory.svg"
    replay = ("replay", "--trace", trace, "--policy", "lru,belady", "--budget")
    code, out, err = run(*replay, "25%,50%", "--draw", file)
    assert code == 0 and "belady" in out, err
    assert {"lru", "belady", "hit rate", "memory for experts, MB"} <= texts(file)
    for arguments, fact in (
        (("25%", "--draw", tmp_path / "one.svg"), "two budgets"),
        (("25%,50%", "--draw", tmp_path / "one.gif"), "one.gif"),
        (("25%,50%", "--draw", file), str(file)),
    ):
        code, _, err = run(*replay, *arguments)
        assert code == 2 and fact in err


def test_experts_of_an_unknown_size_are_counted(run: Run, tmp_path: Path) -> None:
    rows = [f"{token},{layer},{(3 * token + layer) % 8}" for token in range(12) for layer in range(2)]
    (tmp_path / "f.csv").write_text("\n".join(["token,layer,expert", *rows]) + "\n")
    import_trace([tmp_path / "f.csv"], None, tmp_path / "t")
    file = tmp_path / "experts.svg"
    replay = ("replay", "--trace", tmp_path / "t", "--policy", "lru,auto", "--budget", "25%,50%")
    code, out, err = run(*replay, "--draw", file)
    assert code == 0 and "4 experts" in out and "loads/decode token" in out and "4 B" not in out + err, err
    assert "memory for 4 experts" in err
    assert {"experts loaded for each new token", "expert slots"} <= texts(file)
    code, out, _ = run("advise", tmp_path / "t", "--memory", "25%,50%", "--policy", "on_demand")
    assert code == 0 and "25 %" in out and "(4 B)" not in out
    for command in ("report", "plan placement"):
        assert f"moetool {command} " in out
    assert "moetool plan cache " not in out  # it needs a model's memory
    code, _, err = run("advise", tmp_path / "t", "--compute", "20ms")
    assert code == 2 and "expert_bytes" in err
    code, _, err = run("plan", "cache", "--trace", tmp_path / "t", "--out", tmp_path / "plan.json")
    assert code == 2 and "is imported" in err and "--config-only" in err and "deepseek-v2-lite" in err
