"""Examples below a command's options in `--help`, on the embedded model."""

import inspect

import typer

_CLUSTER = "--cluster recipes/reference/cluster.toml"
_SERVERS = "--trace clinic=A --trace court=B --trace lab=C"

EXAMPLES = {
    "fit": (
        "moetool fit qwen3-30b-a3b --machine pc-rtx-4090-ddr5",
        "moetool fit org/model --memory 32GB --gpu-memory 24GB --disk-speed 3GB/s",
    ),
    "advise": ("moetool advise trace --out advice.html", "moetool advise counts --bandwidth nvme,20GB --json"),
    "capture": (
        "moetool capture reference --data all --max-prompts 8 --batch-size 8 --out trace",
        "moetool capture MODEL --data prompts.jsonl --device-memory 8GB --out trace",
    ),
    "train": (
        "moetool train expert_mlp --trace trace --out predictor --set fit.max_epochs=4",
        "moetool train awq_replica MODEL --data all --out replica",
    ),
    "evaluate": ("moetool evaluate predictor --trace trace",),
    "replay": (
        "moetool replay --trace trace --policy lru,lfu,belady --budget 12.5%,25%,50%",
        "moetool replay --trace trace --policy auto --budget 25% --profile profile.json",
    ),
    "serve": (
        "moetool serve org/model",
        "moetool serve reference --plan plan.json",
        "moetool serve reference --policy lru --device-memory 32MB --port 0",
        "moetool serve MODEL --plan placement.json --cluster local:3",
    ),
    "chat": ("moetool chat http://127.0.0.1:8000 --set temperature=0 --set max_tokens=64",),
    "verify": ("moetool verify reference --policy all --out report.md", "moetool verify org/model --prompts 8"),
    "simulate": (f"moetool simulate {_SERVERS} {_CLUSTER} --planner uniform,prism_exact --report page.html",),
    "report": (
        "moetool report trace --out trace.html",
        "moetool report placement.json --before old.json --trace clinic=A --out page.html",
    ),
    "profile": (
        "moetool profile reference --seconds 30 --predictor predictor --out profile.json",
        "moetool profile deepseek-v2-lite --config-only --out profile.json",
    ),
    "models": ("moetool models --json",),
    "data": ("moetool data",),
    "doctor": ("moetool doctor",),
    "cache": ("moetool cache", "moetool cache --remove all"),
    "demo": ("moetool demo --out moetool-demo",),
    "guide": ("moetool guide", "moetool guide quickstart", "moetool guide api key"),
    "plan cache": (
        "moetool plan cache --trace trace --device-memory 20MB --out plan.json",
        "moetool plan cache --trace trace --predictor predictor --profile profile.json "
        "--device-memory 8GB --target-tpot 80ms --out plan.json",
    ),
    "plan maps": ("moetool plan maps --trace trace --out maps --capacity 1000 --set source=topk",),
    "plan alpha": (
        "moetool plan alpha reference --data chat --device-memory 20MB --target-tpot 80ms --out plan.json "
        "--set rounds=1 --set tokens=24",
    ),
    "plan placement": (
        f"moetool plan placement {_SERVERS} {_CLUSTER} --planner prism_exact --out placement.json",
        f"moetool plan placement {_SERVERS} {_CLUSTER} --planner uniform --out even.json",
    ),
    "plan score": (f"moetool plan score placement.json {_SERVERS}",),
    "plan compare": (f"moetool plan compare {_SERVERS} {_CLUSTER} --planner uniform,prism,eplb --split 0.5",),
    "plan migrate": (f"moetool plan migrate old.json new.json {_SERVERS} --out moves.json",),
    "plan export": (
        "moetool plan export even.json --format sglang --out even.sglang.json",
        "moetool plan export placement.json --format ktransformers --out placement.ktransformers.pt",
    ),
    "bench serve": ("moetool bench serve reference --policy on_demand,lru,foresight --budget 25%,50% --data chat",),
    "bench policies": ("moetool bench policies --trace trace --trace other --budget 12.5%,25%,50%",),
    "bench predictors": ("moetool bench predictors --trace trace --predictor affinity,path_mlp --seeds 2",),
    "bench rivals": ("moetool bench rivals MODEL --gguf MODEL.gguf --llama-server llama.cpp/build/bin/llama-server",),
    "bench gpu": ("moetool bench gpu --routes .gpu --out results",),
    "bench cluster": ("moetool bench cluster reference --quick --out results",),
    "bench paper": ('moetool bench paper prism --quick --only "Figure 8" --out results',),
    "bench show": ("moetool bench show results/cluster.json --out figures",),
    "trace info": ("moetool trace info trace",),
    "trace head": ("moetool trace head trace --requests 10 --out short",),
    "trace split": (
        "moetool trace split trace --by task --out parts",
        "moetool trace split trace --by request --share 0.8 --out parts",
    ),
    "trace diff": ("moetool trace diff trace quantized-trace",),
    "trace merge": ("moetool trace merge parts/chat parts/code --out both",),
    "trace export": ("moetool trace export trace --format vllm_routed_experts --out routes",),
    "trace import": ("moetool trace import routes.csv --format route_csv --out trace --set task=law",),
}
"""Example lines by command."""


def explain(app: typer.Typer, words: tuple[str, ...] = ()) -> None:
    """Add examples to every command of an application, and join the lines of its help paragraphs."""
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        paragraphs = inspect.cleandoc(command.help or command.callback.__doc__ or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        lines = EXAMPLES[" ".join((*words, name))]
        command.epilog = "\n\n".join(("For example:" if len(lines) == 1 else "Examples:", *lines))
    for group in app.registered_groups:
        assert group.typer_instance is not None and group.name is not None
        explain(group.typer_instance, (*words, group.name))
