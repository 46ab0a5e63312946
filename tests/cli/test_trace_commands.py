"""`moetool trace`: what is recorded elsewhere comes in, goes out, and is parted and joined, from the command line."""

import json
from pathlib import Path

import pytest

from moetool.trace.reader import Trace
from moetool.trace.writer import TraceWriter
from tests import foreign, synthetic_routes, traces
from tests.command_line import Run

COMMAND = ("trace",)


def test_in_and_out(run: Run, tmp_path: Path) -> None:
    file = foreign.write_lines(tmp_path / "chat.jsonl", foreign.vllm_response("a"), foreign.vllm_response("b"))
    said = [f"--set={name}={value}" for name, value in foreign.SHAPE.items()]
    code, out, err = run("import", file, "--format", "vllm_routed_experts", "--out", tmp_path / "t", *said)
    assert code == 0, err
    assert "unnamed model, chat: 2 requests, 11 tokens" in out and "no weights" in out
    code, out, _ = run("info", tmp_path / "t")
    assert code == 0 and "3 MoE layers x 8 experts, top-2" in out
    code, out, err = run("export", tmp_path / "t", "--format", "sglang_stat", "--out", tmp_path / "s.pt", "--json")
    assert code == 0, err
    assert json.loads(out)["bytes"] == (tmp_path / "s.pt").stat().st_size
    code, out, err = run(
        "import", tmp_path / "s.pt", "--format", "sglang_stat", "--out", tmp_path / "c", "--set", f"model={tmp_path}/t"
    )
    assert code == 0, err
    assert "unnamed model, 7 passes, 11 tokens" in out
    code, out, _ = run("info", tmp_path / "c")
    assert code == 0 and "11 tokens; for 'moetool plan placement', not for replay" in out
    code, _, err = run("import", file, "--format", "vllm_routed_experts", "--out", tmp_path / "u")
    # which layers have experts is not in the file: a dense one looks like expert 0
    assert code == 3 and "layer 0" in err and "moe_layers=" in err
    code, _, err = run("import", file, "--format", "sglang_stat", "--out", tmp_path / "u", *said)
    assert code == 3 and "not a complete .pt file" in err and not (tmp_path / "u").exists()


def test_the_layers_with_experts_are_those_of_the_model(run: Run, tmp_path: Path) -> None:
    config = {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 64,
        "dtype": "bfloat16",
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    file = foreign.write_lines(tmp_path / "s.jsonl", foreign.sglang_native("a"))
    arguments = ("import", file, "--format", "sglang_routed_experts", "--set", f"model={tmp_path / 'model'}")
    code, out, err = run(*arguments, "--out", tmp_path / "t", "--json")
    assert code == 0, err
    assert json.loads(out)["model"] == "deepseek_v2:model"
    spec = Trace(tmp_path / "t").spec
    assert spec.layer_ids_L == (1, 2, 3) and spec.num_shared_experts == 1
    assert spec.expert_bytes_L == (3 * 32 * 16 * 2,) * 3
    file = foreign.write_lines(file, foreign.sglang_native("a", foreign.hidden_rows("a")[:, [1, 0, 2, 3]]))
    code, _, err = run(*arguments, "--out", tmp_path / "u")
    assert code == 3 and "layer 0 has experts, expected none" in err


def test_parted_and_joined(run: Run, tmp_path: Path) -> None:
    trace = synthetic_routes.write_trace(tmp_path / "t", num_requests=6, prompt_tokens=3, new_tokens=2)
    code, out, err = run("split", trace, "--by", "task", "--out", tmp_path / "tasks")
    assert code == 0, err
    assert [line.split(":")[0] for line in out.splitlines()] == [
        str(tmp_path / "tasks" / task) for task in ("arithmetic", "chat", "code")
    ]
    code, out, err = run("split", trace, "--by", "request", "--share", "0.5,0.25", "--out", tmp_path / "shares")
    assert code == 0 and len(out.splitlines()) == 3, err
    parts = sorted((tmp_path / "tasks").glob("*/"))
    code, out, err = run("merge", *parts, "--out", tmp_path / "m")
    assert code == 0 and "6 requests, 30 tokens, 4 MoE layers" in out, err
    code, _, err = run("split", trace, "--by", "request", "--share", "half", "--out", tmp_path / "x")
    assert code == 2 and "expected numbers, such as 0.8" in err


def test_a_trace_without_tasks(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = TraceWriter.add_request
    monkeypatch.setattr(TraceWriter, "add_request", lambda self, n, **facts: add(self, n, **{**facts, "task": ""}))
    traces.write(tmp_path / "t", traces.alone([(3, 2)]), [(3, 2)])
    code, out, err = run("info", tmp_path / "t")
    assert code == 0, err
    assert "d / - " in out
